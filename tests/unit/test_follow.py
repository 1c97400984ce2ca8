"""What a followed run has printed is shown, of each attempt to its last line."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, Status
from jobkit.submission.follow import Follower, follow_slurm


def test_the_last_lines_of_an_attempt_are_shown_though_the_next_has_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path / "run")
    logs = [run.rank_log(number, 0) for number in (1, 2)]
    for log in logs:
        log.parent.mkdir(parents=True)
    follower = Follower(run)

    logs[0].write_text("begins\n")
    attempts = [Attempt(1, "local", "7", started=1.0)]
    follower.refresh(Status(attempts=attempts))
    with logs[0].open("a") as file:
        file.write("is stopped\n")
    logs[1].write_text("goes on\n")
    attempts.append(Attempt(2, "local", "7", started=2.0))
    follower.refresh(Status(attempts=attempts))
    follower.refresh(Status(attempts=attempts))
    assert capsys.readouterr().err.splitlines() == ["begins", "is stopped", "goes on"]


def test_the_last_lines_come_before_the_end_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "x-1")
    run.logs(1).mkdir(parents=True)
    run.write_config(Config(name="x", task="a:b"))
    run.record(Event.SUBMITTING, cluster="slurm", scheduler="slurm", slurm_cluster="elsewhere@host:1")
    run.record(Event.STARTED, attempt=1, job_id="7")
    run.rank_log(1, 0).write_text("the last\n")
    run.record(Event.FINISHED, attempt=1, step=3, result=None)
    assert follow_slurm(run) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["the last", "finished at step 3", f"run directory: {run.path}"]
