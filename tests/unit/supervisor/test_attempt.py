"""Who may begin an attempt, how it is closed, and who loses: on real run directories."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobkit import start
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, LostLease
from jobkit.run import records
from jobkit.run.journal import Journal, events, read_status
from jobkit.run.records import AttemptEnded, Cancelled, Progress, RankReport, Refused, Request, Submitted
from jobkit.run.rundir import RunDir
from jobkit.slurm.jobs import Job
from jobkit.supervisor.attempt import EXIT_RUN_FAILED, begin, close, pause, rescue, take_over, unsaved_step
from jobkit.supervisor.closing import Unsaved
from jobkit.supervisor.diagnosis import Facts, LostNode
from jobkit.supervisor.lease import HeldLease, NotRunnable, ThisJob
from jobkit.supervisor.retry import PAUSES, RestartOptions
from jobkit.wire.messages import RankExited

HERE = RestartOptions(in_place=lambda without: True)
QUEUE = RestartOptions(requeue="requeue")
KILLED = Facts(exits=[(RankExited(serial=1, attempt=1, rank=0, code=-9, step=7), "node1")])
FINISHED = Facts(exits=[(RankExited(serial=1, attempt=1, rank=0, code=0, step=9), "node1")])


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Slurm is asked for its time."""
    monkeypatch.setattr("jobkit.slurm.jobs.controller_time", time.time)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was submitted with the token `t1`."""
    run = RunDir(tmp_path / "toy-12345678")
    run.submitit.mkdir(parents=True)
    (run.path / "requests").mkdir()
    run.config_file.write_text("name: toy\ntask: toy:train\n")
    submit(run, 1)
    return run


def submit(run: RunDir, number: int, by: Any = "person") -> None:
    Journal(run).append(Submitted(token=f"t{number}", number=number, scheduler="slurm", by=by))


def this_job(token: str = "t1", job_id: str = "7", restart: int = 0, job: Job | None = None) -> ThisJob:
    return ThisJob(job_id=job_id, token=token, restart=restart, node="node1", job=job)


def slurm(state: str = "RUNNING", *, restarts: int = 0, end: float | None = 1e12, **more: Any) -> Job:
    return Job("7", state, more.pop("reason", "None"), 1.0, end, "node1", "debug", "t1", restarts, **more)


def started(run: RunDir, job: ThisJob | None = None) -> HeldLease:
    held_lease = take_over(run, job or this_job())
    begin(held_lease, ["node1"], 1)
    return held_lease


def kinds(run: RunDir) -> list[str]:
    return [event.kind for event in events(run)]


def last_end(run: RunDir) -> AttemptEnded:
    attempt = read_status(run).attempt
    assert attempt is not None and attempt.ended is not None
    return attempt.ended


def ask_for(run: RunDir, kind: Any, submission: int = 1, attempt: int = 1) -> None:
    records.write(run.request_file(kind), Request(kind=kind, submission=submission, attempt=attempt, user="ada"))


# The life of a run


@pytest.mark.parametrize(("steps", "newest"), [((40, 38), 38), ((40, None), None)])
def test_a_snapshot_counts_once_all_ranks_have_completed_it(run: RunDir, steps: tuple[Any, ...], newest: Any) -> None:
    """The pages of the ranks say it, and no report, which lags by half a second or a step."""
    exits = [
        RankExited(serial=rank, attempt=1, rank=rank, code=1, step=41, snapshot_step=at)
        for rank, at in enumerate(steps)
    ]
    held_lease = started(run)
    close(held_lease, Facts(exits=[(exited, "node1") for exited in exits]), HERE)
    assert (last_end(run).snapshot_step, unsaved_step(held_lease)) == (newest, newest)


def test_no_end_is_journalled_before_the_newest_snapshot_is_saved(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command, or the next submission, would count on the checkpoint before. What follows in place has the memory."""
    killed = RankExited(serial=1, attempt=1, rank=0, code=-9, step=41, snapshot_step=40)
    facts = Facts(exits=[(killed, "node1")])
    held_lease = started(run)
    with pytest.raises(Unsaved):
        close(held_lease, facts, QUEUE, is_saved=False)
    assert (kinds(run)[-1], unsaved_step(held_lease, facts)) == ("attempt began", 40)
    assert close(held_lease, facts, HERE, is_saved=False).action == "in_place"

    monkeypatch.setattr("jobkit.run.rundir.foreign_owner", lambda path, folder: "eve")
    run.config_file.touch()
    with pytest.raises(Unsaved):
        begin(held_lease, ["node1"], 1, is_saved=False)
    monkeypatch.undo()
    ask_for(run, "cancel")
    with pytest.raises(Unsaved):
        begin(held_lease, ["node1"], 1, is_saved=False)
    assert kinds(run)[-1] == "attempt ended"
    (run.checkpoints / "step_00000040").mkdir(parents=True)
    with pytest.raises(NotRunnable):
        begin(held_lease, ["node1"], 1, is_saved=False)
    assert read_status(run).state == "cancelled"


def test_attempts_begin_and_end_until_the_run_is_finished(run: RunDir) -> None:
    run.failed_starts.write_text("a\nb\n")
    held_lease = started(run)
    lease = run.lease()
    assert lease is not None and (lease.attempt, lease.writer, lease.job_id) == (1, held_lease.writer, "7")
    assert not run.failed_starts.exists() and run.logs(1).is_dir() and run.ends_folder(1).is_dir()
    records.write(run.progress_file, Progress(attempt=1, time=5.0, step=6, first_step=0))
    (run.checkpoints / "step_00000004").mkdir(parents=True)
    assert close(held_lease, KILLED, HERE).action == "in_place"
    end = last_end(run)
    assert (end.cause, end.first_step, end.last_step, end.durable_step) == ("killed", 0, 7, 4)

    assert begin(held_lease, ["node1"], 1) == 2
    records.write(run.progress_file, Progress(attempt=2, time=6.0, step=8, first_step=4))
    records.write(
        run.end_file(2, 0), RankReport(rank=0, attempt=2, kind="finished", time=7.0, step=9, result={"loss": 0.5})
    )
    assert close(held_lease, Facts(), HERE).action == "stop"
    assert close(held_lease, Facts(), HERE).action == "stop", "harmless to call twice"
    status = read_status(run)
    assert (status.state, status.result) == ("finished", {"loss": 0.5})
    assert (last_end(run).first_step, last_end(run).last_step) == (4, 9)
    assert kinds(run)[1:] == ["attempt began", "attempt ended"] * 2 + ["finished"]
    with pytest.raises(NotRunnable) as refusal:
        take_over(run, this_job(restart=1))
    assert refusal.value.exit_code == EXIT_FINISHED


def test_a_killed_supervisor_changes_nothing_about_the_next_attempt(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # a disk may take longer than the pause
    held_lease = started(run)
    close(held_lease, KILLED, HERE)
    assert pause(held_lease) <= 0.0
    begin(held_lease, ["node1"], 1)
    close(held_lease, KILLED, HERE)
    after = take_over(run, this_job())
    assert 0.0 < pause(after) <= 1.2 * PAUSES[1]
    begin(after, ["node1"], 1)
    assert [attempt.began.how for attempt in read_status(run).attempts] == ["start", "in place", "in place"]
    adopted = take_over(run, this_job()).adopted
    assert adopted is not None and adopted == read_status(run).open_attempt, "its ranks train on"


def test_a_requeue_is_journalled_before_it_is_asked_for_and_found_by_the_next_supervisor(run: RunDir) -> None:
    held_lease = started(run)
    assert close(held_lease, Facts(slurm_cause="preempted"), QUEUE).action == "requeue"
    assert kinds(run)[-1] == "requeued" and read_status(run).state == "queued"
    decision = take_over(run, this_job(job=slurm("COMPLETING", end=None))).decision
    assert decision is not None and decision.action == "requeue", "killed before it had asked for it"
    held_lease = take_over(run, this_job(restart=1, job=slurm(restarts=1)))
    assert held_lease.decision is None and begin(held_lease, ["node1"], 1) == 2


def test_a_successor_that_was_not_submitted_is_found_by_the_next_supervisor_of_the_same_job(run: RunDir) -> None:
    assert (
        close(started(run), Facts(slurm_cause="preempted"), RestartOptions(requeue="successor")).action == "successor"
    )
    submit(run, 2, by="supervisor")
    decision = take_over(run, this_job()).decision
    assert decision is not None and decision.action == "successor"
    with pytest.raises(NotRunnable):
        take_over(run, this_job(job_id="5"))
    started(run, this_job("t2", "8"))
    with pytest.raises(NotRunnable):
        take_over(run, this_job())


def test_a_run_that_has_failed_is_left_alone_until_it_is_submitted_again(run: RunDir) -> None:
    held_lease = started(run)
    records.write(run.end_file(1, 0), RankReport(rank=0, attempt=1, kind="failed", time=1.0, error="no", final=True))
    assert close(held_lease, Facts(), HERE).action == "fail"
    with pytest.raises(NotRunnable) as refusal:
        take_over(run, this_job())
    assert refusal.value.exit_code == EXIT_RUN_FAILED
    submit(run, 2)
    started(run, this_job("t2", "8"))


def test_a_submission_of_a_person_begins_the_counts_of_retry_anew(run: RunDir) -> None:
    run.config_file.write_text("name: toy\ntask: toy:train\nretry: {time_limit: 2}\n")
    held_lease, timeout = started(run), Facts(slurm_cause="timeout")
    assert close(held_lease, timeout, QUEUE).action == "requeue"
    held_lease = started(run, this_job(restart=1))
    assert close(held_lease, timeout, QUEUE).action == "fail"
    submit(run, 2)
    assert close(started(run, this_job("t2", "8")), timeout, QUEUE).action == "requeue"


# Two jobs, and none


def test_a_job_whose_token_is_not_the_newest_begins_nothing(run: RunDir) -> None:
    submit(run, 2)
    with pytest.raises(NotRunnable) as refusal:
        take_over(run, this_job("t1"))
    assert refusal.value.exit_code == EXIT_RESUMABLE and run.lease() is None
    held_lease = take_over(run, this_job("t2"))
    submit(run, 3)
    with pytest.raises(NotRunnable):
        begin(held_lease, ["node1"], 1)
    assert "attempt began" not in kinds(run)
    Journal(run).append(Refused(token="t2", error="no"))
    assert read_status(run).state == "queued", "what an older submission says of itself is not about the run"


def test_of_two_processes_that_take_over_the_last_one_writes(run: RunDir) -> None:
    held_lease, other = started(run), take_over(run, this_job())
    assert other.adopted is not None and other.adopted.number == 1
    held_lease.journal.note(Cancelled())
    for act in (lambda: begin(held_lease, [], 1), lambda: close(held_lease, KILLED, HERE), held_lease.journal.flush):
        with pytest.raises(LostLease):
            act()
    assert kinds(run) == ["submitted", "attempt began"]
    assert close(other, KILLED, HERE).action == "in_place"


def _race(path: str, barrier: Any, wins: Any) -> None:
    run = RunDir(path)
    barrier.wait()
    try:
        held_lease = take_over(run, ThisJob(job_id=str(os.getpid()), token="t1"))
        begin(held_lease, [], 1)
        wins.put(os.getpid())
    except (NotRunnable, LostLease, AssertionError):
        pass


def test_processes_that_race_for_an_attempt_leave_one_open_attempt_of_one_writer(run: RunDir) -> None:
    context = multiprocessing.get_context("fork")
    barrier, wins = context.Barrier(4), context.Queue()
    racers = [context.Process(target=_race, args=(str(run.path), barrier, wins)) for _ in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    status, lease = read_status(run), run.lease()
    assert [attempt.number for attempt in status.attempts] == list(range(1, len(status.attempts) + 1))
    assert sum(attempt.ended is None for attempt in status.attempts) == 1
    assert lease is not None and status.open_attempt is not None
    assert (lease.attempt, lease.job_id) == (status.open_attempt.number, status.open_attempt.began.job_id)
    assert wins.get(timeout=10) is not None


def test_a_later_start_of_the_same_job_keeps_the_lease(run: RunDir) -> None:
    started(run)
    lease = started(run, this_job(restart=1, job=slurm(restarts=1))).writer
    with pytest.raises(NotRunnable):
        take_over(run, this_job(restart=0, job=slurm(restarts=1)))
    assert run.lease().writer == lease  # type: ignore[union-attr]


# Attempts that nobody closed


@pytest.mark.parametrize(
    ("died", "cause", "node"), [(False, "preempted", None), (True, "node_failure", "node1")], ids=["well", "dead"]
)
def test_a_job_that_slurm_started_again_closes_its_last_attempt(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, died: bool, cause: str, node: str | None
) -> None:
    monkeypatch.setattr("jobkit.slurm.nodes.died_since", lambda name, when: died and name == "node1")
    started(run)
    started(run, this_job(restart=1, job=slurm(restarts=1)))
    end = read_status(run).attempts[0].ended
    assert end is not None and (end.cause, end.node, end.next) == (cause, node, "requeue")


def test_a_job_of_a_later_submission_closes_the_attempt_of_an_earlier_one(run: RunDir) -> None:
    started(run)
    for number in range(2, 8):  # more often than any budget allows
        submit(run, number)
        started(run, this_job(f"t{number}", str(number)))
    causes = [attempt.ended.cause for attempt in read_status(run).attempts if attempt.ended is not None]
    assert causes == ["unknown"] * 6


LEAVING: list[tuple[str, Job, str | None]] = [
    ("killed by PreemptMode=CANCEL", slurm("COMPLETING", end=2.0, preempt_time=1.5), "requeue"),
    ("the same, not requeueable", slurm("COMPLETING", end=2.0, preempt_time=1.5, requeueable=False), "successor"),
    ("requeued already", slurm("COMPLETING", end=None), None),
    ("started again already", slurm(restarts=1), None),
    ("cancelled", slurm("COMPLETING", end=2.0), None),
]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(("job", "action"), [row[1:] for row in LEAVING], ids=[row[0] for row in LEAVING])
def test_a_supervisor_that_starts_in_a_job_that_slurm_ends_closes_and_leaves(
    run: RunDir, job: Job, action: str | None, is_open: bool
) -> None:
    if is_open:
        started(run)
    if action is None:
        with pytest.raises(NotRunnable):
            take_over(run, this_job(job=job))
    else:
        decision = take_over(run, this_job(job=job)).decision
        assert decision is not None and decision.action == action
    status = read_status(run)
    assert status.open_attempt is None
    assert status.state == ("cancelled" if job.end == 2.0 and job.preempt_time is None else "queued")


# Requests


def test_a_cancel_is_final_whenever_it_comes(run: RunDir) -> None:
    held_lease = started(run)
    close(held_lease, KILLED, HERE)
    ask_for(run, "cancel", attempt=1)  # names the attempt that has just ended
    with pytest.raises(NotRunnable):
        begin(held_lease, ["node1"], 1)
    assert read_status(run).state == "cancelled"
    submit(run, 2)
    held_lease = started(run, this_job("t2"))
    assert not run.request_file("cancel").exists(), "it was about the submission before"
    ask_for(run, "cancel", 2, 2)
    assert close(held_lease, KILLED, HERE).action == "stop"
    assert (read_status(run).state, last_end(run).cause) == ("cancelled", "cancelled")


def test_a_cancel_ends_no_later_submission(run: RunDir) -> None:
    started(run)
    ask_for(run, "cancel")
    submit(run, 2)  # its job died with the attempt open, and somebody has submitted the run again
    started(run, this_job("t2", "8"))
    status = read_status(run)
    assert (status.state, [attempt.ended and attempt.ended.cause for attempt in status.attempts]) == (
        "running",
        ["cancelled", None],
    )


def test_a_run_that_finished_before_its_cancel_is_finished(run: RunDir) -> None:
    held_lease = started(run)
    ask_for(run, "cancel")
    close(held_lease, FINISHED, HERE)
    assert read_status(run).state == "finished"


def test_a_run_that_is_not_on_this_node_is_not_taken_for_one_that_another_job_runs(tmp_path: Path) -> None:
    words = start.words("jobkit.supervisor.main", "local", str(tmp_path / "runs" / "toy-12345678"))
    variables = {**os.environ, "JOBKIT_JOB_ID": "local-host-7", "JOBKIT_TOKEN": "t1"}
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    assert done.returncode == 1, "job.sh starts another one, and then the job on another node"
    assert "mounted" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_setup_lines_that_take_all_of_the_time_have_a_budget(run: RunDir) -> None:
    decisions = []
    for restart in range(3):
        job = slurm("COMPLETING", restarts=restart, reason="TimeLimit", end=time.time())
        try:
            decision = take_over(run, this_job(restart=restart, job=job)).decision
            assert decision is not None
            decisions.append(decision.action)
        except NotRunnable as error:
            decisions.append(f"exit {error.exit_code}")
    assert decisions == ["requeue", "requeue", f"exit {EXIT_RUN_FAILED}"]
    assert (read_status(run).state, [attempt.began.ranks for attempt in read_status(run).attempts]) == (
        "failed",
        [0] * 3,
    )


def test_a_run_directory_that_is_gone_is_away_and_taken_by_nobody(run: RunDir) -> None:
    held_lease = started(run)
    run.path.rename(run.path.with_name("elsewhere"))
    for look in (held_lease.check_lease, held_lease.journal.refresh):
        with pytest.raises(OSError, match="not there") as error:
            look()
        assert error.value.errno == errno.ESTALE


def test_a_cancel_holds_for_the_job_that_follows(run: RunDir) -> None:
    """It came between the end of an attempt and the successor of its job, which has a token of its own."""
    ask_for(run, "cancel")
    submit(run, 2, by="supervisor")
    with pytest.raises(NotRunnable):
        started(run, this_job("t2", "8"))
    assert read_status(run).state == "cancelled"


def test_a_cancel_of_a_job_that_follows_another_is_for_the_submission(run: RunDir) -> None:
    submit(run, 2, by="supervisor")
    run.ask("cancel", read_status(run))
    with pytest.raises(NotRunnable):
        started(run, this_job("t2", "8"))
    assert read_status(run).state == "cancelled"


def test_requests_of_another_submission_or_attempt_are_removed(run: RunDir) -> None:
    ask_for(run, "cancel", 0)
    ask_for(run, "preempt", attempt=0)
    started(run)
    assert list((run.path / "requests").iterdir()) == []


# A supervisor that is gone


def test_one_agent_rescues_the_run(run: RunDir) -> None:
    writer = started(run).writer
    held_lease = rescue(run, this_job(job=slurm()), writer, dead_node="node1")
    assert held_lease is not None and held_lease.decision is not None and held_lease.decision.action == "requeue"
    assert (last_end(run).cause, last_end(run).node) == ("node_failure", "node1")
    assert rescue(run, this_job(job=slurm()), writer, dead_node="node1") is None, "another agent was first"


def test_an_agent_rescues_nothing_from_a_supervisor_that_lives_or_a_job_that_is_cancelled(run: RunDir) -> None:
    old = started(run)
    new = take_over(run, this_job())
    assert rescue(run, this_job(job=slurm()), old.writer) is None
    assert rescue(run, this_job(job=slurm("COMPLETING", end=2.0)), new.writer) is None
    assert read_status(run).state == "cancelled"


def test_an_agent_carries_out_what_its_supervisor_had_decided(run: RunDir) -> None:
    held_lease = started(run)
    close(held_lease, Facts(slurm_cause="preempted"), QUEUE)
    rescued = rescue(run, this_job(job=slurm()), held_lease.writer)
    assert rescued is not None and rescued.decision is not None and rescued.decision.action == "requeue"
    assert kinds(run).count("attempt ended") == 1


def test_an_agent_rescues_a_run_between_two_attempts(run: RunDir) -> None:
    held_lease = started(run)
    assert close(held_lease, KILLED, HERE).action == "in_place"
    rescued = rescue(run, this_job(job=slurm()), held_lease.writer, dead_node="node1")
    assert rescued is not None and rescued.decision is not None and rescued.decision.action == "requeue"
    assert read_status(run).state == "queued"
    assert kinds(run).count("attempt ended") == 1


@pytest.mark.parametrize("restart", [0, 1])
def test_an_agent_rescues_a_run_whose_attempt_has_not_begun(run: RunDir, restart: int) -> None:
    """The batch node dies during the imports."""
    if restart:
        close(started(run), Facts(slurm_cause="preempted"), QUEUE)
    held_lease = take_over(run, this_job(restart=restart, job=slurm(restarts=restart)))
    rescued = rescue(run, this_job(restart=restart, job=slurm(restarts=restart)), held_lease.writer, dead_node="node1")
    assert rescued is not None and rescued.decision is not None and rescued.decision.action == "requeue"
    assert kinds(run)[-1] == "requeued"


def test_the_batch_script_alone_may_have_died(run: RunDir) -> None:
    writer = started(run).writer
    assert rescue(run, this_job(job=slurm()), writer) is not None
    assert (last_end(run).cause, last_end(run).node) == ("killed", None)


# Disks, files


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """No file of this process may grow beyond `free` bytes: EFBIG; write it as a full disk's error."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_an_end_that_a_full_disk_refuses_waits_and_no_attempt_begins_meanwhile(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("is_full", "may_return"):
        monkeypatch.setattr(f"jobkit.supervisor.closing.{name}", lambda error: error is not None)  # EFBIG for ENOSPC
    held_lease = started(run)
    before = run.journal_file.read_bytes()
    with full_disk(0):
        assert close(held_lease, Facts(lost_nodes=[LostNode(node="node1", why="gone")]), HERE).action == "in_place"
        with pytest.raises(OSError):
            begin(held_lease, ["node1"], 1)
    assert run.journal_file.read_bytes() == before
    assert begin(held_lease, ["node1"], 1) == 2
    assert kinds(run)[-2:] == ["attempt ended", "attempt began"]


def test_an_end_that_finds_no_disk_waits_for_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of the runs directory's server is none of the run's nodes."""
    held_lease, fsync = started(run), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: raise_error(OSError(errno.EIO, "Input/output error")))
    assert close(held_lease, KILLED, HERE).action == "in_place"
    monkeypatch.setattr(os, "fsync", fsync)
    assert begin(held_lease, ["node1"], 1) == 2
    assert kinds(run)[-2:] == ["attempt ended", "attempt began"]


def raise_error(error: Exception) -> None:
    raise error


def test_a_lease_that_cannot_be_read_is_not_lost(run: RunDir) -> None:
    held_lease = started(run)
    content = run.lease_file.read_bytes()
    run.lease_file.unlink()
    run.lease_file.mkdir()  # stands for a disk that is away: an OSError, and not that of a missing file
    with pytest.raises(OSError):
        close(held_lease, KILLED, HERE)
    run.lease_file.rmdir()
    run.lease_file.write_bytes(content)
    assert close(held_lease, KILLED, HERE).action == "in_place"


def broken_config(run: RunDir) -> None:
    run.config_file.write_text("name: toy\ntask: toy:train\nparams: {key: '${oc.env:NOT_SET_ANYWHERE}'}\n")


def foreign_config(run: RunDir) -> None:
    os.chown(run.config_file, 12345, -1)


@pytest.mark.parametrize(
    "spoil",
    [
        broken_config,
        pytest.param(foreign_config, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")),
    ],
)
def test_a_config_that_the_job_cannot_use_is_said_in_the_status(run: RunDir, spoil: Callable[[RunDir], None]) -> None:
    spoil(run)
    with pytest.raises(NotRunnable) as refusal:
        take_over(run, this_job())
    assert refusal.value.exit_code == EXIT_RUN_FAILED
    assert read_status(run).state == "interrupted" and read_status(run).reason


def test_a_report_of_the_attempt_before_is_not_this_ones(run: RunDir) -> None:
    held_lease = started(run)
    records.write(run.progress_file, Progress(attempt=1, time=5.0, step=6, first_step=0))
    close(held_lease, KILLED, HERE)
    begin(held_lease, ["node1"], 1)
    close(held_lease, Facts(exits=[(RankExited(serial=2, attempt=2, rank=0, code=-9, step=-1), "node1")]), HERE)
    assert (last_end(run).first_step, last_end(run).last_step) == (None, None)


def test_a_cancel_counts_more_than_a_preemption_that_was_asked_for_before(run: RunDir) -> None:
    held_lease = started(run)
    ask_for(run, "preempt")
    ask_for(run, "cancel")
    assert (close(held_lease, KILLED, HERE).action, read_status(run).state) == ("stop", "cancelled")


def test_a_process_that_has_lost_the_lease_begins_nothing(run: RunDir) -> None:
    held_lease = started(run)
    close(held_lease, KILLED, HERE)
    other = take_over(run, this_job())
    with pytest.raises(LostLease):
        begin(held_lease, ["node1"], 1)
    lease = run.lease()
    assert lease is not None and lease.writer == other.writer
