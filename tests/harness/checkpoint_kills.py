"""Attempts that save checkpoints and are killed at a file operation of the test's choice.

A kill point is the instant before the Nth file operation of an attempt, or the middle of its Nth write. The operations
are counted where Python calls the system (`sys.setprofile`): nothing is replaced, and none is missed.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from harness.ranks import start, wait_for_end, warm_parent
from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup


class KillPoint(NamedTuple):
    rank: int
    number: int
    within_write: bool = False
    """Count only writes, and kill when a part of the data is written."""


LOOKS_ONLY = {
    *("close", "fileno", "fspath", "fstat", "getcwd", "getpid", "listdir", "lstat"),
    *("readinto", "readlink", "scandir", "seek", "stat", "urandom"),
}
WRITES = {"write", "flush"}
PART_OF_A_WRITE = 100  # bytes; every file of a checkpoint has more


def kill_at(point: KillPoint) -> None:
    """From now on count the file operations of all threads that start, and die at the one named."""
    numbers = itertools.count(1)
    dies: list[int] = []

    def watch(_: Any, event: str, function: Any) -> None:
        if event == "c_call" and _is_counted(function, point.within_write) and next(numbers) == point.number:
            if not point.within_write:
                os.kill(os.getpid(), signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (PART_OF_A_WRITE, resource.RLIM_INFINITY))
            dies.append(threading.get_ident())
        elif event in ("c_return", "c_exception") and threading.get_ident() in dies:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(watch)
    sys.setprofile(watch)


def _is_counted(function: Any, writes_only: bool) -> bool:
    of_a_file = isinstance(getattr(function, "__self__", None), (io.FileIO, io.BufferedWriter))
    if not of_a_file and getattr(function, "__module__", None) not in ("posix", "io", "_io"):
        return False
    return function.__name__ in WRITES if writes_only else function.__name__ not in LOOKS_ONLY


@dataclass(frozen=True)
class Plan:
    """What an attempt saves after it has loaded the newest checkpoint."""

    root: Path
    versions: dict[int, int]
    """For each save, what it saves and how many steps it is after the one before; 0 replaces that."""
    attempt: str = "1"
    keep: int = 2
    ranks: int = 1


def state(version: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(5001.0) * version, "bias": torch.full((301,), version, dtype=torch.bfloat16)},
        "version": {"version": version},
    }


def version_of(loaded: RestoredCheckpoint | None) -> int:
    """What was saved, to the last bit; 0 for nothing."""
    if loaded is None:
        return 0
    version: int = loaded.shared["version"]["version"]
    for name, tensor in state(version)["model"].items():
        assert torch.equal(loaded.shared["model"][name], tensor), f"{name} of {loaded.path} is not what was saved"
    return version


def attempt(rank: int, rendezvous: str, plan: Plan, point: KillPoint | None, report: Callable[..., None]) -> None:
    if plan.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=plan.ranks,
            timeout=timedelta(seconds=30),
        )
        dist.barrier()
    group = dist.group.WORLD if plan.ranks > 1 else None
    store = Store(plan.root, attempt=plan.attempt, missing_seconds=0.0)
    if point is not None and point.rank == rank:
        kill_at(point)
    if rank == 0:
        store.clean()
    checkpointer = Checkpointer(store, RankGroup.of(group), keep=plan.keep)
    loaded = checkpointer.load_newest()
    step = loaded.step if loaded else 0
    report(loaded=version_of(loaded), local=loaded and loaded.local, set_aside=checkpointer.set_aside)
    for version, steps in plan.versions.items():
        step += steps
        checkpointer.save(step, state(version), {"rank": rank, "version": version}).wait()
        report(durable=version)
    checkpointer.close()


@dataclass
class Ended:
    """How one rank of an attempt ended, and what it had reported until then."""

    killed: bool
    durable: int = 0
    loaded: int | None = None
    local: Any = None
    set_aside: list[tuple[int, str]] = field(default_factory=list)
    problem: str = ""


def run(plan: Plan, point: KillPoint | None = None) -> list[Ended]:
    """Run an attempt to its end: how each rank ended."""
    with tempfile.TemporaryDirectory(prefix="jobkit-test-") as folder:
        children, pipes = [], []
        for rank in range(plan.ranks):
            ours, theirs = os.pipe()
            children.append(start(be_attempt, rank, f"{folder}/rendezvous", plan, point, stdout=theirs))
            os.close(theirs)
            pipes.append(ours)
        assert wait_for_end(*children), f"an attempt hangs: {plan}, {point}"
        return [_ended(warm_parent().poll(child), pipe) for child, pipe in zip(children, pipes, strict=True)]


def be_attempt(rank: int, rendezvous: str, plan: Plan, point: KillPoint | None) -> None:
    torch.set_num_threads(1)

    def report(**news: Any) -> None:
        os.write(1, json.dumps(news).encode() + b"\n")  # a pipe: it takes all of a line or, when killed, none

    try:
        attempt(rank, rendezvous, plan, point, report)
    except BaseException:
        report(problem=traceback.format_exc())
    os._exit(0)


def _ended(code: int | None, pipe: int) -> Ended:
    with open(pipe, "rb") as reports:
        news = {key: value for line in reports for key, value in json.loads(line).items()}
    return Ended(code == -signal.SIGKILL, **news)


FIRST = {1: 1, 2: 1, 3: 0, 4: 1}  # a new one, one more, that one again, and one for which the oldest has to go


def read(root: Path) -> int:
    """The version that a reader finds; nothing may have to be set aside for it."""
    # A copy: to read puts an interrupted replacement right.
    with tempfile.TemporaryDirectory(prefix="jobkit-test-") as directory:
        copy = Path(directory) / "copy"
        if root.exists():
            shutil.copytree(root, copy, symlinks=True)
        checkpointer = Checkpointer(Store(copy, missing_seconds=0.0))
        version = version_of(checkpointer.load_newest())
        assert checkpointer.set_aside == []
        return version


def possible(before: int, durable: int, plan: Plan) -> list[int]:
    """What the newest checkpoint may be: the last that was reported durable, or the one that was being saved."""
    versions = [before, *plan.versions]
    last = versions.index(durable or before)
    return versions[last : last + 2]


def untidy(root: Path) -> list[str]:
    """What is in the directory that does not belong there, or is not as it should be."""
    store = Store(root, missing_seconds=0.0)
    newest, *_ = names = [store.path(step).name for step in store.steps()]
    problems = [problem for step in store.steps() for problem in store.verify(step)]
    if (root / "latest").readlink() != Path(newest):
        problems.append(f"latest points to {(root / 'latest').readlink()}")
    return problems + sorted({path.name for path in root.iterdir()} - {"latest", *names})


def kill_one_attempt_and_the_next(root: Path, number: int, within_write: bool) -> bool:
    """Kill an attempt at its operation `number` and the next at another: nothing is lost. False past the last one."""
    plan = Plan(root, FIRST)
    (first,) = run(plan, KillPoint(0, number, within_write))
    if not first.killed:
        assert first.problem == ""
        return False
    newest = read(root)
    assert newest in possible(0, first.durable, plan), root

    plan = Plan(root, {11: number % 2}, attempt="2")
    (second,) = run(plan, KillPoint(0, 1 + 7 * number % 40))
    assert second.loaded in (None, newest), root

    (third,) = run(Plan(root, {21: 1}, attempt="3"))
    assert third.loaded in possible(newest, second.durable, plan), root
    assert (third.problem, third.set_aside, third.durable) == ("", [], 21), root
    assert untidy(root) == []
    assert len(Store(root).steps()) <= plan.keep
    shutil.rmtree(root)
    return True


def kill_one_of_two_ranks(root: Path, point: KillPoint) -> bool:
    """Kill one of two ranks, and let two others go on: nothing is lost. False past the last operation."""
    plan = Plan(root, FIRST, ranks=2)
    ended = run(plan, point)
    if not ended[point.rank].killed:
        return False
    newest = read(root)
    assert newest in possible(0, max(each.durable for each in ended), plan), root
    for other, each in enumerate(run(Plan(root, {11: 1}, attempt="2", ranks=2))):
        assert each == Ended(False, 11, newest, {"rank": other, "version": newest} if newest else None), root
    assert untidy(root) == []
    shutil.rmtree(root)
    return True
