"""Checkpoints after kill -9 at every operation on their files, and after every kind of damage to them.

A kill point is the instant before the Nth file operation of an attempt, or the middle of its Nth write. The operations
are counted where Python calls the system (`sys.setprofile`): nothing is replaced, and none is missed.
"""

from __future__ import annotations

import io
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor", "jobkit.checkpoint.writer"])

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# An attempt, as a run makes it, that may be killed at one of its file operations


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
    store = Store(plan.root, attempt=plan.attempt, patience=0.0)
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


# Processes are forked off one that has everything imported: an attempt takes hundredths of a second.


@dataclass
class Ended:
    """How one rank of an attempt ended, and what it had reported until then."""

    killed: bool
    durable: int = 0
    loaded: int | None = None
    local: Any = None
    set_aside: list[tuple[int, str]] = field(default_factory=list)
    problem: str = ""


def fork_attempts(pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        plan, point = pipe.recv()
        with tempfile.TemporaryDirectory(prefix="jobkit-test-") as directory:
            ranks = [_fork(rank, f"{directory}/rendezvous", plan, point) for rank in range(plan.ranks)]
            pipe.send([_wait(*rank) for rank in ranks])


def _fork(rank: int, rendezvous: str, plan: Plan, point: KillPoint | None) -> tuple[int, int]:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours

    def report(**news: Any) -> None:
        os.write(theirs, json.dumps(news).encode() + b"\n")

    try:
        attempt(rank, rendezvous, plan, point, report)
    except BaseException:
        report(problem=traceback.format_exc())
    os._exit(0)


def _wait(pid: int, pipe: int) -> Ended:
    status = os.waitpid(pid, 0)[1]
    with open(pipe, "rb") as reports:
        news = {key: value for line in reports for key, value in json.loads(line).items()}
    return Ended(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, **news)


Run = Callable[..., "list[Ended]"]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run an attempt to its end: `run(plan, kill_point)` gives how each rank ended."""
    ours, theirs = FORKSERVER.Pipe()
    server = FORKSERVER.Process(target=fork_attempts, args=(theirs,), daemon=True)
    server.start()
    theirs.close()

    def run_attempt(plan: Plan, point: KillPoint | None = None) -> list[Ended]:
        ours.send((plan, point))
        assert ours.poll(60), f"an attempt hangs: {plan}, {point}"
        ended: list[Ended] = ours.recv()
        return ended

    yield run_attempt
    server.kill()
    server.join()


# Killed


FIRST = {1: 1, 2: 1, 3: 0, 4: 1}  # a new one, one more, that one again, and one for which the oldest has to go


def read(root: Path) -> int:
    """The version that a reader finds; nothing may have to be set aside for it."""
    with tempfile.TemporaryDirectory(
        prefix="jobkit-test-"
    ) as directory:  # a read puts an interrupted replacement right
        copy = Path(directory) / "copy"
        if root.exists():
            shutil.copytree(root, copy, symlinks=True)
        checkpointer = Checkpointer(Store(copy, patience=0.0))
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
    store = Store(root, patience=0.0)
    newest, *_ = names = [store.path(step).name for step in store.steps()]
    problems = [problem for step in store.steps() for problem in store.verify(step)]
    if (root / "latest").readlink() != Path(newest):
        problems.append(f"latest points to {(root / 'latest').readlink()}")
    return problems + sorted({path.name for path in root.iterdir()} - {"latest", *names})


@pytest.mark.parametrize("within_write", [False, True])
def test_an_attempt_and_the_next_one_killed_at_any_file_operation_lose_nothing(
    run: Run, tmp_path: Path, within_write: bool
) -> None:
    kills = 0
    for number in itertools.count(1):
        root = tmp_path / str(number)
        plan = Plan(root, FIRST)
        (first,) = run(plan, KillPoint(0, number, within_write))
        if not first.killed:
            assert first.problem == ""
            break
        newest = read(root)
        assert newest in possible(0, first.durable, plan), root

        plan = Plan(root, {11: number % 2}, attempt="2")
        (second,) = run(plan, KillPoint(0, 1 + 7 * number % 40))
        assert second.loaded in (None, newest), root
        kills += first.killed + second.killed

        (third,) = run(Plan(root, {21: 1}, attempt="3"))
        assert third.loaded in possible(newest, second.durable, plan), root
        assert (third.problem, third.set_aside, third.durable) == ("", [], 21), root
        assert untidy(root) == []
        assert len(Store(root).steps()) <= plan.keep
        shutil.rmtree(root)
    assert kills >= (30 if within_write else 200), "kill points"


@pytest.mark.parametrize(("rank", "within_write", "every"), [(0, False, 5), (0, True, 2), (1, False, 1), (1, True, 1)])
def test_a_rank_killed_at_any_file_operation_loses_nothing_and_hangs_nobody(
    run: Run, tmp_path: Path, rank: int, within_write: bool, every: int
) -> None:
    for number in itertools.count(1, every):
        root = tmp_path / str(number)
        plan = Plan(root, FIRST, ranks=2)
        ended = run(plan, KillPoint(rank, number, within_write))
        if not ended[rank].killed:
            break
        newest = read(root)
        assert newest in possible(0, max(each.durable for each in ended), plan), root
        for other, each in enumerate(run(Plan(root, {11: 1}, attempt="2", ranks=2))):
            assert each == Ended(False, 11, newest, {"rank": other, "version": newest} if newest else None), root
        assert untidy(root) == []
        shutil.rmtree(root)
    assert number >= 10, "kill points"


# Damaged


@pytest.fixture(scope="module")
def four_of_two_ranks(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("four") / "checkpoints"
    run(Plan(root, dict.fromkeys([1, 2, 3, 4], 1), keep=4, ranks=2))
    return root


@pytest.fixture
def four(four_of_two_ranks: Path, tmp_path: Path) -> Path:
    """Versions 1 to 4 as steps 1 to 4."""
    return Path(shutil.copytree(four_of_two_ranks, tmp_path / "checkpoints", symlinks=True))


def tear(path: Path) -> None:
    """Zero what a lost power supply did not let through."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))


def flip_a_bit(path: Path, position: int = 99) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def take_that_of_the_step_before(path: Path) -> None:
    shutil.copy(path.parent.with_name("step_00000003") / path.name, path)


def make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def remove_all_files(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def make_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("no directory\n")


DAMAGES = [
    ("rank_00000.bin", tear, "rank_00000.bin has checksum"),
    ("rank_00001.bin", empty, "rank_00001.bin has 0 bytes"),
    ("rank_00001.bin", take_that_of_the_step_before, "rank_00001.bin has checksum"),
    ("rank_00001.bin", make_a_directory, "rank_00001.bin cannot be read: Is a directory"),
    ("rank_00000.bin", make_a_dangling_link, "rank_00000.bin is missing"),
    ("index.pickle", tear, "index.pickle has checksum"),
    ("index.pickle", empty, "index.pickle has 0 bytes"),
    ("index.pickle", Path.unlink, "index.pickle is missing"),
    ("manifest.json", tear, "manifest.json is not valid"),
    ("manifest.json", flip_a_bit, "manifest.json is not valid"),
    ("manifest.json", empty, "manifest.json is not valid"),
    ("manifest.json", take_that_of_the_step_before, "manifest.json is that of step 3"),
    ("manifest.json", make_a_directory, "manifest.json cannot be read: Is a directory"),
    ("", remove_all_files, "manifest.json is missing"),
    ("", make_a_file, "manifest.json is missing"),
]


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGES)
def test_damage_is_set_aside_and_named_and_the_checkpoint_before_is_used(
    four: Path, file: str, damage: Callable[[Path], None], reason: str
) -> None:
    damage(four / "step_00000004" / file)
    checkpointer = Checkpointer(Store(four, patience=0.0), keep=4)
    assert version_of(checkpointer.load_newest()) == 3
    [(step, named)] = checkpointer.set_aside
    assert step == 4
    assert reason in named
    assert (four / "latest").readlink() == Path("step_00000003")
    if (four / "step_00000004.corrupt").is_dir():
        assert (four / "step_00000004.corrupt" / "REASON").read_text() == named + "\n"
    checkpointer.save(4, state(5)).wait()
    assert version_of(checkpointer.load_newest()) == 5
    assert untidy(four) == ["step_00000004.corrupt"]


def test_the_two_newest_damaged_at_once_are_both_set_aside(run: Run, four: Path) -> None:
    empty(four / "step_00000004" / "manifest.json")
    tear(four / "step_00000003" / "rank_00001.bin")
    for rank, ended in enumerate(run(Plan(four, {11: 1}, ranks=2))):
        assert (ended.loaded, ended.local, ended.durable) == (2, {"rank": rank, "version": 2}, 11)
        assert [step for step, _ in ended.set_aside] == [4, 3]
    assert untidy(four) == ["step_00000003.corrupt", "step_00000004.corrupt"]
    assert read(four) == 11


def test_where_all_are_damaged_all_are_set_aside_and_the_run_starts_from_nothing(run: Run, four: Path) -> None:
    tear(four / "step_00000001" / "manifest.json")
    (four / "step_00000002" / "index.pickle").unlink()
    make_a_file(four / "step_00000003")
    empty(four / "step_00000004" / "rank_00001.bin")
    copy = Path(shutil.copytree(four, four.with_name("copy"), symlinks=True))
    checkpointer = Checkpointer(Store(copy, patience=0.0))
    assert checkpointer.load_newest() is None
    corrupt = [f"step_{step:08d}.corrupt" for step in (1, 2, 3, 4)]
    assert sorted(path.name for path in copy.iterdir()) == corrupt

    for ended in run(Plan(four, {11: 1}, ranks=2)):
        assert (ended.loaded, ended.durable) == (0, 11)
        assert [step for step, _ in ended.set_aside] == [4, 3, 2, 1]
    assert untidy(four) == corrupt
    assert Store(four).steps() == [1]


def test_kill_9_while_damage_is_set_aside_leaves_none_in_use_and_none_unnamed(run: Run, four: Path) -> None:
    tear(four / "step_00000004" / "index.pickle")
    (four / "step_00000003" / "manifest.json").unlink()
    for number in itertools.count(1):
        root = four.with_name(str(number))
        shutil.copytree(four, root, symlinks=True)
        (first,) = run(Plan(root, {}), KillPoint(0, number))
        if not first.killed:
            break
        (second,) = run(Plan(root, {11: 1}, attempt="2"))
        assert (second.loaded, second.durable, second.problem) == (2, 11, ""), root
        assert untidy(root) == ["step_00000003.corrupt", "step_00000004.corrupt"]
        assert "manifest.json is missing" in (root / "step_00000003.corrupt" / "REASON").read_text()
        assert "index.pickle has checksum" in (root / "step_00000004.corrupt" / "REASON").read_text()
    assert number > 20, "kill points"


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    store = Store(tmp_path, patience=0.0)
    Checkpointer(store).save(1, {"x": [1, torch.ones(3)]}).wait()
    for path in store.path(1).iterdir():
        for position in range(path.stat().st_size):
            flip_a_bit(path, position)
            assert store.verify(1) != [], f"byte {position} of {path.name}"
            flip_a_bit(path, position)  # back
    assert store.verify(1) == []


def test_a_checkpoint_that_became_a_file_during_the_run_is_replaced_and_removed(tmp_path: Path) -> None:
    checkpointer = Checkpointer(Store(tmp_path, patience=0.0), keep=1)
    for version, step in ((1, 1), (2, 1), (3, 1), (4, 2)):
        checkpointer.save(step, state(version)).wait()
        checkpointer.wait()
        assert untidy(tmp_path) == []
        assert read(tmp_path) == version
        make_a_file(tmp_path / f"step_{step:08d}")


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_something_else_called_latest_does_not_matter(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "latest")
    checkpointer = Checkpointer(Store(tmp_path))
    for version in (1, 2):
        checkpointer.save(version, state(version)).wait()
        checkpointer.wait()
        assert read(tmp_path) == version
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000001", "step_00000002"}
