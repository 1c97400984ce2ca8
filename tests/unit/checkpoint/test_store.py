"""The folder of checkpoints: whole or not at all, and the newest is never given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobkit.checkpoint.store import MANIFEST, Manifest, Store


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
    publish(store, 1, 2, 3, 4)
    assert [store.make_room({1}) for _ in range(3)] == [2, 3, None]
    assert store.steps() == [4, 1]


def test_leftovers_of_killed_writers_are_cleaned(store: Store) -> None:
    publish(store, 1)
    Store(store.folder, "killed").begin(2)
    store.clean()
    assert sorted(entry.name for entry in store.folder.iterdir()) == ["latest", "step_00000001"]


def test_a_writer_killed_between_two_names_of_one_step_loses_neither(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ctx.epochs without ctx.batches: every checkpoint of an epoch has the same step."""
    publish(store, 7)
    again = Store(store.folder, "2")
    folder = again.begin(7)
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path == folder:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        again.publish(folder, Manifest(step=7, world_size=2, shards={}))
    assert store.steps() == []
    store.clean()
    manifest = Manifest.read(store.path(7))
    assert manifest is not None
    assert manifest.world_size == 2
    assert sorted(entry.name for entry in store.folder.iterdir()) == ["latest", "step_00000007"]


def test_a_checkpoint_that_a_reader_keeps_from_being_deleted_is_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", lambda *_, **__: exec("raise OSError(39, 'Directory not empty')"))
        store.trim(1)
    assert store.steps() == [2]


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


def test_a_manifest_with_a_changed_byte_is_none(store: Store) -> None:
    publish(store, 7)
    file = store.path(7) / MANIFEST
    assert Manifest.read(store.path(7)) == Manifest(step=7, world_size=1, shards={})
    file.write_text(file.read_text().replace('"step": 7', '"step": 9'))
    assert Manifest.read(store.path(7)) is None


def test_a_best_checkpoint_that_is_set_aside_is_the_best_no_more(store: Store) -> None:
    publish(store, 7, 8)
    store.mark_best(7, 0.5)
    store.set_aside(7)
    assert store.best() is None
    assert not (store.folder / "best").is_symlink()
