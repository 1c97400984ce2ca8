"""Run directories from events, for tests of everything that only looks at runs.

run = make_run(tmp_path, "toy-11f5f19c", submitted(), began(), ended("preempted", "requeue"))
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from jobkit.run.files import user_name
from jobkit.run.journal import Journal
from jobkit.run.records import AttemptBegan, AttemptEnded, Event, Finished, Submitted
from jobkit.run.rundir import RunDir

TOKEN = "jobkit:toy-11f5f19c:1:abcdef"
START = 1_000_000_000.0


def submitted(scheduler: Any = "local", time: float = START, **fields: Any) -> Submitted:
    values = {"token": TOKEN, "number": 1, "user": user_name(), "host": socket.gethostname(), "entry": scheduler}
    return Submitted(scheduler=scheduler, time=time, **(values | fields))


def began(attempt: int = 1, time: float = START + 5, **fields: Any) -> AttemptBegan:
    return AttemptBegan(attempt=attempt, time=time, **({"token": TOKEN, "job_id": "17"} | fields))


def ended(
    cause: Any = "finished", next: Any = "stop", attempt: int = 1, time: float = START + 60, **f: Any
) -> AttemptEnded:
    return AttemptEnded(attempt=attempt, cause=cause, next=next, time=time, **f)


def finished(result: dict[str, Any] | None = None, time: float = START + 60) -> Finished:
    return Finished(result=result, time=time)


def make_run(runs_dir: Path, name: str, *events: Event) -> RunDir:
    """Make a run directory with a journal of these events."""
    run = RunDir(runs_dir / name)
    run.path.mkdir(parents=True)
    run.config_file.write_text(f"name: {name.rpartition('-')[0]}\n")
    journal = Journal(run)
    for event in events:
        journal.append(event)
    return run
