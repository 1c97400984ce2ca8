"""A disk that gets full or read-only under a run, really: small file systems, filled and emptied while it trains."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness.project import Project, describe, events, logged_steps, names, status, wait_for, weights
from safetensors.torch import save_file
from tensorboard.compat.proto.event_pb2 import Event

from jobkit.checkpoint.checkpoint_error import as_checkpoint_error
from jobkit.checkpoint.store import Store
from jobkit.errors import CheckpointError
from jobkit.group import RankGroup
from jobkit.log import configure, log
from jobkit.run import sweeps
from jobkit.run.config import Config
from jobkit.run.disk_errors import disk_errno
from jobkit.run.journal import Journal
from jobkit.supervisor.line import Line
from jobkit.supervisor.needs import need_of
from jobkit.supervisor.queue import take_at_once
from jobkit.worker.metrics import EventFile, rewind

STEPS = 200
EVERY = 10
RDONLY, REMOUNT = 1, 32

TASK = """
import os
import time
from pathlib import Path

import torch
from torch import nn

import jobkit.worker.finish

OUTSIDE = Path(os.environ["OUTSIDE"])


def train(ctx):
    finish = jobkit.worker.finish
    finish.FULL_DISK_PAUSES = ctx.params.get("pauses", finish.FULL_DISK_PAUSES)
    model = ctx.parallelize(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(100, 8)), global_batch_size=12)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    (OUTSIDE / f"pid_{ctx.rank}").write_text(str(os.getpid()))
    for step in ctx.steps(ctx.params.steps):
        (x,) = next(loader)
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})
        print(f"step {step} {'x' * 90}")
        with open(OUTSIDE / f"steps_{ctx.rank}.txt", "a") as file:
            file.write(f"{step}\\n")
        time.sleep(ctx.params.get("pace", 0.03))
    (OUTSIDE / f"returned_{ctx.rank}").touch()
    return {"loss": loss.item()}
"""


class SmallDisk:
    """A mounted file system of a few megabytes."""

    libc = ctypes.CDLL(None, use_errno=True)

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        if self.libc.mount(b"none", bytes(path), b"tmpfs", 0, b"size=4m") != 0:
            pytest.skip("mounting a small file system needs root")

    def fill(self) -> None:
        """Leave no block, nor the rest of one in a journal."""
        fd = os.open(self.path / "ballast", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with pytest.raises(OSError, match="No space left"):
            while True:
                os.write(fd, bytes(4096))
        os.close(fd)
        for journal in self.path.rglob("events.jsonl"):
            room = -journal.stat().st_size % 4096
            if room > 40:
                with journal.open("ab", buffering=0) as file:
                    file.write(b'{"time": 0, "event": "noise", "x": "'.ljust(room - 3, b"x") + b'"}\n')

    def empty(self) -> None:
        (self.path / "ballast").unlink()

    def read_only(self, on: bool) -> None:
        def remount() -> bool:  # refused while a file is open for writing
            return self.libc.mount(b"none", bytes(self.path), b"tmpfs", REMOUNT | (RDONLY if on else 0), b"") == 0

        wait_for("the remount", remount, seconds=240)

    def close(self) -> None:
        self.libc.umount2(bytes(self.path), 2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[Path], SmallDisk]]:
    """Mounts small disks, and unmounts them in the end."""
    mounted: list[SmallDisk] = []

    def mount(path: Path) -> SmallDisk:
        mounted.append(SmallDisk(path))
        return mounted[-1]

    yield mount
    for one in mounted:
        one.close()


class Run:
    """A project whose runs directory may be on a small disk, and what its ranks say of themselves elsewhere."""

    def __init__(self, path: Path, ranks: int = 1, *overrides: str) -> None:
        self.outside = path / "outside"
        self.outside.mkdir(parents=True)
        self.project = Project(path / "project", {"OUTSIDE": str(self.outside)})
        (self.project.path / "mytask.py").write_text(TASK)
        own = (f"params.steps={STEPS}", f"checkpoint.every={EVERY}", "resources.nodes=1")
        self.command = ("--local", *own, f"resources.tasks_per_node={ranks}", *overrides)
        self.path = self.project.run_of(*self.command[1:])

    def start(self) -> subprocess.Popen[str]:
        return self.project.start("submit", "toy.yaml", *self.command)

    @property
    def steps(self) -> list[int]:
        file = self.outside / "steps_0.txt"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def reach(self, step: int) -> None:
        wait_for(f"step {step}", lambda: self.steps and self.steps[-1] >= step, self.path, seconds=90)

    def end(self, process: subprocess.Popen[str], expect: int = 0) -> str:
        out, err = process.communicate(timeout=600)
        assert process.returncode == expect, f"{process.returncode}\n{out}\n{err}\n{describe(self.path)}"
        return err

    def log(self, stream: str = "out", attempt: int = 1) -> str:
        return (self.path / "logs" / str(attempt) / f"rank_0.{stream}").read_text()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """The weights of undisturbed runs, by their number of ranks."""
    found = {}
    for ranks in (1, 2):
        run = Run(tmp_path_factory.mktemp("undisturbed"), ranks, "+params.pace=0")
        run.end(run.start())
        found[ranks] = weights(run.path)
    return found


def test_a_run_goes_on_while_its_disk_is_full(
    tmp_path: Path, disk: Callable[[Path], SmallDisk], undisturbed: dict[int, bytes]
) -> None:
    run = Run(tmp_path, 2)
    small = disk(run.path.parent)
    process = run.start()
    run.reach(45)
    small.fill()
    full_at, full_since = run.steps[-1], time.time()
    safe = Store(run.path / "checkpoints").steps()[0]
    run.reach(full_at + 5 * EVERY)
    assert Store(run.path / "checkpoints").steps()[0] <= safe + EVERY  # one may have been under way
    assert Store(run.path / "checkpoints").verify(Store(run.path / "checkpoints").steps()[0]) == []
    small.empty()
    full_until = time.time()
    run.end(process)
    assert status(run.path)["state"] == "finished" and len(status(run.path)["attempts"]) == 1
    assert weights(run.path) == undisturbed[2]
    assert run.steps == list(range(STEPS))
    assert logged_steps(run.path) == list(range(STEPS))
    # The journal has everything, in order, at the time when it happened.
    journal = [event for event in events(run.path) if event["event"] != "noise"]
    failed = [event for event in journal if event["event"] == "checkpoint_failed"]
    assert len(failed) >= 4 and all("No space left" in event["error"] for event in failed)
    assert all(full_since - 1 < event["time"] < full_until + 1 for event in failed)
    assert [event["time"] for event in journal] == sorted(event["time"] for event in journal)
    assert [event["step"] for event in journal if event["event"] == "checkpoint"][-2:] == [STEPS - 1, STEPS]
    # So have the logs.
    lines = run.log().splitlines()
    assert [int(line.split()[1]) for line in lines if line.startswith("step ")] == list(range(STEPS))
    assert run.log("err").count("jobkit: the journal cannot be written: [Errno 28] No space left on device") == 1
    assert run.log("err").count("jobkit: the journal is written again") == 1
    assert run.log("err").count("TensorBoard's event file cannot be written") == 1


def test_a_run_goes_on_while_its_disk_is_read_only(
    tmp_path: Path, disk: Callable[[Path], SmallDisk], undisturbed: dict[int, bytes]
) -> None:
    run = Run(tmp_path)
    small = disk(run.path)
    # Files that are open for writing, as the ranks' logs, keep a file system from becoming read-only by a command.
    (tmp_path / "logs").mkdir()
    (run.path / "logs").symlink_to(tmp_path / "logs")
    process = run.start()
    run.reach(45)
    small.read_only(True)
    run.reach(run.steps[-1] + 5 * EVERY)
    small.read_only(False)
    run.end(process)
    assert weights(run.path) == undisturbed[1]
    assert run.steps == list(range(STEPS))
    assert logged_steps(run.path) == list(range(STEPS))
    failed = [event for event in events(run.path) if event["event"] == "checkpoint_failed"]
    assert len(failed) >= 4 and all("Read-only file system" in event["error"] for event in failed)


def test_a_stop_while_the_disk_is_full_leaves_the_last_good_checkpoint(
    tmp_path: Path, disk: Callable[[Path], SmallDisk], undisturbed: dict[int, bytes]
) -> None:
    run = Run(tmp_path)
    small = disk(run.path.parent)
    process = run.start()
    run.reach(45)
    small.fill()
    run.reach(run.steps[-1] + 2 * EVERY)
    (safe, *_) = Store(run.path / "checkpoints").steps()
    rank = int((run.outside / "pid_0").read_text())
    os.kill(rank, signal.SIGTERM)
    wait_for("the end of the rank", lambda: not Path(f"/proc/{rank}/exe").exists(), run.path, seconds=240)
    small.empty()
    process.communicate(timeout=600)
    if status(run.path)["state"] != "finished":  # nobody but the rank was told to stop: it may have been started again
        run.end(run.start())
    assert status(run.path)["attempts"][1]["first_step"] >= safe  # from memory, where it was started again in place
    assert weights(run.path) == undisturbed[1]
    assert sorted(set(run.steps)) == list(range(STEPS))
    assert logged_steps(run.path) == list(range(STEPS))


def test_the_end_of_a_run_waits_for_a_full_disk(
    tmp_path: Path, disk: Callable[[Path], SmallDisk], undisturbed: dict[int, bytes]
) -> None:
    run = Run(tmp_path, 2)
    small = disk(run.path.parent)
    process = run.start()
    run.reach(STEPS - 10)
    small.fill()
    wait_for("the end of the function", (run.outside / "returned_0").exists, run.path)
    time.sleep(3)
    assert "finished" not in names(run.path)
    small.empty()
    run.end(process)
    assert "jobkit: cannot finish" in run.log("err")
    assert weights(run.path) == undisturbed[2]
    assert logged_steps(run.path) == list(range(STEPS))
    assert run.steps == list(range(STEPS))


def test_a_run_that_cannot_end_for_a_full_disk_is_continued(
    tmp_path: Path, disk: Callable[[Path], SmallDisk], undisturbed: dict[int, bytes]
) -> None:
    run = Run(tmp_path, 2, "+params.pauses=[0.5]")
    small = disk(run.path.parent)
    process = run.start()
    run.reach(STEPS - 10)
    small.fill()
    rank = int((run.outside / "pid_0").read_text())
    wait_for("the end of the rank", lambda: not Path(f"/proc/{rank}/exe").exists(), run.path, seconds=60)
    small.empty()
    process.communicate(timeout=600)
    if status(run.path)["state"] != "finished":  # it may have been started again at once
        run.end(run.start())
    assert len(status(run.path)["attempts"]) == 2
    assert weights(run.path) == undisturbed[2]
    assert logged_steps(run.path) == list(range(STEPS))


def test_what_waits_in_a_local_sweep_waits_for_a_full_disk(tmp_path: Path, disk: Callable[[Path], SmallDisk]) -> None:
    folder = tmp_path / "devices"
    machine = {"JOBKIT_CPU_SLOTS": "1", "JOBKIT_DEVICES_DIR": str(folder)}
    project = Project(tmp_path / "project", machine)
    (project.path / "quick.yaml").write_text("name: quick\ncommand: ['true']\nparams: {n: 0}\n")
    small = disk(project.path / "runs")
    used = take_at_once(need_of(Config(name="x", task="m:f"), {**os.environ, **machine}, queues=True))
    assert used is not None
    project.jobkit("submit", "quick.yaml", "--local", "--detach", "--sweep", "params.n=0,1,2")
    wait_for("its place in the line", lambda: Line(folder).tickets)
    small.fill()
    used.close()
    for _ in range(2):  # the slot is taken a second time: a run could not be started with it, and it was given back
        taken = (folder / "cpu-0").stat().st_mtime_ns
        wait_for("a try", lambda taken=taken: (folder / "cpu-0").stat().st_mtime_ns != taken, seconds=60)
    small.empty()
    for run in project.runs:
        wait_for("its end", lambda run=run: status(run)["state"] == "finished", run, seconds=120)
    wait_for("the end of the process that waited", lambda: not sweeps.has_runner(small.path, "quick/s1"))


def test_a_ghost_leaves_without_writing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    process = run.start()
    run.reach(45)
    rank = int((run.outside / "pid_0").read_text())
    os.kill(rank, signal.SIGSTOP)
    # What the next attempt does, which takes this one for dead.
    (run.path / "lease.json").write_text(json.dumps({"attempt": 2}))
    rewind(run.path / "tensorboard", {})
    (run.path / "progress.json").unlink()
    before = names(run.path)
    os.kill(rank, signal.SIGCONT)
    wait_for("the end of the ghost", lambda: not Path(f"/proc/{rank}/exe").exists(), run.path, seconds=240)
    process.communicate(timeout=600)
    assert "jobkit: attempt 2 has taken" in run.log("err")
    assert list((run.path / "tensorboard").iterdir()) == []
    assert not (run.path / "progress.json").exists()
    assert [name for name in names(run.path)[len(before) :] if name.startswith("checkpoint")] == []


def test_a_ghosts_event_file_stays_as_the_next_attempt_left_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "handlers", [])  # to have them back as they were
    monkeypatch.setattr(log, "propagate", log.propagate)
    configure()
    for size in (None, 30, 0):  # deleted, cut back, cut back to nothing
        ghost = EventFile(tmp_path, 0)
        for step in range(3):
            ghost.add(Event(step=step))
            ghost.write()
        assert ghost.path.stat().st_size == ghost.size > 30
        rewind(tmp_path, {} if size is None else {ghost.path.name: size})
        ghost.add(Event(step=3))
        ghost.write(durable=True)
        ghost.write()
        assert (ghost.path.stat().st_size if ghost.path.exists() else None) == size
        assert capsys.readouterr().err.count("no more is written to it") == 1


def test_an_attempt_that_may_not_write_makes_no_event_file(tmp_path: Path) -> None:
    allowed = False
    file = EventFile(tmp_path, 0, lambda: allowed)
    file.write(durable=True)
    assert list(tmp_path.iterdir()) == []
    allowed = True
    file.write()
    assert file.path.stat().st_size == file.size


def test_an_event_file_on_a_full_disk_has_whole_records_and_all_of_them_later(
    tmp_path: Path, disk: Callable[[Path], SmallDisk]
) -> None:
    small = disk(tmp_path / "small")
    file = EventFile(small.path, 0)
    file.write()
    small.fill()
    before = file.path.stat().st_size
    for step in range(500):
        file.add(Event(step=step))
    with pytest.raises(OSError, match="No space left"):
        file.write(durable=True)
    assert file.path.stat().st_size == before < file.size
    small.empty()
    with file.path.open("ab") as stream:
        stream.write(b"the rest of a write that could not be cut back")
    file.write(durable=True)
    assert file.path.stat().st_size == file.size


def test_a_journal_takes_back_the_half_of_a_line_that_a_full_disk_took(
    tmp_path: Path, disk: Callable[[Path], SmallDisk]
) -> None:
    small = disk(tmp_path / "small")
    journal = Journal(small.path / "events.jsonl")
    journal.append("first", text="x" * 3000)
    fd = os.open(small.path / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(fd, bytes(4096))
    os.close(fd)
    before = journal.path.read_bytes()
    with pytest.raises(OSError, match="No space left"):
        journal.append("second", text="y" * 3000)
    assert journal.path.read_bytes() == before
    small.empty()
    journal.append("second", time=12.5, text="y" * 3000)
    assert [event["event"] for event in journal.read()] == ["first", "second"]
    assert list(journal.read()[1]) == ["time", "event", "text"] and journal.read()[1]["time"] == 12.5


PRINTING = """
import os, sys, time
from pathlib import Path
from jobkit.worker.output import RetryingFile, survive_full_disks

before = sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.name, sys.stdout.mode
RetryingFile.KEPT_BYTES = int(sys.argv[2])
survive_full_disks()
assert before == (sys.stdout.fileno(), sys.stdout.encoding, sys.stdout.isatty(), sys.stdout.name, sys.stdout.mode)
assert sys.stderr.fileno() == 2 and sys.stderr.errors == "backslashreplace"
ballast = Path(sys.argv[1])

def fill():
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(4096))
    except OSError:
        os.close(fd)

print("\\u00e9 before")
fill()
for number in range(300):
    print(f"line {number} {'x' * 80}", flush=number % 2 == 0)
    sys.stdout.buffer.write(b"raw\\n")
pid = os.fork()
if pid == 0:
    print("from a child")
    os._exit(0)
os.waitpid(pid, 0)
ballast.unlink()
if sys.argv[3] == "more":
    print("after", flush=True)
"""


@pytest.mark.parametrize("option", ["-u", "-B"], ids=["unbuffered", "buffered"])
@pytest.mark.parametrize("kept", [1 << 20, 8000])
@pytest.mark.parametrize("more", ["more", "nothing"])
def test_printing_to_a_full_disk_does_not_raise(
    tmp_path: Path, disk: Callable[[Path], SmallDisk], option: str, kept: int, more: str
) -> None:
    small = disk(tmp_path / "small")
    log = small.path / "log"
    with log.open("ab") as out:
        subprocess.run(
            [sys.executable, option, "-c", textwrap.dedent(PRINTING), str(small.path / "ballast"), str(kept), more],
            stdout=out,
            check=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "\u00e9 before"
    assert (lines[-1] == "after") == (more == "more")
    printed = [int(line.split()[1]) for line in lines if line.startswith("line ") and line.endswith("x" * 80)]
    assert printed == sorted(set(printed)), "in order, none twice"
    if kept > 8000:
        assert printed == list(range(300))
        assert not any("were lost" in line for line in lines)
    else:
        (note,) = [line for line in lines if "lines were lost here: No space left on device" in line]
        before = [one for one in lines[: lines.index(note)] if one.startswith("line ") and one.endswith("x" * 80)]
        assert printed[: len(before)] == list(range(len(before))), "the only gap is where it says so"
        assert 0 < len(printed) < 300 and 2 * (300 - len(printed)) <= int(note.split()[1]) + 4


def test_other_errors_of_a_print_are_raised(tmp_path: Path) -> None:
    program = "from jobkit.worker.output import survive_full_disks\nsurvive_full_disks()\nprint('x' * 100, flush=True)"
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run([sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert "BrokenPipeError" in done.stderr


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (None, 0),
        (ValueError("x"), 0),
        (FileNotFoundError(errno.ENOENT, "x"), 0),
        (OSError(errno.EDQUOT, "x"), errno.EDQUOT),
        (chained(RuntimeError("x"), OSError(errno.EROFS, "x")), errno.EROFS),
        (chained(OSError(errno.EPERM, "x"), OSError(errno.ESTALE, "x")), errno.ESTALE),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), errno.ENOSPC),
    ],
    ids=str,
)
def test_what_is_the_disks_fault(error: Exception | None, number: int) -> None:
    assert disk_errno(error) == number


def test_a_full_disk_is_known_as_such_in_every_ranks_checkpoint_error() -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for ranks in (RankGroup.alone(), RankGroup(1, 2, lambda value: [(None, ("No space left", errno.ENOSPC)), value])):
        with pytest.raises(CheckpointError) as raised, as_checkpoint_error("the checkpoint was not written"):
            ranks.on_main(fail)
        assert disk_errno(pickle.loads(pickle.dumps(raised.value))) == errno.ENOSPC


def test_an_export_to_a_full_disk_is_known_as_such(tmp_path: Path, disk: Callable[[Path], SmallDisk]) -> None:
    small = disk(tmp_path / "small")
    small.fill()
    with pytest.raises(Exception, match="os error") as raised:
        save_file({"x": torch.ones(100_000)}, small.path / "x")
    assert disk_errno(raised.value) == errno.ENOSPC
