"""Attempts that take snapshots in memory, and are killed at a call of the test's choice."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.ranks import Team, on_ranks
from harness.slots import Slots, checkpointer_with, new_slots
from jobkit.checkpoint.writer import Checkpointer

SHAPES = {"a": (300, 7), "b": (1001,), "c": (), "d": (0, 3), "e": (64, 64)}


def shared_state(step: int) -> dict[str, Any]:
    """Replicated tensors, no two alike, that say of which step they are."""
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {"model": {**tensors, "half": torch.full((9,), step, dtype=torch.bfloat16), "step": step}}


def sharded_state(team: Team, step: int) -> dict[str, Any]:
    """Every rank has some rows."""
    mesh = DeviceMesh.from_group(team.group, "cpu")
    rows = torch.arange(10 * 4, dtype=torch.float32).view(10, 4) + step
    return {"sharded": {"rows": distribute_tensor(rows, mesh, [Shard(0)])}}


def stage_state(rank: int, step: int) -> dict[str, Any]:
    """What one rank alone has, as of a pipeline."""
    return {f"stage#{rank}": {"weight": torch.full((5, rank + 1), 10.0 * step + rank)}}


def local_state(rank: int, step: int) -> dict[str, Any]:
    return {"rank": rank, "step": step, "numbers": torch.full((50,), rank * 1000 + step)}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


@dataclass(frozen=True)
class Attempt:
    """What the ranks of one attempt do: begin from what there is, then save at these steps."""

    slots: Slots
    root: Path
    in_memory: tuple[int, ...] = ()
    on_disk: tuple[int, ...] = ()
    ranks_per_node: int = 4
    sharded: bool = False
    number: int = 1
    trained: int = 0
    free: int | None = None


@dataclass(frozen=True)
class Began:
    step: int | None
    from_memory: bool
    durable: int | None
    extra: Any
    refused: list[tuple[int, str]]
    errors: list[str]
    takes_snapshots: bool


def begin(team: Team, attempt: Attempt) -> tuple[Checkpointer, Began]:
    """Start as a rank does, and check that what was found is all of it, to the last bit."""
    options: dict[str, Any] = {"attempt": attempt.number, "trained": attempt.trained}
    if attempt.free is not None:
        options["free"] = lambda: attempt.free
    checkpointer = checkpointer_with(team, attempt.slots, attempt.root, attempt.ranks_per_node, **options)
    templates = sharded_state(team, -1) if attempt.sharded else {}
    loaded = checkpointer.load_newest(templates)
    if loaded is None:
        return checkpointer, Began(None, False, None, None, checkpointer.refused, [], True)
    shared = {"model": loaded.shared["model"]}
    assert same(shared, shared_state(loaded.step)), "what was found is not what was saved"
    again = checkpointer.read(loaded, {"model": {}})
    assert same(again, shared_state(loaded.step)), "what was read again is not what was saved"
    for rank in range(loaded.manifest.world_size):
        name, tree = next(iter(stage_state(rank, loaded.step).items()))
        assert same(loaded.shared[name], tree)
    if attempt.sharded:
        rows = loaded.shared["sharded"]["rows"]
        assert isinstance(rows, DTensor)
        assert torch.equal(rows.to_local(), sharded_state(team, loaded.step)["sharded"]["rows"].to_local())
    if loaded.manifest.world_size == team.world_size:
        assert same(loaded.local, local_state(team.rank, loaded.step))
    return checkpointer, Began(
        loaded.step,
        loaded.snapshot is not None,
        loaded.durable_step,
        loaded.manifest.extra,
        checkpointer.refused,
        [],
        True,
    )


def save(checkpointer: Checkpointer, team: Team, step: int, sharded: bool = False, **where: bool) -> str | None:
    state = {**shared_state(step), **(sharded_state(team, step) if sharded else {}), **stage_state(team.rank, step)}
    held_by = {f"stage#{team.rank}": [team.rank]}
    extra = {"tensorboard": {"file": step}}
    saved = checkpointer.save(step, state, local_state(team.rank, step), lambda: extra, held_by=held_by, **where)
    error = saved.outcome().error
    return None if error is None else str(error)


def live(team: Team, attempt: Attempt) -> Began:
    checkpointer, began = begin(team, attempt)
    for step in sorted({*attempt.in_memory, *attempt.on_disk}):
        error = save(checkpointer, team, step, attempt.sharded, to_disk=step in attempt.on_disk)
        if error is not None:
            began.errors.append(error)
    checkpointer.wait()
    return Began(**{**vars(began), "takes_snapshots": checkpointer.takes_snapshots})


def run(attempt: Attempt, ranks: int = 2) -> Began:
    """The ranks of an attempt, to their end: what all of them began with alike."""
    first, *others = on_ranks(ranks, live, attempt)
    for other in others:
        assert other == first
    return first  # type: ignore[no-any-return]


# Killed at any instant


KILL_AT = {
    *("copy_", "pwrite", "ftruncate", "crc32", "dumps", "mmap", "fstat", "isend", "irecv", "gather", "allgather"),
    *("pread", "preadv", "readinto", "loads"),
}
"""What a snapshot is made and read by: a rank is killed before such a call, in the loop's thread or in the other."""


def kill_at(number: int) -> None:
    """From now on count such calls of all threads that start, and die before the one of that number."""
    numbers = itertools.count(1)

    def watch(_: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") in KILL_AT and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(watch)
    sys.setprofile(watch)


def die_at(team: Team, attempt: Attempt, dying: int, number: int) -> int:
    """Two snapshots, and the death of a rank during the next two; returns the last step that was kept."""
    checkpointer, _ = begin(team, attempt)
    for step in (1, 2):
        assert save(checkpointer, team, step, to_disk=False) is None
    if team.rank == dying:
        kill_at(number)
    kept = 2
    for step in (3, 4):
        if save(checkpointer, team, step, to_disk=False) is None:
            kept = step
    return kept


def kill_a_rank_in_a_snapshot(root: Path, per_node: int, dying: int, calls: Iterable[int]) -> int:
    """Kill one of two ranks at calls of a snapshot until there are no more: it costs no more than that one.

    Returns the first number of a call that was not reached.
    """
    for number in calls:
        with new_slots(2) as fresh:
            kept = on_ranks(2, die_at, Attempt(fresh, root, ranks_per_node=per_node), dying, number)
            found = run(Attempt(fresh, root, ranks_per_node=per_node, number=2))
        assert found.from_memory, f"nothing is left after a death at call {number}"
        assert found.step in (kept[1 - dying], kept[1 - dying] + 1), number
        if kept[dying] is not None:
            break
    assert found.step == 4
    return number


def die_while_beginning(team: Team, attempt: Attempt, dying: int, number: int) -> bool:
    """The death of a rank while all of them look for what to begin with."""
    if team.rank == dying:
        kill_at(number)
    with contextlib.suppress(Exception):  # the other rank's, which has lost its peer
        begin(team, attempt)
    return True


def kill_a_rank_that_begins(root: Path, slots: Slots, per_node: int, dying: int, calls: Iterable[int]) -> int:
    """Kill one of two ranks at calls while they begin from memory until there are no more: the next attempt does.

    Returns the first number of a call that was not reached.
    """
    run(Attempt(slots, root, (1, 2), ranks_per_node=per_node))
    for number in calls:
        attempt = Attempt(slots, root, ranks_per_node=per_node, number=2 * number)
        ended = on_ranks(2, die_while_beginning, attempt, dying, number)
        found = run(Attempt(slots, root, ranks_per_node=per_node, number=2 * number + 1))
        assert (found.step, found.from_memory) == (2, True), f"a death at call {number}"
        if ended[dying]:
            break
    return number
