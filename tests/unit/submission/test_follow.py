"""Following a run: what is shown once, the exit code of each end, and what a signal asks for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobkit.display import Display
from jobkit.run import records
from jobkit.run.journal import Journal
from jobkit.run.records import (
    AttemptBegan,
    AttemptEnded,
    Cancelled,
    Cause,
    Event,
    Finished,
    Lease,
    Next,
    Progress,
    Submitted,
)
from jobkit.run.rundir import RunDir
from jobkit.run.tail import Tail
from jobkit.run.view import view
from jobkit.submission.follow import Follower, LocalStopper, ended
from jobkit.submission.signals import Signals

TOKEN = "jobkit:toy-12345678:1:abcdef"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was submitted on this machine."""
    run = RunDir(tmp_path / "toy-12345678")
    run.submitit.mkdir(parents=True)
    run.config_file.write_text("name: toy\n")
    append(run, Submitted(token=TOKEN, number=1, scheduler="local"))
    return run


def append(run: RunDir, *events: Event) -> None:
    for event in events:
        Journal(run).append(event)


def begin(run: RunDir, attempt: int = 1, token: str = TOKEN) -> None:
    append(run, AttemptBegan(attempt=attempt, token=token, job_id="local-host-1"))
    run.logs(attempt).mkdir(parents=True)


def end(run: RunDir, cause: Cause, after: Next, error: str | None = None, attempt: int = 1) -> None:
    append(
        run,
        AttemptEnded(
            attempt=attempt, cause=cause, next=after, error=error, traceback="Traceback: here" if error else None
        ),
    )


def report(run: RunDir, attempt: int, step: int, *warnings: str) -> None:
    progress = Progress(attempt=attempt, time=0.0, step=step, total_steps=9, warnings=list(warnings))
    records.write(run.progress_file, progress)


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    file, tail = tmp_path / "log", Tail()
    assert tail.read(file) == []
    letters = "é\nnaïve".encode()
    file.write_bytes(letters[:1])
    assert tail.read(file) == []
    file.write_bytes(letters)
    assert tail.read(file) == ["é"]
    assert tail.read(file) == []
    assert tail.read(file, to_the_end=True) == ["naïve"]
    with file.open("ab") as more:
        more.write(b"\n 10%|#\r 50%|#####\r100%|##########\nDOS\r\n")
    assert tail.read(file) == ["", "100%|##########", "DOS"]
    with file.open("ab") as more:
        for text, shown in ((b" 1%|\r 2%|", []), (b"\r 3%|\r", []), (b"\n4", [" 3%|"]), (b"\r\n", ["4"])):
            more.write(text)
            more.flush()
            assert tail.read(file) == shown


def test_everything_new_is_shown_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    begin(run)
    run.rank_log(1, 0).write_text("old\n")
    end(run, "crashed", "stop", "ValueError: x")
    follower = Follower(run)
    for step in (1, 1, 2):
        follower.refresh(Journal(run).status)
        begin(run, 2) if step == 2 else None
    run.rank_log(2, 0).write_text("epoch 1\nepo")
    run.rank_log(2, 0, "err").write_text("UserWarning: x\n")
    report(run, 2, 9, "the loader is slow")
    follower.refresh(Journal(run).status)
    follower.refresh(Journal(run).status)
    end(run, "killed", "in_place", "rank 1: SIGKILL", attempt=2)
    begin(run, 3)
    with run.rank_log(2, 0).open("a") as file:
        file.write("ch 2\n")
    report(run, 3, 9, "the loader is slow")
    follower.refresh(Journal(run).status)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["epoch 1", "epoch 2"]
    assert [line for line in shown.err.splitlines() if "step" not in line] == [
        "UserWarning: x",
        "warning: the loader is slow",
        "attempt 2 ended (killed: rank 1: SIGKILL); starting again",
    ]


def test_plain_progress_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("toy")
    for step in range(1000):
        display.show(Progress(attempt=1, time=0.0, step=step, total_steps=1000, values={"loss[/x]": 0.5}))
    display.show(Progress(attempt=1, time=0.0, step=1000, total_steps=1000))
    display.show(Progress(attempt=1, time=0.0, step=1000, total_steps=1000))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 4  # one a ten seconds, and the arrival
    assert lines[-1] == "step 1000/1000"


def test_a_long_validation_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    display, now = Display("toy"), time.time()
    progress = Progress(attempt=1, time=0.0, step=5, total_steps=9, steps_per_second=2.0, outside_since=now)
    for seconds in (1, 250, 255, 310):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        display.show(progress)
    assert capsys.readouterr().err.splitlines() == [
        "step 5/9  2 step/s",
        "step 5/9  outside a step since 0:04:10",
        "step 5/9  outside a step since 0:05:10",
    ]


ENDS: list[tuple[list[Event], int]] = [
    ([AttemptEnded(attempt=1, cause="finished", next="stop"), Finished(result={"loss": 1.0})], 0),
    ([AttemptEnded(attempt=1, cause="crashed", next="fail", error="ValueError: x", rank=3)], 1),
    ([AttemptEnded(attempt=1, cause="stopped", next="stop")], 75),
    ([AttemptEnded(attempt=1, cause="cancelled", next="stop"), Cancelled()], 75),
    ([], 75),  # its job is gone
]


@pytest.mark.parametrize(("ends", "code"), ENDS)
def test_the_exit_code_says_how_a_run_stands(run: RunDir, ends: list[Event], code: int) -> None:
    begin(run)
    append(run, *ends)
    assert Follower(run).end(view(run)) == code


def test_a_job_that_began_nothing_shows_what_its_script_said(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.job_log.write_text("module: command not found\njobkit: setup: exit code 127: module load x\n")
    assert Follower(run).end(view(run)) == 75
    assert "exit code 127" in capsys.readouterr().err


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """A process group that stands for a job script."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_signals_become_requests_for_the_attempt_that_runs(run: RunDir, job: subprocess.Popen[bytes]) -> None:
    begin(run)
    stop = LocalStopper(run, job, Display("toy"))
    stop.ask(Journal(run).status, kills=False)
    request = run.request("stop")
    assert request is not None
    assert (request.submission, request.attempt, request.grace) == (1, 1, None)
    stop.ask(Journal(run).status, kills=True)
    request = run.request("stop")
    assert request is not None and request.grace == 0.0
    end(run, "killed", "in_place")
    begin(run, 2)
    stop.ask(Journal(run).status, kills=False)  # it had begun already when the request came
    request = run.request("stop")
    assert request is not None and request.attempt == 2
    assert job.poll() is None


@pytest.mark.parametrize(("has_lease", "kills"), [(False, False), (False, True), (True, True)])
def test_without_an_attempt_the_job_itself_ends(
    run: RunDir, job: subprocess.Popen[bytes], has_lease: bool, kills: bool
) -> None:
    if has_lease:
        records.write(run.lease_file, Lease(attempt=0, writer="w", token=TOKEN, job_id="x", pid=job.pid))
    LocalStopper(run, job, Display("toy")).ask(Journal(run).status, kills=kills)
    assert job.wait() == -(signal.SIGKILL if kills else signal.SIGTERM)


def test_a_supervisor_without_an_attempt_is_asked_alone(run: RunDir, job: subprocess.Popen[bytes]) -> None:
    supervisor = subprocess.Popen(["sleep", "600"], start_new_session=True)
    records.write(run.lease_file, Lease(attempt=0, writer="w", token=TOKEN, job_id="x", pid=supervisor.pid))
    LocalStopper(run, job, Display("toy")).ask(Journal(run).status, kills=False)
    assert supervisor.wait() == -signal.SIGTERM
    assert job.poll() is None


def test_signals_end_a_command_until_there_is_a_job() -> None:
    with Signals() as signals:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        signals.job_exists()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == [signal.SIGHUP, signal.SIGINT]


def test_a_hang_up_that_was_ignored_stays_ignored() -> None:
    script = (
        "import os, signal; from jobkit.submission.signals import Signals\n"
        "with Signals() as signals: os.kill(os.getpid(), signal.SIGHUP); print(signals.received)"
    )
    done = subprocess.run(
        ["nohup", sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"


def test_a_run_directory_that_is_away_is_no_end(run: RunDir, tmp_path: Path) -> None:
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not there"):  # Looks makes the look again
        ended(run)
