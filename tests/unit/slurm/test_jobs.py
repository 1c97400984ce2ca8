"""Slurm's record of a job and its meaning: real records of Slurm 22.05, shortened."""

from __future__ import annotations

import re
import time
from datetime import datetime

import pytest

from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.slurm import jobs
from jobkit.slurm.jobs import Job, parse_job, stop_cause, time_left

HEAD = "JobId=9 JobName=wrap UserId=me(1) GroupId=me(1) MCS_label=N/A Priority=4294901752 Account=(null) QOS=(null)"
TAIL = (
    "Scheduler=Main Partition=low ReqNodeList=(null) ExcNodeList=(null) NodeList=node1 BatchHost=node1 NumNodes=1"
    " CPUs/Task=1 ReqB:S:C:T=0:0:*:* Command=(null) WorkDir=/my data Comment=jobkit t0k=3  StdErr=/dev/null Power= "
)


def record(state: str, times: str, reason: str = "None", more: str = "Requeue=1 Restarts=0 ExitCode=0:0") -> str:
    return f"{HEAD} JobState={state} Reason={reason} {more} Deadline=N/A {times} SecsPreSuspend=0 {TAIL}"


STARTED = "RunTime=00:00:01 TimeLimit=00:05:00 StartTime=2026-03-05T06:27:00"
RUNNING = record("RUNNING", f"{STARTED} EndTime=2026-03-05T06:32:00 PreemptEligibleTime=Unknown PreemptTime=None")
# In its grace time, at whose end EndTime is now.
PREEMPTED = record("RUNNING", f"{STARTED} EndTime=2026-03-05T06:27:17 PreemptTime=2026-03-05T06:27:02")
SCANCEL_IN_GRACE = PREEMPTED.replace("RUNNING", "COMPLETING").replace("06:27:17", "06:27:04")
ONCE = "Requeue=1 Restarts=1 ExitCode=0:0"
# Its ranks are being killed, and Slurm has requeued it: at first with an end, a second later without one.
GRACE_OVER = record("COMPLETING", "StartTime=2026-03-05T06:27:22 EndTime=Unknown SuspendTime=None", more=ONCE)
GRACE_JUST_OVER = GRACE_OVER.replace("EndTime=Unknown", "EndTime=2026-03-05T06:32:22")
WAITS_AGAIN = record("PENDING", "StartTime=Unknown EndTime=Unknown PreemptTime=None", "BeginTime", ONCE)
BACK = record("RUNNING", "StartTime=2026-03-05T06:27:39 EndTime=2026-03-05T06:32:39 PreemptTime=None", more=ONCE)
OVER = "StartTime=2026-03-05T06:27:06 EndTime=2026-03-05T06:27:26"
SCANCEL = record("COMPLETING", f"{OVER} PreemptTime=None", more="Requeue=1 Restarts=0 ExitCode=0:15")
SCANCEL_OVER = SCANCEL.replace("COMPLETING", "CANCELLED")
SCANCEL_OF_A_REQUEUED = SCANCEL_OVER.replace("Restarts=0", "Restarts=1")
# By PreemptMode=CANCEL, at the end of the grace time or without one.
PREEMPTED_FOR_GOOD = record("COMPLETING", f"{OVER} PreemptTime=2026-03-05T06:27:26")
TIME_LIMIT = record("COMPLETING", f"{OVER} PreemptTime=None", "TimeLimit")
SCRIPT_KILLED = record("COMPLETING", OVER, "JobLaunchFailure", "Requeue=1 Restarts=0 ExitCode=0:9")
NODE_DOWN = record("COMPLETING", OVER, "NodeDown", "Requeue=0 Restarts=0 ExitCode=0:0")
OUT_OF_MEMORY = record("OUT_OF_MEMORY", OVER, "OutOfMemory")
CRASHED = record("FAILED", OVER, "NonZeroExitCode", "Requeue=1 Restarts=0 ExitCode=3:0")
HELD = record("PENDING", "TimeLimit=UNLIMITED StartTime=Unknown EndTime=Unknown", "JobHeldUser")
ENDLESS = record("RUNNING", "TimeLimit=UNLIMITED StartTime=2026-03-05T06:27:00 EndTime=Unknown PreemptTime=None")
# A job that waited in a partition without a limit.
LIMITLESS = record("RUNNING", "StartTime=2026-03-05T06:27:00 EndTime=2027-03-05T06:27:00 PreemptTime=None")


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2026-03-05T{clock}+00:00").timestamp()


def test_a_record_is_read() -> None:
    assert parse_job(RUNNING) == Job(
        job_id="9",
        state="RUNNING",
        reason="None",
        start=at("06:27:00"),
        end=at("06:32:00"),
        nodes="node1",
        partition="low",
        comment="jobkit t0k=3",
    )
    assert parse_job(PREEMPTED).preempt_time == at("06:27:02")
    assert parse_job(BACK).restarts == 1
    assert not parse_job(NODE_DOWN).requeueable
    assert parse_job(RUNNING.replace("ExcNodeList=(null)", "ExcNodeList=node[2-3]")).excluded == "node[2-3]"
    held = parse_job(HELD)
    assert (held.start, held.end, held.held, held.ended) == (None, None, True, False)
    task = RUNNING.replace("JobId=9", "JobId=12 ArrayJobId=9 ArrayTaskId=3 ArrayTaskThrottle=2")
    assert (parse_job(task).job_id, parse_job(task).task) == ("9_3", 3)
    array = RUNNING.replace("JobId=9", "JobId=9 ArrayJobId=9 ArrayTaskId=2-5%2 ArrayTaskThrottle=2")
    assert (parse_job(array).job_id, parse_job(array).task) == ("9", None)


def test_the_night_in_which_clocks_go_back_has_no_extra_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        job = parse_job("JobId=9 JobState=RUNNING StartTime=2026-11-01T01:30:00 EndTime=2026-11-01T02:15:00")
        assert job.end is not None and job.start is not None and job.end - job.start == 45 * 60
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "clock", "seconds"),
    [
        (RUNNING, "06:27:01", 299.0),
        (RUNNING, "06:32:20", -20.0),
        (PREEMPTED, "06:27:04", 13.0),
        (HELD, "06:27:04", None),
        (ENDLESS, "06:27:04", None),
        (LIMITLESS, "06:27:04", None),
        (RUNNING.replace("RUNNING", "PENDING"), "06:27:01", None),  # an expected start
    ],
)
def test_the_time_that_a_job_has(text: str, clock: str, seconds: float | None) -> None:
    assert time_left(parse_job(text), at(clock)) == seconds


@pytest.mark.parametrize("ahead", [0, 200, -200])
def test_time_limits_are_counted_by_the_controllers_clock(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    def answer(*command: str, **_: object) -> str:
        assert command == ("sdiag",)
        return f"***\nsdiag output at Sun Nov 22 17:15:19 2026 ({int(time.time()) + ahead})\n"

    jobs._clock_offset.cache_clear()
    monkeypatch.setattr(jobs, "run", answer)
    assert abs(jobs.controller_time() - time.time() - ahead) <= 2
    jobs._clock_offset.cache_clear()


CAUSES = [
    # case, record, restarts of the caller, cause
    ("running", RUNNING, 0, None),
    ("running again, asked by its own process", BACK, 1, None),
    ("running again, asked by a process of the start before", BACK, 0, "preempted"),
    ("waiting again, asked by a process of the start before", WAITS_AGAIN, 0, "preempted"),
    ("waiting again, asked from outside", WAITS_AGAIN, None, None),
    ("without an end", ENDLESS, 0, None),
    ("without a limit", LIMITLESS, 0, None),
    ("preempted", PREEMPTED, 0, "preempted"),
    ("preempted, being requeued", GRACE_OVER, None, "preempted"),
    ("preempted, requeued in this moment", GRACE_JUST_OVER, None, "preempted"),
    ("preempted for good", PREEMPTED_FOR_GOOD, 0, "preempted"),
    ("preempted, over", PREEMPTED.replace("RUNNING", "PREEMPTED"), 0, "preempted"),
    ("scancel", SCANCEL, 0, "cancelled"),
    ("scancel in the grace time", SCANCEL_IN_GRACE, 0, "cancelled"),
    ("scancel, over", SCANCEL_OVER, 0, "cancelled"),
    ("scancel after a requeue", SCANCEL_OF_A_REQUEUED, 0, "cancelled"),
    ("killed at the time limit", TIME_LIMIT, 0, "timeout"),
    ("killed at the time limit, over", TIME_LIMIT.replace("COMPLETING", "TIMEOUT"), 0, "timeout"),
    ("the batch script was killed", SCRIPT_KILLED, 0, "killed"),
    ("the batch script was killed, over", SCRIPT_KILLED.replace("COMPLETING", "FAILED"), 0, "killed"),
    ("the same, by a newer Slurm", SCRIPT_KILLED.replace("JobLaunchFailure", "RaisedSignal:9(Killed)"), 0, "killed"),
    ("a node went down", NODE_DOWN, 0, "node_failure"),
    ("a node went down, over", NODE_DOWN.replace("COMPLETING", "NODE_FAIL"), 0, "node_failure"),
    ("out of memory", OUT_OF_MEMORY, 0, "out_of_memory"),
    ("waiting", HELD, None, None),
    ("crashed", CRASHED, 0, None),
]


@pytest.mark.parametrize(("text", "restarts", "cause"), [row[1:] for row in CAUSES], ids=[row[0] for row in CAUSES])
def test_the_record_says_why_slurm_stops_the_job(text: str, restarts: int | None, cause: str | None) -> None:
    assert stop_cause(parse_job(text), at("06:28:00"), margin=90.0, restarts=restarts) == cause


@pytest.mark.parametrize(("clock", "cause"), [("06:30:29", None), ("06:30:30", "timeout"), ("06:33:00", "timeout")])
def test_a_job_stops_at_the_margin_before_its_time_limit(clock: str, cause: str | None) -> None:
    assert stop_cause(parse_job(RUNNING), at(clock), margin=90.0) == cause


@pytest.mark.parametrize(
    ("environ", "job_id"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "9"}, "9"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}, "9_0"),
    ],
)
def test_the_first_task_of_an_array_is_not_the_array(environ: dict[str, str], job_id: str | None) -> None:
    assert jobs.current_job(environ) == job_id


# squeue --array --noheader --format=%i|%T|%S|%e|%N|%P|%r|%k
QUEUE = """\
a site's banner
1_2|PENDING|N/A|N/A||low|JobArrayTaskLimit|jobkit tok-1
1_0|RUNNING|2026-03-05T06:27:00|2026-03-05T06:32:00|node1|low|None|jobkit tok-1
7|RUNNING|2026-03-05T06:27:00|2027-03-05T06:27:00|node[2-3]|low|None|a | b tok-10
8|PENDING|N/A|N/A||low|ReqNodeNotAvail, UnavailableNodes:node[1-2]|(null)
"""


def test_one_question_tells_the_jobs_of_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(jobs, "run", lambda *command, **_: asked.append(command) or QUEUE)
    queue = jobs.queue()
    assert len(asked) == 1
    assert [(job.job_id, job.state, job.end) for job in queue[:2]] == [
        ("1_2", "PENDING", None),
        ("1_0", "RUNNING", at("06:32:00")),
    ]
    assert (queue[2].comment, queue[2].nodes) == ("a | b tok-10", "node[2-3]")
    assert (queue[3].comment, queue[3].reason) == ("", "ReqNodeNotAvail, UnavailableNodes:node[1-2]")
    assert [job.job_id for job in jobs.with_token(queue, "tok-1", task=2)] == ["1_2"]
    assert [job.job_id for job in jobs.with_token(queue, "tok-10")] == ["7"]
    assert jobs.with_token(queue, "tok-1") == []


class Controller:
    """Answers `show job` with one record after the other; `requeue` fails with `refusal`."""

    def __init__(self, *records: str, refusal: str = "") -> None:
        self.records, self.refusal = list(records), refusal
        self.requeues: list[tuple[str, ...]] = []

    def run(self, *command: str, **_: object) -> str:
        if "show" in command:
            return (self.records.pop(0) if len(self.records) > 1 else self.records[0]) + "\n"
        self.requeues.append(command)
        if self.refusal:
            raise SchedulerError(self.refusal)
        return ""


PLAIN, CAREFUL = ("scontrol", "requeue", "9"), ("scontrol", "requeue", "Incomplete", "9")


@pytest.mark.parametrize(
    ("controller", "in_queue", "requeues"),
    [
        (Controller(RUNNING, GRACE_JUST_OVER), True, [CAREFUL]),
        (Controller(RUNNING, SCANCEL), False, [CAREFUL]),  # cancelled between the look and the command
        (Controller(SCANCEL), False, []),
        (Controller(GRACE_OVER), True, []),
        (Controller(WAITS_AGAIN), True, []),
        (Controller(TIME_LIMIT), True, [PLAIN]),
        (Controller(CRASHED, refusal="Job is pending execution"), True, [PLAIN]),
    ],
)
def test_a_requeue_never_revives_a_cancelled_job(
    monkeypatch: pytest.MonkeyPatch, controller: Controller, in_queue: bool, requeues: list[tuple[str, ...]]
) -> None:
    monkeypatch.setattr(jobs, "run", controller.run)
    monkeypatch.setattr(jobs, "controller_time", lambda: at("06:28:00"))
    assert jobs.requeue("9") is in_queue
    assert controller.requeues == requeues


def test_a_process_of_an_earlier_start_does_not_requeue_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(BACK)
    monkeypatch.setattr(jobs, "run", controller.run)
    monkeypatch.setattr(jobs, "controller_time", lambda: at("06:28:00"))
    assert jobs.requeue("9", restarts=0) and controller.requeues == []


@pytest.mark.parametrize(
    ("config", "seconds", "told"),
    [
        ({"AuthInfo": "socket=/run/munge,cred_expire=20", "KillWait": "30 sec"}, 51.0, "StartTime=now+51"),
        ({"AuthInfo": "socket=/run/munge,cred_expire=20", "KillWait": "30 sec"}, 50.0, None),
        ({"AuthInfo": "(null)"}, 290.4, "StartTime=now+290"),
        ({"AuthInfo": "(null)"}, 140.0, None),
    ],
)
def test_a_requeued_job_never_begins_before_slurms_own_wait(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, str], seconds: float, told: str | None
) -> None:
    said: list[tuple[str, ...]] = []
    monkeypatch.setattr(jobs, "config", lambda: config)
    monkeypatch.setattr(jobs, "run", lambda *command: said.append(command))
    jobs.begin_later("9", seconds)
    assert said == ([] if told is None else [("scontrol", "update", "JobId=9", told)])


def test_a_refused_requeue_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller(RUNNING, refusal="Requested operation is presently disabled for job 9")
    monkeypatch.setattr(jobs, "run", controller.run)
    monkeypatch.setattr(jobs, "controller_time", lambda: at("06:28:00"))
    with pytest.raises(SchedulerError, match="presently disabled") as raised:
        jobs.requeue("9")
    assert not isinstance(raised.value, SchedulerTimeout)


@pytest.mark.parametrize(
    ("error", "is_gone"),
    [
        (SchedulerError("scontrol: Invalid job id specified"), True),
        (SchedulerError("scontrol: Job 9_4 not found"), True),
        (SchedulerError("scontrol: Unable to contact slurm controller"), False),
        (SchedulerTimeout("scontrol: no answer"), False),
    ],
)
def test_silence_is_not_the_answer_that_a_job_is_gone(
    monkeypatch: pytest.MonkeyPatch, error: SchedulerError, is_gone: bool
) -> None:
    def fail(*_: str, **__: object) -> str:
        raise error

    monkeypatch.setattr(jobs, "run", fail)
    if is_gone:
        assert jobs.show("9_4") is None
    else:
        with pytest.raises(type(error), match=re.escape(str(error))):
            jobs.show("9_4")
