"""Snapshots in memory: whole or absent after any death, verified, one choice for all ranks, never of a dead past."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from harness.slots import Slots, checkpointer_with, new_slots
from harness.snapshot_kills import (
    Attempt,
    begin,
    kill_a_rank_in_a_snapshot,
    kill_a_rank_that_begins,
    local_state,
    run,
    save,
    shared_state,
    stage_state,
)

from jobkit.checkpoint.free_memory import free_bytes
from jobkit.checkpoint.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def slots() -> Iterator[Slots]:
    with new_slots(4) as made:
        yield made


# A death, and the next attempt


@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_that_all_died_begin_with_the_newest_snapshot(
    root: Path, slots: Slots, ranks: int, per_node: int, sharded: bool
) -> None:
    if sharded and ranks == 1:
        pytest.skip("one rank has no shards")
    attempt = Attempt(slots, root, (1, 2, 3), ranks_per_node=per_node, sharded=sharded)
    assert run(attempt, ranks).step is None
    found = run(Attempt(slots, root, ranks_per_node=per_node, sharded=sharded, number=2), ranks)
    assert (found.step, found.from_memory, found.durable) == (3, True, None)
    assert found.extra == {"tensorboard": {"file": 3}}


def test_nothing_goes_to_the_disk_for_a_snapshot(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(1, 2)))
    assert not root.exists()


def test_a_checkpoint_is_a_snapshot_too_and_each_of_its_bytes_is_on_the_disk_once(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, on_disk=(5,), ranks_per_node=1))
    run(Attempt(slots, root / "other", on_disk=(5,), ranks_per_node=2))
    sizes = [
        sum(digest.size for name, digest in Store(folder).manifest(5).files.items() if name.startswith("rank"))
        for folder in (root, root / "other")
    ]
    assert sizes[0] == sizes[1]
    found = run(Attempt(slots, root / "other", ranks_per_node=2, number=2))
    assert (found.step, found.from_memory, found.durable) == (5, True, 5)


def test_the_newer_of_disk_and_memory_is_taken(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(1, 3), on_disk=(2,)))
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory, found.durable) == (3, True, 2)
    with new_slots(2) as others:
        found = run(Attempt(others, root, on_disk=(4,)))
    assert (found.step, found.from_memory, found.durable) == (2, False, 2)
    found = run(Attempt(slots, root, number=3))
    assert (found.step, found.from_memory, found.durable) == (4, False, 4)


def test_a_snapshot_is_kept_until_two_newer_ones_are_complete(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(7,)))
    for number in (2, 3):
        assert run(Attempt(slots, root, number=number)).step == 7, "attempts that die before their first snapshot"


def save_with_curves_in_memory(team: Team, attempt: Attempt) -> list[str | None]:
    """A snapshot, then a checkpoint whose curves the disk has not taken."""

    def fail() -> dict[str, Any]:
        raise OSError(errno.ENOSPC, "not all on the disk")

    checkpointer, _ = begin(team, attempt)
    held_by = {f"stage#{team.rank}": [team.rank]}
    state = {**shared_state(2), **stage_state(team.rank, 2)}
    first = save(checkpointer, team, 1, to_disk=False)
    second = checkpointer.save(2, state, local_state(team.rank, 2), dict, held_by=held_by, memory_extra=fail)
    third = checkpointer.save(3, state, held_by=held_by, memory_extra=fail, to_disk=False).outcome().error
    assert second.outcome().error is None
    return [first, str(third)]


def test_a_snapshot_whose_curves_are_not_on_the_disk_is_none(root: Path, slots: Slots) -> None:
    for first, third in on_ranks(2, save_with_curves_in_memory, Attempt(slots, root)):
        assert first is None
        assert third is not None
        assert "not all on the disk" in third
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory) == (2, False), "the checkpoint is newer than the snapshot"


def save_the_end(team: Team, attempt: Attempt) -> str | None:
    checkpointer, _ = begin(team, attempt)
    assert save(checkpointer, team, 1, to_disk=False) is None
    checkpointer.store.root = attempt.root.with_name("elsewhere")
    return save(checkpointer, team, 2, in_memory=False)


def test_the_last_checkpoint_is_no_snapshot(root: Path, slots: Slots) -> None:
    assert on_ranks(2, save_the_end, Attempt(slots, root)) == [None, None]
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory) == (1, True), "the result that a run ends with is on the disk, or nowhere"


def test_other_launchers_have_no_snapshots(root: Path) -> None:
    team = Team(0, 1, None)
    checkpointer = team.checkpointer(root)
    assert not checkpointer.takes_snapshots
    assert checkpointer.refused == []


# Damage


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_byte_is_refused_on_all_ranks_and_the_older_snapshot_taken(
    root: Path, slots: Slots, rank: int
) -> None:
    run(Attempt(slots, root, in_memory=(1, 2, 3)))
    slots.flip_a_byte(rank, 0)
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory) == (2, True)
    ((step, reason),) = found.refused
    assert step == 3
    assert f"what rank {rank} left has checksum" in reason


def test_two_flipped_bytes_leave_the_disk(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(2, 3), on_disk=(1,)))
    slots.flip_a_byte(0, 0)
    slots.flip_a_byte(1, 1)
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory) == (1, False)
    assert [step for step, _ in found.refused] == [3, 2]


def test_a_flipped_byte_in_what_a_slot_says_of_itself_is_named(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(1,)))
    slots.flip_a_byte(1, 0, os.fstat(slots.of_rank[1][0]).st_size - 50)
    found = run(Attempt(slots, root, number=2))
    assert found.step is None
    assert (1, "what rank 1 says of it does not match its checksum") in found.refused


def test_a_damaged_checkpoint_newer_than_the_snapshot_falls_back_to_the_snapshot(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(2,), on_disk=(1,)))
    with new_slots(2) as others:
        run(Attempt(others, root, on_disk=(3,)))
    file = Store(root).path(3) / "rank_00001.bin"
    file.write_bytes(b"x" * file.stat().st_size)
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory, found.durable) == (2, True, 1)


# Parents and nodes that are new


def test_a_rank_with_a_new_parent_on_the_same_node_leaves_the_disk(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(2,), on_disk=(1,)))
    slots.empty(1)
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory) == (1, False)
    assert found.refused == [(step, "nobody has what rank 1 left") for step in (2, 1)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("ranks", "per_node", "lost"), [(2, 1, (0,)), (4, 2, (0, 1)), (4, 2, (2, 3)), (3, 1, (1,))])
def test_a_lost_node_is_replaced_by_an_empty_one(
    root: Path, slots: Slots, ranks: int, per_node: int, lost: tuple[int, ...], sharded: bool
) -> None:
    run(Attempt(slots, root, (1, 2), ranks_per_node=per_node, sharded=sharded), ranks)
    for rank in lost:
        slots.empty(rank)
    found = run(Attempt(slots, root, (3,), ranks_per_node=per_node, sharded=sharded, number=2), ranks)
    assert (found.step, found.from_memory) == (2, True)
    found = run(Attempt(slots, root, ranks_per_node=per_node, sharded=sharded, number=3), ranks)
    assert (found.step, found.from_memory) == (3, True)


def test_two_neighbouring_nodes_lost_at_once_leave_the_disk(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(2,), on_disk=(1,), ranks_per_node=1), 3)
    slots.empty(0)
    slots.empty(1)
    found = run(Attempt(slots, root, ranks_per_node=1, number=2), 3)
    assert (found.step, found.from_memory) == (1, False)


def test_fewer_nodes_go_on_from_memory_with_what_the_neighbours_have(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, (2,), ranks_per_node=1), 3)
    found = run(Attempt(slots.only([0, 2]), root, (3,), ranks_per_node=1, number=2), 2)
    assert (found.step, found.from_memory) == (2, True)
    found = run(Attempt(slots.only([0, 2]), root, ranks_per_node=1, number=3), 2)
    assert (found.step, found.from_memory) == (3, True)


def test_fewer_ranks_on_one_node_leave_the_disk(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(2,), on_disk=(1,), ranks_per_node=2), 2)
    found = run(Attempt(slots, root, ranks_per_node=1, number=2), 1)
    assert (found.step, found.from_memory) == (1, False)


# Dead pasts


def test_a_past_that_was_given_up_never_comes_back(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(8, 9), on_disk=(1,)))
    slots.flip_a_byte(0, 0)
    slots.flip_a_byte(0, 1)
    assert run(Attempt(slots, root, number=2)).step == 1
    slots.flip_a_byte(0, 0)
    slots.flip_a_byte(0, 1)
    assert run(Attempt(slots, root, in_memory=(2,), number=3)).step == 1, "whole again, and still of a dead past"
    assert run(Attempt(slots, root, number=4)).step == 2


def test_a_node_that_was_away_does_not_bring_its_own_past_back(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(9,), on_disk=(1,), ranks_per_node=1), 1)
    away = slots.only([1])
    assert run(Attempt(away, root, in_memory=(2,), ranks_per_node=1, number=2), 1).step == 1
    found = run(Attempt(slots, root, ranks_per_node=1, number=3, trained=2), 1)
    assert (found.step, found.from_memory) == (1, False)
    assert found.refused == [(step, "the run has gone on without it") for step in (9, 1)]


def test_a_node_that_was_away_meets_those_that_went_on(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(9,), on_disk=(1,), ranks_per_node=1), 1)
    run(Attempt(slots.only([1]), root, in_memory=(2,), ranks_per_node=1, number=2), 1)
    found = run(Attempt(slots, root, ranks_per_node=1, number=3, trained=1), 2)
    assert (found.step, found.from_memory) == (2, True)


def live_as_another_run(team: Team, slots: Slots, root: Path) -> int | None:
    loaded = checkpointer_with(team, slots, root, 1, run="other").load_newest()
    return loaded.step if loaded is not None else None


def test_snapshots_of_another_run_are_not_touched(root: Path, slots: Slots) -> None:
    run(Attempt(slots, root, in_memory=(1,)), 1)
    assert on_ranks(1, live_as_another_run, slots, root) == [None]


# Killed at any instant


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_rank_killed_at_any_instant_of_a_snapshot_costs_no_more_than_that_one(
    root: Path, per_node: int, dying: int
) -> None:
    calls = itertools.count(2 * dying + per_node, 11)  # every eleventh, and others in each of the four cases
    assert kill_a_rank_in_a_snapshot(root, per_node, dying, calls) > 20


@pytest.mark.parametrize(("per_node", "dying"), [(1, 0), (2, 1)])
def test_a_rank_killed_while_it_begins_from_memory_leaves_the_snapshot_to_the_next(
    root: Path, slots: Slots, per_node: int, dying: int
) -> None:
    assert kill_a_rank_that_begins(root, slots, per_node, dying, itertools.count(per_node, 7)) > 4


def die_at_once(team: Team, attempt: Attempt) -> None:
    checkpointer, _ = begin(team, attempt)
    save(checkpointer, team, 1, to_disk=False)
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_in_shared_memory_after_the_death_of_all(root: Path) -> None:
    before = sorted(Path("/dev/shm").iterdir())
    with new_slots(2) as made:
        on_ranks(2, die_at_once, Attempt(made, root))
        assert made.bytes_held > 0
    assert sorted(Path("/dev/shm").iterdir()) == before


# Bounded


def test_too_little_memory_turns_snapshots_off_on_all_ranks_and_gives_it_back(root: Path, slots: Slots) -> None:
    found = run(Attempt(slots, root, in_memory=(1, 3), on_disk=(2,), free=100_000))
    assert not found.takes_snapshots
    assert "they need 0 MiB a node and may take 25% of the 0 MiB free; none in this attempt" in found.errors[0]
    assert slots.bytes_held < 100_000
    found = run(Attempt(slots, root, number=2))
    assert (found.step, found.from_memory) == (2, False)


def test_a_checkpoint_is_written_where_there_is_no_room_for_a_snapshot(root: Path, slots: Slots) -> None:
    found = run(Attempt(slots, root, on_disk=(1, 2), free=0))
    assert found.errors == []
    assert Store(root).verify(2) == []


def save_with_a_limit(team: Team, slots: Slots, root: Path) -> tuple[Any, bool]:
    state = {"x": {"x": torch.ones(1 << 18)}}
    checkpointer = checkpointer_with(team, slots, root, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + 2048, limits[1]))  # a page more is too much
    error = checkpointer.save(1, state).outcome().error
    return error and str(error), checkpointer.takes_snapshots


def test_a_checkpoint_is_written_where_the_system_has_no_memory_for_a_snapshot(root: Path, slots: Slots) -> None:
    assert on_ranks(1, save_with_a_limit, slots, root) == [(None, False)]
    assert Store(root).verify(1) == []


def test_a_state_that_grows_and_shrinks_is_kept_whole(root: Path, slots: Slots) -> None:
    checkpointer = checkpointer_with(Team(0, 1, None), slots, root, 1)
    assert checkpointer.load_newest() is None
    for step, size in enumerate([10, 1_000_000, 3, 500_000]):
        assert checkpointer.save(step, {"x": {"x": torch.full((size,), step)}}, to_disk=False).wait().error is None
        loaded = checkpointer_with(Team(0, 1, None), slots, root, 1, attempt=1).load_newest()
        assert loaded is not None
        assert torch.equal(loaded.shared["x"]["x"], torch.full((size,), step))
    assert slots.bytes_held < 8 * 1_500_000 + 100_000


LIMITS = [
    ("no control group", {"self": "", "files": {}}, 8 << 30),
    ("no limit", {"self": "0::/job", "files": {"job/memory.max": "max", "job/memory.current": "5"}}, 8 << 30),
    ("of the job", {"self": "0::/job", "files": {"job/memory.max": "4000", "job/memory.current": "1000"}}, 3000),
    (
        "of the group above, and with files in the page cache",
        {
            "self": "0::/job/step",
            "files": {
                "job/memory.max": "4000",
                "job/memory.current": "1000",
                "job/memory.stat": "anon 5\ninactive_file 500\n",
            },
        },
        3500,
    ),
    (
        "version 1",
        {
            "self": "5:cpu:/x\n4:memory:/slurm/job",
            "files": {
                "memory/slurm/job/memory.limit_in_bytes": "4000",
                "memory/slurm/job/memory.usage_in_bytes": "4500",
            },
        },
        0,
    ),
]


@pytest.mark.parametrize(("system", "free"), [row[1:] for row in LIMITS], ids=[row[0] for row in LIMITS])
def test_free_memory_is_what_the_machine_and_the_control_groups_leave(
    tmp_path: Path, system: dict[str, Any], free: int
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in system["files"].items()}
    files |= {"proc/self/cgroup": system["self"], "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8388608 kB\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_bytes(tmp_path) == free


def test_this_machine_has_free_memory() -> None:
    assert free_bytes() > 1 << 20
