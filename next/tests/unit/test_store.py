"""The folder of checkpoints: whole or not at all, and the newest is never given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobkit.checkpoint.store import Manifest, Store


def publish(store: Store, *steps: int) -> None:
    for step in steps:
        store.publish(store.begin(step), Manifest(step=step, world_size=1, shards={}))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints", "1")


def test_a_checkpoint_has_its_name_once_it_is_published(store: Store) -> None:
    folder = store.begin(7)
    assert store.steps() == []
    store.publish(folder, Manifest(step=7, world_size=1, shards={}))
    assert store.steps() == [7]
    assert (store.folder / "latest").resolve().name == "step_00000007"


def test_the_same_step_again_takes_the_old_ones_place(store: Store) -> None:
    publish(store, 7, 7)
    assert [entry.name for entry in store.folder.iterdir() if not entry.is_symlink()] == ["step_00000007"]


def test_trimming_keeps_the_newest_and_the_best(store: Store) -> None:
    publish(store, 1, 2, 3, 4)
    store.mark_best(1, 0.5)
    store.trim(2, {1})
    assert store.steps() == [4, 3, 1]
    assert store.best() == (1, 0.5)


def test_the_oldest_gives_way_but_never_the_newest(store: Store) -> None:
    publish(store, 1, 2, 3)
    assert [store.make_room({1}), store.make_room({1})] == [2, None]
    assert store.steps() == [3, 1]


def test_leftovers_of_killed_writers_are_cleaned(store: Store) -> None:
    publish(store, 1)
    Store(store.folder, "killed").begin(2)
    store.clean()
    assert sorted(entry.name for entry in store.folder.iterdir()) == ["latest", "step_00000001"]


def test_a_damaged_checkpoint_is_kept_under_another_name(store: Store) -> None:
    publish(store, 1, 2)
    store.set_aside(2)
    assert store.steps() == [1]
    assert (store.folder / "damaged_step_00000002").exists()


def test_a_manifest_that_is_torn_is_none(store: Store) -> None:
    publish(store, 1)
    file = store.path(1) / "manifest.json"
    file.write_text(file.read_text()[:-10])
    assert Manifest.read(store.path(1)) is None
