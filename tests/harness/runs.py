"""Run jobkit as a user does, and break what runs: one project folder, one run, words for deaths.

launch = Project(tmp_path).submit("--local", "--detach", steps=200)
launch.wait_for_step(40)
launch.kill_rank(1)
launch.wait_until_over()
assert [attempt.cause for attempt in launch.ends] == ["killed", "finished"]
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jobkit.run.journal import read_status
from jobkit.run.records import AttemptEnded
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.wire.pages import Page

T = TypeVar("T")

PATIENCE = float(os.environ.get("JOBKIT_TEST_PATIENCE", 300))
"""Seconds for anything that is sure to come: the tests pass on a busy machine too. `tools/test mutants` waits less."""

YAML = """\
name: scripted
task: scripted_rank:train
params: {steps: 100}
"""


def wait_until(look: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Return the first true value of `look()`; fail with `what` after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < deadline, f"still waiting after {seconds:g} s: {what}"
        time.sleep(0.02)
    return value


def with_params(params: Mapping[str, Any]) -> list[str]:
    """Return the words of a command that set params of YAML."""
    return [f"{'' if key == 'steps' else '+'}params.{key}={json.dumps(value)}" for key, value in params.items()]


def begin_with(folder: Path, module: str, lines: str) -> None:
    """Let each process of a program of jobkit's begin with lines of Python, where PYTHONPATH has this folder."""
    with (folder / "sitecustomize.py").open("a", encoding="utf-8") as file:
        file.write(f"import sys\nif {module!r} in sys.orig_argv:\n{textwrap.indent(lines, '    ')}\n")


class Project:
    """A user's folder with the scripted rank and an experiment in it."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str] | None = None, yaml: str = YAML, *, plain: bool = True
    ) -> None:
        self.folder = folder
        self.python = sys.executable
        self.account: dict[str, Any] = {}
        """Arguments of subprocess.run that make its commands another user's."""
        self.environment = dict(os.environ if environment is None else environment)
        self.environment.pop("JOBKIT_RUNS", None)
        if plain:
            self.environment["PLAIN_RANKS"] = "1"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).with_name("scripted_rank.py"), folder)
        self.yaml = folder / "exp.yaml"
        self.yaml.write_text(yaml, encoding="utf-8")

    def jobkit(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `python -m jobkit ARGUMENTS` to its end."""
        done = subprocess.run(self.words(*arguments), **self._options(), capture_output=True, timeout=600)
        assert not check or done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start `python -m jobkit ARGUMENTS` and return its process."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(self.words(*arguments), **{**self._options(), **pipes, **options})

    def submit(self, *arguments: str, **params: Any) -> Launch:
        """Submit the experiment with these params, and return its run; `arguments` say where."""
        done = self.jobkit("submit", str(self.yaml), *with_params(params), *arguments, "--json")
        return self.launch(json.loads(done.stdout)["dir"])

    def only_run(self, *others: Launch) -> Launch:
        """Return the run of this folder, beside these others, once it has begun."""
        known = {other.run.path for other in others}
        (path,) = wait_until(
            lambda: {file.parent for file in self.folder.glob("runs/*-*/events.jsonl")} - known, "a run directory"
        )
        return self.launch(path)

    def launch(self, path: Path | str) -> Launch:
        """Return the run in a directory."""
        return Launch(self, RunDir(path))

    def words(self, *arguments: str) -> list[str]:
        return [self.python, "-m", "jobkit", *arguments]

    def write(self, name: str, text: str) -> Path:
        """Write a file of the user's folder; returns its path."""
        file = self.folder / name
        file.write_text(text, encoding="utf-8")
        return file

    def begin_with(self, module: str, lines: str) -> None:
        """Let each process of a program of jobkit's, as `jobkit.supervisor.main`, begin with lines of Python."""
        folder = self.folder / "site"
        folder.mkdir(exist_ok=True)
        begin_with(folder, module, lines)
        paths = [str(folder), *self.environment.get("PYTHONPATH", "").split(os.pathsep)]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(paths)))

    def _options(self) -> dict[str, Any]:
        options = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL, "text": True}
        return {**self.account, **options}


class Launch:
    """A run of a project, and its processes."""

    def __init__(self, project: Project, run: RunDir) -> None:
        self.project, self.run = project, run

    # What its files say

    @property
    def status(self) -> Status:
        return read_status(self.run)

    @property
    def ends(self) -> list[AttemptEnded]:
        """How its attempts ended, without the one that runs."""
        return [attempt.ended for attempt in self.status.attempts if attempt.ended is not None]

    @property
    def causes(self) -> list[str]:
        return [ended.cause for ended in self.ends]

    @property
    def step(self) -> int:
        """Steps done by the newest attempt; -1 before its loop."""
        progress, attempt = self.run.progress(), self.status.attempt
        if progress is None or attempt is None or progress.attempt != attempt.number or progress.step is None:
            return -1
        return progress.step

    def wait_until(self, look: Callable[[Launch], Any], what: str) -> Launch:
        wait_until(lambda: look(self), what)
        return self

    def wait_for_attempt(self, number: int) -> Launch:
        """Wait until an attempt trains."""
        return self.wait_until(
            lambda me: (
                len(me.status.attempts) > number
                or (len(me.status.attempts) == number and (me.step > 0 or me.status.is_over))
            ),
            f"attempt {number} to train",
        )

    def wait_for_step(self, step: int) -> Launch:
        return self.wait_until(lambda me: me.step >= step or me.status.is_over, f"step {step}")

    def end_training(self) -> Launch:
        """Let scripted ranks end their loops now, before all of their steps."""
        (self.run.outputs / "enough").touch()
        return self

    def end_save(self) -> Launch:
        """Let scripted ranks that have `save_waits` end their saves."""
        (self.run.outputs / "may_save").touch()
        return self

    def wait_until_over(self) -> Launch:
        return self.wait_until(lambda me: me.status.is_over, "the end of the run")

    @property
    def steps_done(self) -> dict[int, list[int]]:
        """The steps of each attempt, as the scripted rank 0 wrote them down."""
        done: dict[int, list[int]] = {}
        for line in (self.run.outputs / "steps").read_text().splitlines():
            attempt, step = map(int, line.split())
            done.setdefault(attempt, []).append(step)
        return done

    def assert_repeated(self, *rows: str) -> None:
        """Compare what each attempt that trained has repeated with `none` or `since the checkpoint`, exactly.

        By the disk alone: the steps that are written down, and the names of checkpoints, which all stay.
        """
        done = self.steps_done
        names = sorted(int(folder.name.removeprefix("step_")) for folder in self.run.checkpoints.glob("step_*"))
        count = 0
        for row, steps in zip(("none", *rows), done.values(), strict=True):
            *older, newest = [0, 0, *(name for name in names if name <= count)]
            saved = {newest, older[-1]} if newest == count else {newest}  # it may have died before it saved this step
            assert steps[0] in ({count} if row == "none" else saved), (row, count, names, done)
            assert steps == list(range(steps[0], steps[0] + len(steps)))
            count = max(count, steps[-1] + 1)

    # Its processes

    def rank_pid(self, rank: int) -> int:
        """Return the process of a rank of the newest attempt, once it has begun."""
        file = self.run.outputs / "ranks" / str(rank)

        def look() -> int:
            attempt = self.status.attempt
            number, _, pid = (file.read_text() if file.exists() else "").partition(" ")
            return int(pid) if attempt is not None and number == str(attempt.number) and pid else 0

        return wait_until(look, f"rank {rank} to begin")

    def rank_nodes(self, ranks: int) -> list[str]:
        """Return the node of each rank of the newest attempt, by the variable that Slurm gave its agent."""
        environments = [Path(f"/proc/{self.rank_pid(rank)}/environ").read_text() for rank in range(ranks)]
        return [text.partition("SLURMD_NODENAME=")[2].partition("\0")[0] for text in environments]

    def page(self, rank: int) -> Page:
        """Return the page of a rank of the newest attempt: what it says there no disk can hold up."""
        for entry in Path(f"/proc/{self.rank_pid(rank)}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # a file that the rank has closed since the list was made
                if "memfd:jobkit-page" in str(entry.readlink()):
                    return Page(os.open(entry, os.O_RDWR))
        raise AssertionError(f"rank {rank} has no page")

    @property
    def supervisor_pid(self) -> int:
        lease = self.run.lease()
        assert lease is not None
        return lease.pid

    def agent_pid(self, rank: int = 0) -> int:
        """Return the process that forked a rank."""
        return parent_of(self.rank_pid(rank))

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> Launch:
        os.kill(self.rank_pid(rank), number)
        return self

    def kill_supervisor(self) -> Launch:
        os.kill(self.supervisor_pid, signal.SIGKILL)
        return self

    def kill_job_script(self) -> Launch:
        """Kill job.sh, and the supervisor that it waits for."""
        script = parent_of(self.supervisor_pid)
        os.kill(script, signal.SIGSTOP)  # it starts no other supervisor, and Slurm does not end this one for its death
        self.kill_supervisor()
        os.kill(script, signal.SIGKILL)
        return self

    def kill_agent(self, rank: int = 0) -> Launch:
        os.kill(self.agent_pid(rank), signal.SIGKILL)
        return self


def describe(path: Path) -> str:
    """Return the journal and the ends of the logs of a run."""
    logs = [*sorted(path.glob("logs/*/*")), RunDir(path).job_log]
    texts = [f"--- {log.relative_to(path)}\n{log.read_text(errors='replace')[-2000:]}" for log in logs if log.exists()]
    return "\n".join([RunDir(path).journal_file.read_text(encoding="utf-8"), *texts])


def describe_slurm(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield Slurm's words about its jobs and nodes, and the end of its controller's log."""
    for words in (["scontrol", "show", "job"], ["sinfo", "--Node", "--format=%N %T %E"]):
        done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace")
        yield f"--- {' '.join(words)}\n{done.stdout}{done.stderr}"
    yield (Path(environment["SLURM_CONF"]).parent / "log/slurmctld.log").read_text(errors="replace")[-5000:]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
