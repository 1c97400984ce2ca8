"""A small project of a user's, and how the tests run jobkit's commands in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASK = Path(__file__).with_name("toy_task.py").read_text()

YAML = """\
name: toy
task: mytask:train
params: {steps: 60, sleep: 0, workers: 0, started_by: null}
resources: {nodes: 2, tasks_per_node: 2, time: "0:05:00"}
clusters: {slurm: {partition: low}}
"""


class Project:
    """A folder with a task and a YAML, as a user has it, and the commands typed there."""

    def __init__(self, path: Path, environment: dict[str, str] | None = None) -> None:
        self.path = path
        # One thread a rank; nothing of a developer's own configuration.
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "JOBKIT_CONFIG": str(path / "none.yaml"),
            **(environment or {}),
        }
        self.env.pop("JOBKIT_RUNS", None)
        path.mkdir(parents=True, exist_ok=True)
        (path / "mytask.py").write_text(TASK)
        (path / "toy.yaml").write_text(YAML)

    @property
    def runs(self) -> list[Path]:
        """The run directories, by name."""
        return sorted(path.parent for path in self.path.glob("runs/*/config.yaml"))

    def run_of(self, *overrides: str) -> Path:
        """The run directory that a submission with these overrides has."""
        printed = self.jobkit("submit", "toy.yaml", *overrides, "--dry-run", "--local").stdout
        return Path(next(line.split()[-1] for line in printed.splitlines() if line.startswith("run directory:")))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`python -m jobkit ARGUMENTS` in the project, not waited for."""
        return subprocess.Popen(
            [sys.executable, "-m", "jobkit", *arguments],
            cwd=self.path,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def jobkit(self, *arguments: str, expect: int | None = 0, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """`python -m jobkit ARGUMENTS`, waited for; the exit code must be `expect`, unless that is None."""
        done = subprocess.run(
            [sys.executable, "-m", "jobkit", *arguments],
            cwd=self.path,
            env=self.env,
            text=True,
            capture_output=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        if expect is not None:
            assert done.returncode == expect, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def slow_down(self, attempts: int) -> None:
        """Let the first attempts train half a second a step: what a test does to one must find it at work.

        On a busy machine the command that interrupts a run takes seconds.
        """
        orders = f"import time\n\n\ndef at_step(ctx, step):\n    time.sleep(0.5 if ctx.attempt <= {attempts} else 0)\n"
        (self.path / "orders.py").write_text(orders)

    def submit(self, *arguments: str, expect: int | None = 0) -> subprocess.CompletedProcess[str]:
        """`python -m jobkit submit toy.yaml ARGUMENTS`."""
        return self.jobkit("submit", "toy.yaml", *arguments, expect=expect)


def events(run: Path) -> list[dict[str, Any]]:
    """The journal."""
    file = run / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def names(run: Path) -> list[str]:
    """The journal's events by name."""
    return [event["event"] for event in events(run)]


def status(run: Path) -> dict[str, Any]:
    """status.json."""
    return json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {}


def step(run: Path) -> int:
    """How far the newest attempt says it is, or -1 where none does yet."""
    try:
        progress = json.loads((run / "progress.json").read_text())
    except (OSError, ValueError):
        return -1
    attempts = status(run).get("attempts") or [{}]
    done = progress.get("step") if progress.get("attempt") == attempts[-1].get("id") else None
    return -1 if done is None else int(done)  # null before the loop


def causes(run: Path) -> list[str]:
    """Why each attempt ended, in order."""
    return [attempt["cause"] for attempt in status(run)["attempts"]]


def is_over(run: Path) -> bool:
    """Whether nothing more will happen to the run by itself."""
    return status(run).get("state") in ("finished", "failed", "cancelled")


def interrupt_when(run: Path, attempt: int, at_step: int, action: Callable[[], object]) -> None:
    """Wait until an attempt has done so many steps, do something to it, and wait until it has ended."""
    wait_for(
        f"step {at_step} in attempt {attempt}",
        lambda: len(status(run).get("attempts", [])) == attempt and step(run) >= at_step,
        run,
    )
    action()
    wait_for(f"the end of attempt {attempt}", lambda: status(run)["attempts"][attempt - 1]["cause"], run)


def wait_for(what: str, reached: Callable[[], Any], run: Path | None = None, seconds: float = 900) -> None:
    """Poll until `reached()` is true; fails with the run's journal and logs when it does not become so."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} was not reached in {seconds:g} s\n{describe(run) if run else ''}")
        time.sleep(0.1)


def describe(run: Path) -> str:
    """The journal and the ends of the logs, for a failing test's report."""
    lines = [json.dumps(event) for event in events(run)]
    for file in sorted(run.glob("logs/*/*")):
        if file.suffix in (".out", ".err", ".log") and file.stat().st_size:
            lines += [f"== {file.relative_to(run)}", *file.read_text(errors="replace").splitlines()[-15:]]
    return "\n".join(lines)


def weights(run: Path) -> bytes:
    """The exported weights, byte for byte."""
    return (run / "final" / "model.safetensors").read_bytes()


def logged_steps(run: Path, tag: str = "train/loss") -> list[int]:
    """The steps of one curve in the event files, in the order in which they are written there."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for file in sorted(run.glob("tensorboard/events.out.tfevents.*")):
        for event in EventFileLoader(str(file)).Load():
            found += [event.step for value in event.summary.value if value.tag == tag]
    return found


def begun(run: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank of the toy task began: {attempt, step, ids of its samples} in order."""
    return [json.loads(line) for line in (run / f"steps_{rank}.jsonl").read_text().splitlines()]


def assert_each_step_once(run: Path, steps: int, ranks: int = 4) -> None:
    """Every rank computed each step once and in order, and TensorBoard has each once."""
    for rank in range(ranks):
        done = [one["step"] for one in begun(run, rank)]
        assert done == list(range(steps)), f"rank {rank}: {Counter(done).most_common(3)}\n{describe(run)}"
    assert logged_steps(run) == list(range(steps)), describe(run)


def queue(cluster: Any, project: Project) -> list[str]:
    """Ids of this project's jobs in a Slurm's queue, which other tests share."""
    listed = str(cluster.command("squeue", "--noheader", "--format=%i %j")).splitlines()
    own = {run.name for run in project.runs}
    return [line.split()[0] for line in listed if line.split()[1] in own]
