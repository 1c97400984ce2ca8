"""Why an attempt ended, what comes after it, and what the batch script will do about it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster, wait_until

from jobkit.errors import InputError
from jobkit.run.config import UNLIMITED, Config, Resources, RetryConfig
from jobkit.run.records import Failure
from jobkit.run.status import CAUSES, Attempt
from jobkit.slurm import JobInfo, early_timeout_signal, explain, parse_job, stop_cause, stop_margin
from jobkit.submission import options
from jobkit.submission.plan import LaunchPlan, batch_lines, make_plan, visible_gpus
from jobkit.submission.sbatch import script
from jobkit.supervisor.retry import BLAMES_NODE, BUDGETS, decide

# The decision

GRACEFUL = ("preempted", "timeout", "signal", "user", "cancelled", "finished")
"""Ends at which a checkpoint of the last step is written."""


def ended(
    cause: str | None,
    first: int | None = 0,
    last: int | None = None,
    durable: int | None = None,
    submission: int = 1,
    **failure: Any,
) -> Attempt:
    """An attempt from step `first` (None: it never came to its loop) to step `last`.

    `durable`, the newest checkpoint it leaves, is the last step of one that ended gracefully, else where it began.
    """
    last = first if last is None else last
    if durable is None:
        durable = (last if cause in GRACEFUL else first) or 0
    return Attempt(
        id=1,
        cluster="slurm",
        job_id="7",
        started=0.0,
        cause=cause,
        first_step=first,
        last_step=last,
        durable_step=durable,
        submission=submission,
        failure=Failure(**failure) if failure else None,
    )


TIMEOUT_5 = ended("timeout", 5)
PREEMPTED_5 = ended("preempted", 5)
CRASH_5 = ended("crashed", 5, 7)
SPENT = [CRASH_5] * 3

DECISIONS: list[tuple[str, Sequence[Attempt], bool]] = [
    # What ends an attempt, once
    ("preempted", [ended("preempted", 0, 5)], True),
    ("a signal of somebody's own", [ended("signal", 0, 5)], True),
    ("out of time", [ended("timeout", 0, 5)], True),
    ("a node died", [ended("node_failure", 0, 5)], True),
    ("vanished", [ended("lost", 0, 5)], True),
    ("without an end in the journal", [ended(None, 0, 5)], True),
    ("crashed", [ended("crashed", 0, 5)], True),
    ("killed", [ended("killed", 0, 5)], True),
    ("out of memory", [ended("out_of_memory", 0, 5)], True),
    ("hung", [ended("hang", 0, 5)], True),
    # What is final, or for a person
    ("finished", [ended("finished", 0, 5)], False),
    ("cancelled", [ended("cancelled", 0, 5)], False),
    ("stopped by its user", [ended("user", 0, 5)], False),
    ("the disk is full", [ended("disk", 0, 5)], False),
    ("a script that ended without finish", [ended("left", 0, 5)], False),
    ("something new", [ended("eaten", 0, 5)], False),
    # Time limits
    ("out of time a hundred times, each a step further", [ended("timeout", n, n + 1) for n in range(100)], True),
    ("out of time without a step, once", [TIMEOUT_5], True),
    ("out of time without a step, twice", [TIMEOUT_5] * 2, True),
    ("out of time without a step, once too often", [TIMEOUT_5] * 3, False),
    ("out of time before the loop, once too often", [ended("timeout", None)] * 3, False),
    ("a preemption between does not help", [TIMEOUT_5, TIMEOUT_5, PREEMPTED_5, TIMEOUT_5], False),
    ("a preemption that got further does", [TIMEOUT_5, TIMEOUT_5, ended("preempted", 5, 6), ended("timeout", 6)], True),
    ("a step between starts the count anew", [TIMEOUT_5, TIMEOUT_5, ended("timeout", 5, 6), ended("timeout", 6)], True),
    ("steps long ago do not help", [ended("timeout", 0, 5), *[TIMEOUT_5] * 3], False),
    ("a step that no checkpoint holds is none", [ended("timeout", 5, 6, durable=5)] * 3, False),
    # Preemptions
    ("preempted, for the hundredth time and with nothing done", [ended("preempted", 0)] * 100, True),
    ("signals for the hundredth time", [ended("signal", 0)] * 100, True),
    # Nodes
    ("nodes died nine times without progress", [ended("node_failure", 5)] * 9, True),
    ("nodes died ten times without progress", [ended("node_failure", 5)] * 10, False),
    ("vanished and died, ten times in all", [ended("node_failure", 5), ended("lost", 5)] * 5, False),
    ("nodes died twenty times, each a checkpoint further", [ended("lost", n, n, n + 1) for n in range(20)], True),
    # Crashes
    ("crashed twice", [CRASH_5] * 2, True),
    ("crashed thrice", SPENT, False),
    ("crashed, killed and hung", [CRASH_5, ended("killed", 5), ended("hang", 5)], False),
    ("crashed twice, and then out of time", [CRASH_5, CRASH_5, TIMEOUT_5], True),
    ("crashed and timed out in turn, neither thrice", [CRASH_5, TIMEOUT_5] * 2, True),
    ("crashed and timed out in turn, the one thrice", [CRASH_5, TIMEOUT_5, CRASH_5, TIMEOUT_5, CRASH_5], False),
    ("crashed and preempted in turn, without progress", [CRASH_5, PREEMPTED_5] * 2 + [CRASH_5], False),
    ("crashed and preempted in turn, the preemption last", [CRASH_5, PREEMPTED_5] * 3, True),
    ("crashed thrice, and left a newer checkpoint", [CRASH_5, CRASH_5, ended("crashed", 5, 9, durable=8)], True),
    ("crashed thrice since", [ended("crashed", 0, 9, durable=5), *[CRASH_5] * 3], False),
    ("crashed twice since", [ended("crashed", 0, 9, durable=5), *[CRASH_5] * 2], True),
    (
        "an older checkpoint again is no progress",
        [ended("crashed", 0, 9, durable=8), *[ended("crashed", 4, 8, 8)] * 3],
        False,
    ),
    ("crashed before the loop, with a checkpoint there", [ended("crashed", None, None, durable=50)] * 3, False),
    ("crashed before the loop, twice, likewise", [ended("crashed", None, None, durable=50)] * 2, True),
    # One step that fails again and again
    ("one step failed twice", [ended("crashed", n, 9, n + 1, step=9) for n in range(2)], True),
    (
        "one step failed thrice, each from a newer checkpoint",
        [ended("crashed", n, 9, n + 1, step=9) for n in range(3)],
        False,
    ),
    ("other steps failed", [ended("crashed", n, n + 1, n + 1, step=n) for n in range(9)], True),
    ("one step failed, others between", [ended("crashed", n, 9, n + 1, step=9 - n % 2) for n in range(4)], True),
    (
        "one step failed thrice, others between",
        [ended("crashed", n, 9, n + 1, step=9 - n % 2) for n in range(5)],
        False,
    ),
    (
        "one step failed thrice, for memory the last time",
        [ended("crashed", n, 9, n + 1, step=9) for n in range(2)] + [ended("out_of_memory", 2, 9, 3, step=9)],
        False,
    ),
    ("kills that know of no step", [ended("killed", n, 9, n + 1, rank=1) for n in range(9)], True),
    # An exception on every node
    ("everywhere, before the first step", [ended("crashed", None, everywhere=True)], False),
    ("everywhere, in the first step", [ended("crashed", 0, 0, step=0, everywhere=True)], False),
    ("everywhere, later", [ended("crashed", 0, 1, step=1, everywhere=True)], True),
    ("on one node alone, before the first step", [ended("crashed", None, everywhere=False)], True),
    (
        "everywhere, but it has worked before",
        [ended("preempted", 0, 5), ended("crashed", None, durable=5, everywhere=True)],
        True,
    ),
    ("everywhere, and a preemption before", [ended("preempted", None), ended("crashed", None, everywhere=True)], False),
    # A person's submission counts anew
    ("spent, and submitted again", [*SPENT, ended("crashed", 5, submission=2)], True),
    ("spent twice", [*SPENT, *[ended("crashed", 5, submission=2)] * 3], False),
    (
        "submitted again, and dead before the loop",
        [*SPENT, *[ended("crashed", None, durable=5, submission=2)] * 3],
        False,
    ),
    (
        "everywhere, before the first step of what was submitted again",
        [ended("preempted", 0, 5), ended("crashed", None, durable=5, submission=2, everywhere=True)],
        False,
    ),
    (
        "one step, thrice in all, but not since it was submitted",
        [ended("crashed", n, 9, n + 1, step=9, submission=1 + n // 2) for n in range(3)],
        True,
    ),
]


@pytest.mark.parametrize(("attempts", "again"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_what_comes_after_an_attempt(attempts: Sequence[Attempt], again: bool) -> None:
    decision = decide(attempts)
    assert decision.action == ("requeue" if again else "stop")
    assert decision.reason
    assert decision.failed == (not again and (attempts[-1].cause in BUDGETS))


BUDGET_ROWS: list[tuple[str, RetryConfig, Sequence[Attempt], bool]] = [
    ("no preemption allowed", RetryConfig(preemption=0), [ended("preempted", 0, 5)], False),
    ("no signal allowed", RetryConfig(preemption=0), [ended("signal", 0, 5)], False),
    ("no time limit allowed", RetryConfig(time_limit=0), [ended("timeout", 0, 5)], False),
    ("no dead node allowed", RetryConfig(node_failure=0), [ended("lost", 0, 5, 5)], False),
    ("no crash allowed", RetryConfig(crash=0), [ended("crashed", 0, 5, 5)], False),
    ("no crash allowed, but a preemption", RetryConfig(crash=0), [PREEMPTED_5], True),
    ("no crash allowed, and none came last", RetryConfig(crash=0), [CRASH_5, PREEMPTED_5], True),
    ("one, with progress", RetryConfig(crash=1), [ended("crashed", 0, 9, 5)], True),
    ("one, without progress", RetryConfig(crash=1), [CRASH_5], False),
    ("one, with progress, in a known step", RetryConfig(crash=1), [ended("crashed", 0, 9, 5, step=9)], False),
    ("two preemptions allowed, one", RetryConfig(preemption=2), [PREEMPTED_5], True),
    ("two preemptions allowed, two", RetryConfig(preemption=2), [PREEMPTED_5, ended("signal", 5)], False),
    ("two preemptions allowed, many with progress", RetryConfig(preemption=2), [ended("preempted", 0, 5)], True),
    ("unlimited crashes", RetryConfig(crash=UNLIMITED), [CRASH_5] * 100, True),
    ("unlimited crashes in one step", RetryConfig(crash=UNLIMITED), [ended("crashed", 5, 9, step=9)] * 100, True),
    (
        "unlimited crashes, but everywhere and at once",
        RetryConfig(crash=UNLIMITED),
        [ended("crashed", None, everywhere=True)],
        False,
    ),
    ("unlimited time limits", RetryConfig(time_limit=UNLIMITED), [TIMEOUT_5] * 100, True),
    ("unlimited dead nodes", RetryConfig(node_failure=UNLIMITED), [ended("lost", 5)] * 100, True),
    ("finished, with budgets left", RetryConfig(crash=UNLIMITED), [ended("finished", 0, 5)], False),
    ("cancelled, with budgets left", RetryConfig(preemption=UNLIMITED), [ended("cancelled", 0, 5)], False),
]


@pytest.mark.parametrize(
    ("retry", "attempts", "again"), [row[1:] for row in BUDGET_ROWS], ids=[row[0] for row in BUDGET_ROWS]
)
def test_a_budget_is_what_the_yaml_says(retry: RetryConfig, attempts: Sequence[Attempt], again: bool) -> None:
    assert (decide(attempts, retry).action == "requeue") == again


def test_every_cause_of_a_budget_or_a_blame_is_one_that_is_explained() -> None:
    assert set(BUDGETS) <= set(CAUSES)
    assert set(BLAMES_NODE) <= set(BUDGETS)
    assert set(BUDGETS.values()) | {"exclude_after"} == set(RetryConfig.__dataclass_fields__)


@pytest.mark.parametrize("attempts", [[PREEMPTED_5], [TIMEOUT_5], [CRASH_5]])
def test_a_job_that_cannot_be_requeued_is_followed_by_a_new_one(attempts: list[Attempt]) -> None:
    assert decide(attempts, can_requeue=False).action == "resubmit"


@pytest.mark.parametrize("attempts", [[ended("cancelled")], SPENT])
def test_a_run_that_has_ended_is_not_followed_by_a_new_job_either(attempts: list[Attempt]) -> None:
    assert decide(attempts, can_requeue=False).action == "stop"


@pytest.mark.parametrize(
    ("attempts", "said"),
    [
        ([TIMEOUT_5] * 3, ["timeout", "3 attempt(s) without progress", "retry.time_limit: 3", "raise resources.time"]),
        (
            [ended("crashed", 5, error="rank 1: ValueError: no")] * 3,
            ["rank 1: ValueError: no", "3 attempt(s) without progress", "retry.crash: 3"],
        ),
        ([ended("out_of_memory", 5)] * 3, ["smaller batch"]),
        ([ended("hang", 5)] * 3, ["hang", "stacks", "watchdog"]),
        ([ended("node_failure", 5)] * 10, ["node_failure", "retry.node_failure: 10"]),
        (
            [ended("crashed", n, 9, n + 1, step=9, error="NaN") for n in range(3)],
            ["NaN", "step 9 failed 3 times", "retry.crash: 3"],
        ),
        ([ended("crashed", None, everywhere=True, error="ImportError")], ["ImportError", "before the first step"]),
    ],
)
def test_a_run_that_fails_says_what_happened_by_which_rule_and_what_to_change(
    attempts: list[Attempt], said: list[str]
) -> None:
    reason = decide(attempts).reason
    assert "\n" not in reason
    for part in said:
        assert part in reason


def test_a_budget_of_nothing_says_so() -> None:
    assert "retry.crash: 0" in decide([CRASH_5], RetryConfig(crash=0)).reason


# Nodes to keep away from


def killed_on(*nodes: str, cause: str = "killed", submission: int = 1, **failure: Any) -> list[Attempt]:
    """Attempts with progress that ended for what happened on one node, one after the other."""
    return [
        ended(cause, 10 * n, 10 * n + 9, 10 * n + 5, submission, node=node, **failure) for n, node in enumerate(nodes)
    ]


EXCLUSIONS: list[tuple[str, Sequence[Attempt], Sequence[str], tuple[str, ...]]] = [
    ("once is chance", killed_on("node2"), [], ()),
    ("twice is not", killed_on("node2", "node2"), [], ("node2",)),
    ("another one between", killed_on("node2", "node3", "node2"), [], ("node2",)),
    ("each once", killed_on("node1", "node2", "node3"), [], ()),
    ("two at once", killed_on("node3", "node2", "node2", "node3"), ["node2"], ("node3",)),
    ("several, in order", killed_on("node3", "node2", "node2", "node3"), [], ("node2", "node3")),
    ("excluded before", killed_on("node2", "node2", "node2"), ["node2"], ()),
    ("excluded before, among others", killed_on("node2", "node2"), ["node1", "node2"], ()),
    ("by several causes", [*killed_on("node2"), *killed_on("node2", cause="node_failure")], [], ("node2",)),
    ("a node that died twice", killed_on("node2", "node2", cause="node_failure"), [], ("node2",)),
    ("hung twice", killed_on("node2", "node2", cause="hang"), [], ("node2",)),
    ("an exception on it alone", killed_on("node2", "node2", cause="crashed", everywhere=False), [], ("node2",)),
    ("an exception everywhere", killed_on("node2", "node2", cause="crashed", everywhere=True), [], ()),
    ("preempted there", killed_on("node2", "node2", cause="preempted"), [], ()),
    ("vanished", [ended("lost", 0, 5, 5)] * 2, [], ()),
    ("nobody knows where", [ended("killed", 0, 5, 5, rank=3)] * 2, [], ()),
    ("locally, where nodes have no names", [ended("killed", 0, 5, 5, node=None)] * 2, [], ()),
    (
        "before it was submitted again",
        [*killed_on("node2"), *killed_on("node2", submission=2)],
        [],
        (),
    ),
]


@pytest.mark.parametrize(
    ("attempts", "excluded", "exclude"), [row[1:] for row in EXCLUSIONS], ids=[row[0] for row in EXCLUSIONS]
)
def test_a_node_that_fails_again_is_not_used_again(
    attempts: Sequence[Attempt], excluded: Sequence[str], exclude: tuple[str, ...]
) -> None:
    decision = decide(attempts, excluded=excluded)
    assert decision.exclude == exclude
    assert decision.action == "requeue"
    assert decide(attempts, excluded=excluded, can_requeue=False).exclude == exclude


@pytest.mark.parametrize(("after", "exclude"), [(1, ("node2",)), (2, ()), (3, ())])
def test_the_yaml_says_how_often_a_node_may_fail(after: int, exclude: tuple[str, ...]) -> None:
    assert decide(killed_on("node2"), RetryConfig(exclude_after=after)).exclude == exclude


def test_a_run_that_is_not_started_again_excludes_nothing() -> None:
    attempts = [ended("killed", 5, node="node2")] * 3
    assert (decide(attempts).action, decide(attempts).exclude) == ("stop", ())


# What Slurm says: `scontrol --oneliner show job` of Slurm 22.05, less the fields between that nobody reads.

HEAD = (
    "JobId=9 JobName=wrap UserId=me(1) GroupId=me(1) MCS_label=N/A Priority=4294901752 Nice=0 Account=(null) QOS=(null)"
)
TAIL = "Scheduler=Main Partition=low ReqNodeList=(null) ExcNodeList=(null) Command=(null) WorkDir=/a b Power="


def line(job: str, times: str, place: str = "NodeList=node1 BatchHost=node1 NumNodes=1") -> str:
    return f"{HEAD} {job} Deadline=N/A {times} SecsPreSuspend=0 {TAIL} {place}"


RUNNING = line(
    "JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:01 TimeLimit=00:05:00",
    "StartTime=2026-03-05T06:27:00 EndTime=2026-03-05T06:32:00 PreemptEligibleTime=Unknown PreemptTime=None",
)
PREEMPTED = line(  # in its grace time, at whose end EndTime is now
    "JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:04 TimeLimit=00:05:00",
    "StartTime=2026-03-05T06:27:00 EndTime=2026-03-05T06:27:17 PreemptTime=2026-03-05T06:27:02 SuspendTime=None",
)
SCANCEL_IN_GRACE = PREEMPTED.replace("RUNNING", "COMPLETING").replace("06:27:17", "06:27:04")
GRACE_OVER = line(  # its ranks are being killed, and Slurm has requeued it
    "JobState=COMPLETING Reason=None Requeue=1 Restarts=1 BatchFlag=1 ExitCode=0:0 RunTime=00:00:00 TimeLimit=00:05:00",
    "StartTime=2026-03-05T06:27:22 EndTime=Unknown SuspendTime=None",
)
BACK = line(
    "JobState=RUNNING Reason=None Requeue=1 Restarts=1 BatchFlag=1 ExitCode=0:0 RunTime=00:01:13 TimeLimit=00:05:00",
    "StartTime=2026-03-05T06:27:39 EndTime=2026-03-05T06:32:39 PreemptTime=None SuspendTime=None",
)
SCANCEL = line(
    "JobState=COMPLETING Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:15 RunTime=00:00:01",
    "StartTime=2026-03-05T06:27:06 EndTime=2026-03-05T06:27:07 PreemptTime=None SuspendTime=None",
)
PREEMPTED_FOR_GOOD = line(  # by PreemptMode=CANCEL, at the end of the grace time or without one
    "JobState=COMPLETING Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:20",
    "StartTime=2026-03-05T06:27:06 EndTime=2026-03-05T06:27:26 PreemptTime=2026-03-05T06:27:26 SuspendTime=None",
)
SCANCEL_OVER = line(
    "JobState=CANCELLED Reason=Priority Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:00",
    "StartTime=2026-03-05T06:23:47 EndTime=2026-03-05T06:23:47 PreemptTime=None SuspendTime=None",
)
TIME_LIMIT = line(
    "JobState=COMPLETING Reason=TimeLimit Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:15 RunTime=00:01:18",
    "StartTime=2026-03-05T06:27:17 EndTime=2026-03-05T06:28:35 PreemptTime=None SuspendTime=None",
)
TIMEOUT = TIME_LIMIT.replace("COMPLETING", "TIMEOUT")
SCRIPT_KILLED = line(  # its ranks are getting SIGTERM
    "JobState=COMPLETING Reason=JobLaunchFailure Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:9 RunTime=00:00:12",
    "StartTime=2026-03-05T06:27:06 EndTime=2026-03-05T06:27:18 PreemptTime=None SuspendTime=None",
)
SCRIPT_DEAD = SCRIPT_KILLED.replace("COMPLETING", "FAILED")
NODE_DOWN = line(  # it was submitted with --no-requeue
    "JobState=COMPLETING Reason=NodeDown Requeue=0 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:30",
    "StartTime=2026-03-05T06:27:06 EndTime=2026-03-05T06:27:36 PreemptTime=None SuspendTime=None",
)
NODE_FAIL = NODE_DOWN.replace("COMPLETING", "NODE_FAIL")
OUT_OF_MEMORY = line(
    "JobState=OUT_OF_MEMORY Reason=OutOfMemory Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:125 RunTime=00:00:30",
    "StartTime=2026-03-05T06:27:06 EndTime=2026-03-05T06:27:36 PreemptTime=None SuspendTime=None",
)
HELD = line(
    "JobState=PENDING Reason=JobHeldUser Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:00",
    "TimeLimit=UNLIMITED EligibleTime=Unknown StartTime=Unknown EndTime=Unknown SuspendTime=None",
    "NodeList= NumNodes=1-1",
)
ENDLESS = line(
    "JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=2-03:00:02 TimeLimit=UNLIMITED",
    "StartTime=2026-03-05T06:27:00 EndTime=Unknown PreemptTime=None SuspendTime=None",
)
LIMITLESS = line(  # what Slurm says of a job that waited in a partition without a limit
    "JobState=RUNNING Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:01:00",
    "TimeLimit=365-00:00:00 StartTime=2026-03-05T06:27:00 EndTime=2027-03-05T06:27:00 PreemptTime=None",
)
CRASHED = line(
    "JobState=FAILED Reason=NonZeroExitCode Requeue=1 Restarts=0 BatchFlag=1 ExitCode=3:0 RunTime=00:00:00",
    "StartTime=2026-03-05T06:23:48 EndTime=2026-03-05T06:23:48 PreemptTime=None SuspendTime=None",
)


def after(runtime: str, text: str = RUNNING) -> str:
    """A job's record when it has been running for so long."""
    return re.sub(r"RunTime=\S+", f"RunTime={runtime}", text)


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2026-03-05T{clock}").timestamp()


def test_a_jobs_record_is_read() -> None:
    assert parse_job(RUNNING) == JobInfo(
        job_id="9",
        state="RUNNING",
        reason="None",
        preempt_time=None,
        start=at("06:27:00"),
        end=at("06:32:00"),
        elapsed=1.0,
        restarts=0,
        nodes="node1",
        partition="low",
        requeueable=True,
        excluded="",
    )
    assert parse_job(PREEMPTED).preempt_time == at("06:27:02")
    assert parse_job(BACK).restarts == 1
    assert not parse_job(NODE_DOWN).requeueable
    assert parse_job(RUNNING.replace("ExcNodeList=(null)", "ExcNodeList=node[2-3]")).excluded == "node[2-3]"
    held = parse_job(HELD)
    assert (held.start, held.end, held.nodes, held.ended) == (None, None, "", False)
    assert parse_job("").state == "UNKNOWN"


@pytest.mark.parametrize(
    ("text", "limit", "elapsed", "remaining"),
    [
        (RUNNING, 300.0, 1.0, 299.0),
        (after("00:04:10"), 300.0, 250.0, 50.0),
        (after("00:05:20"), 300.0, 320.0, -20.0),
        (after("1-02:03:04"), 300.0, 93784.0, -93484.0),
        (after("INVALID"), 300.0, 0.0, 300.0),
        (PREEMPTED, 17.0, 4.0, 13.0),
        (HELD, None, 0.0, None),
        (ENDLESS, None, 183602.0, None),
        (LIMITLESS, 365 * 86400.0, 60.0, None),
    ],
)
def test_a_jobs_time_is_counted_from_its_start(
    text: str, limit: float | None, elapsed: float, remaining: float | None
) -> None:
    job = parse_job(text)
    assert (job.limit, job.elapsed, job.remaining) == (limit, elapsed, remaining)


def test_within_a_job_its_time_is_counted_by_the_clock_that_saw_it_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    for ago, cause in [(100, None), (250, "timeout")]:
        monkeypatch.setenv("JOBKIT_BEGAN", str(time.time() - ago))
        assert stop_cause(parse_job(after("99:00:00")), margin=90.0) == cause


@pytest.mark.parametrize(
    ("text", "ended"),
    [(RUNNING, False), (PREEMPTED, False), (SCANCEL, False), (TIME_LIMIT, False), (HELD, False), (NODE_DOWN, False)]
    + [(SCANCEL_OVER, True), (TIMEOUT, True), (CRASHED, True), (NODE_FAIL, True), (OUT_OF_MEMORY, True)],
)
def test_a_job_has_ended_when_slurm_will_do_no_more_with_it(text: str, ended: bool) -> None:
    assert parse_job(text).ended == ended


STOP_CAUSES = [
    ("running", after("00:01:00"), None),
    ("running, and back from the queue", BACK, None),
    ("a minute and a half before the end", after("00:03:29"), None),
    ("in the margin before the end", after("00:03:30"), "timeout"),
    ("past the end", after("00:06:00"), "timeout"),
    ("without an end", ENDLESS, None),
    ("without a limit", LIMITLESS, None),
    ("preempted", PREEMPTED, "preempted"),
    ("preempted, in the margin of the grace time's end", after("00:00:17", PREEMPTED), "preempted"),
    ("preempted for good", PREEMPTED_FOR_GOOD, "preempted"),
    ("preempted, over", PREEMPTED.replace("RUNNING", "PREEMPTED"), "preempted"),
    ("scancel", SCANCEL, "cancelled"),
    ("scancel, over", SCANCEL_OVER, "cancelled"),
    ("the time limit's kill, over", TIMEOUT, "timeout"),
    ("the batch script was killed", SCRIPT_KILLED, "killed"),
    ("the batch script was killed, over", SCRIPT_DEAD, "killed"),
    ("a node went down", NODE_DOWN, "node_failure"),
    ("a node went down, over", NODE_FAIL, "node_failure"),
    ("out of memory", OUT_OF_MEMORY, "out_of_memory"),
    ("waiting", HELD, None),
    ("crashed", CRASHED, None),
]


@pytest.mark.parametrize(("text", "cause"), [row[1:] for row in STOP_CAUSES], ids=[row[0] for row in STOP_CAUSES])
def test_the_jobs_record_says_why_it_is_being_stopped(text: str, cause: str | None) -> None:
    assert stop_cause(parse_job(text), margin=90.0) == cause


def test_a_job_that_slurm_kills_at_its_time_limit_is_not_taken_for_cancelled() -> None:
    assert stop_cause(parse_job(TIME_LIMIT), margin=0.0) == "timeout"


def test_a_job_that_is_cancelled_in_its_grace_time_is_cancelled() -> None:
    assert stop_cause(parse_job(SCANCEL_IN_GRACE), margin=0.0) == "cancelled"


def test_a_job_that_slurm_requeues_at_the_end_of_its_grace_time_is_not_taken_for_cancelled() -> None:
    assert stop_cause(parse_job(GRACE_OVER), margin=0.0) == "preempted"


@pytest.mark.parametrize("text", [SCRIPT_KILLED, SCRIPT_DEAD])
def test_a_job_whose_script_was_killed_is_known_by_slurms_reason(text: str) -> None:
    assert parse_job(text).script_died


@pytest.mark.parametrize("text", [RUNNING, SCANCEL, SCANCEL_OVER, TIME_LIMIT, GRACE_OVER, CRASHED])
def test_a_job_that_ends_for_another_reason_has_not_lost_its_script(text: str) -> None:
    assert not parse_job(text).script_died


@pytest.mark.parametrize(
    ("runtime", "early"),
    [("00:00:10", False), ("00:02:24", False), ("00:02:25", True), ("00:03:00", True), ("00:04:59", True)],
)
def test_slurm_may_send_its_signal_a_minute_early(runtime: str, early: bool) -> None:
    assert early_timeout_signal(parse_job(after(runtime)), margin=90.0) == early


@pytest.mark.parametrize("text", [HELD, ENDLESS, LIMITLESS])
def test_a_job_without_an_end_has_no_early_signal(text: str) -> None:
    assert not early_timeout_signal(parse_job(text), margin=90.0)


@pytest.mark.parametrize(("limit", "margin"), [(60, 12.0), (300, 60.0), (450, 90.0), (86400, 90.0)])
def test_a_job_stops_a_fifth_of_its_time_but_at_most_90_seconds_before_the_end(limit: float, margin: float) -> None:
    assert stop_margin(limit) == margin


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        (
            "sbatch: error: invalid partition specified: nosuch\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
            ["invalid partition specified: nosuch; Batch", "sinfo", "clusters.<name>.partition"],
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
            ["sacctmgr", "clusters.<name>.account"],
        ),
        (
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
            ["sbatch: Unable to contact", "scontrol ping"],
        ),
        ("", ["failed without a word"]),
    ],
)
def test_slurms_complaint_is_told_in_one_line_with_what_to_do(stderr: str, said: list[str]) -> None:
    text = explain("sbatch", stderr)
    assert "\n" not in text
    for part in said:
        assert part in text


def test_the_record_of_a_real_job_says_why_it_is_being_stopped(slurm: Cluster, tmp_path: Path) -> None:
    def cause(job: str) -> str | None:
        return stop_cause(parse_job(slurm.command("scontrol", "--oneliner", "show", "job", job)), 12.0)

    stubborn = "--wrap=srun sh -c 'trap : TERM; while true; do sleep 1; done'"
    place = ["sbatch", "--parsable", "--output=/dev/null", f"--chdir={tmp_path}", "--partition=low", "--nodes=1"]
    jobs = [slurm.command(*place, "--exclusive", "--time=5", stubborn) for _ in range(2)]
    for job in jobs:
        wait_until(lambda job=job: slurm.job(job)["JobState"] == "RUNNING", f"job {job} to run", 120)
        # Its last step is what holds it in COMPLETING later on.
        wait_until(lambda job=job: slurm.command("squeue", "-h", "-s", f"--job={job}"), f"a step of job {job}", 60)
        assert cause(job) is None
    preempted, cancelled = jobs
    slurm.preempt(preempted)
    wait_until(lambda: cause(preempted) is not None, "the preemption")
    assert cause(preempted) == "preempted"
    slurm.command("scancel", cancelled)
    assert cause(cancelled) == "cancelled"
    slurm.command("scancel", preempted)


# The plan


def plan(clusters: dict[str, Any] | None = None, cluster: str = "slurm", **resources: Any) -> LaunchPlan:
    config = Config(name="toy", task="m:f", resources=Resources(**resources), clusters=clusters or {})
    return make_plan(Path("/runs/toy-12345678"), config, cluster)


def sbatch_lines(made: LaunchPlan) -> dict[str, str]:
    """The #SBATCH lines as {option: value}."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script(made), re.MULTILINE))


def test_the_script_asks_for_the_resources() -> None:
    lines = sbatch_lines(plan(nodes=2, tasks_per_node=3, gpus_per_task=1, cpus_per_task=4, time="1:30:30"))
    expected = {"nodes": "2", "ntasks-per-node": "3", "gpus-per-task": "1", "cpus-per-task": "4", "time": "91"}
    expected |= {"job-name": "toy-12345678", "signal": "USR2@90", "requeue": "", "open-mode": "append"}
    assert {key: lines[key] for key in expected} == expected
    assert "wckey" not in lines


@pytest.mark.parametrize("written", ["30s", "1", "0:05:00", "9min", "2d"])
def test_the_stop_signal_comes_within_the_time_limit(written: str) -> None:
    lines = sbatch_lines(plan(time=written))
    before = int(lines["signal"].removeprefix("USR2@"))
    assert 0 < before < int(lines["time"]) * 60


def test_a_cluster_may_have_resources_of_its_own() -> None:
    entry = {"nodes": 4, "tasks_per_node": 8, "time": "2h", "cpus-per-task": 6}
    made = plan({"h100": entry}, "h100", nodes=1, gpus_per_task=1)
    assert made.scheduler == "slurm"
    assert made.config.resources == Resources(nodes=4, tasks_per_node=8, gpus_per_task=1, cpus_per_task=6, time="2h")
    lines = sbatch_lines(made)
    assert (lines["nodes"], lines["ntasks-per-node"], lines["time"]) == ("4", "8", "120")


@pytest.mark.parametrize("key", ["oversubscribe", "gpu_freq", "gpu-freq", "mem-bind", "nice", "reservation"])
def test_any_option_of_sbatch_passes_through_with_dashes_or_underscores(key: str) -> None:
    assert sbatch_lines(plan({"slurm": {key: "value", "partition": "low"}}))[key.replace("_", "-")] == "value"


def test_options_for_sbatch_alone_may_be_given_as_additional_parameters() -> None:
    lines = sbatch_lines(plan({"slurm": {"additional_parameters": {"brand_new": 3}, "nice": 5}}))
    assert (lines["brand-new"], lines["nice"], lines["requeue"]) == ("3", "5", "")


@pytest.mark.parametrize("key", ["array", "output", "requeue", "no-requeue", "signal", "job_name"])
def test_additional_parameters_are_no_way_around_what_jobkit_owns(key: str) -> None:
    with pytest.raises(InputError, match=key):
        plan({"slurm": {"additional_parameters": {key: "0-3"}}})


OPTION_MISTAKES = [
    ({"partion": "low"}, ["clusters.slurm.partion", "did you mean 'partition'?", "man sbatch"]),
    ({"cpus": 1}, ["clusters.slurm.cpus: not an option of sbatch"]),
    ({"output": "x"}, ["clusters.slurm.output", "jobkit logs"]),
    ({"ntasks-per-node": 2}, ["clusters.slurm.ntasks-per-node", "tasks_per_node"]),
    ({"array": "0-3"}, ["clusters.slurm.array", "one run is one job"]),
    ({"scheduler": "pbs"}, ["clusters.slurm.scheduler: found 'pbs'", "slurm, local"]),
    ({"nodes": 0}, ["clusters.slurm.nodes: found 0", "1 or more"]),
    ({"time": "soon"}, ["clusters.slurm.time: found 'soon'", "30min"]),
    ({"additional_parameters": 5}, ["clusters.slurm.additional_parameters: found 5", "a mapping"]),
]


@pytest.mark.parametrize(("entry", "said"), OPTION_MISTAKES, ids=[str(row[0]) for row in OPTION_MISTAKES])
def test_a_mistake_in_a_cluster_is_named(entry: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        plan({"slurm": entry})
    for part in said:
        assert part in str(refused.value)


WRONG_TYPES = [{"setup": 5}, {"setup": [5]}, {"teardown": 5}, {"srun_args": 5}, {"partition": ["low"]}, {"mem": {}}]


@pytest.mark.parametrize("entry", WRONG_TYPES, ids=str)
def test_an_option_of_the_wrong_type_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"clusters.slurm.{next(iter(entry))}"):
        plan({"slurm": entry})


def test_every_owned_option_is_refused_and_no_allowed_one_is_owned() -> None:
    for key in options.OWNED:
        with pytest.raises(InputError, match="jobkit sets this itself"):
            options.split("slurm", {key: "x"})
    assert not options.OTHER_SBATCH & set(options.OWNED)


@pytest.mark.parametrize(
    ("name", "clusters", "said"),
    [
        ("slrum", {}, "did you mean 'slurm'?"),
        ("h10", {"h100": {}}, "did you mean 'h100'?"),
        ("mars", {"h100": {}}, "known: h100, slurm, local"),
    ],
)
def test_an_unknown_cluster_is_refused_with_the_nearest(name: str, clusters: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"--cluster {name}: no such cluster") as refused:
        plan(clusters, name)
    assert said in str(refused.value)


def test_a_cluster_entry_may_be_this_machine() -> None:
    made = plan({"box": {"scheduler": "local", "nodes": 2}}, "box")
    assert (made.scheduler, made.parameters, made.config.resources.nodes) == ("local", {}, 2)


# The batch script


def before_the_attempt(made: LaunchPlan) -> list[str]:
    """The lines of setup before the attempt begins."""
    return list(takewhile(lambda text: "batch begin" not in text, batch_lines(made)[0]))


def test_setup_that_fails_ends_the_job_before_the_attempt_begins(tmp_path: Path) -> None:
    made = plan({"slurm": {"setup": ["true", "false", f"touch {tmp_path}/after"]}})
    text = "\n".join([*before_the_attempt(made), f"touch {tmp_path}/begun"])
    assert subprocess.run(["bash", "-c", text], check=False).returncode
    assert list(tmp_path.iterdir()) == []


def test_setup_that_works_leaves_the_shell_as_it_was() -> None:
    made = plan({"slurm": {"setup": "export GREETING=hello"}})
    text = "\n".join([*before_the_attempt(made), "trap - EXIT", "false", 'echo "$GREETING"'])
    assert subprocess.check_output(["bash", "-c", text], text=True) == "hello\n"


def test_without_setup_nothing_can_fail_before_the_attempt() -> None:
    text = "\n".join(before_the_attempt(plan()))
    assert "set -e" not in text
    assert in_bash(text, "trap - EXIT").returncode == 0


def in_bash(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=False, timeout=60)


def stand_in(text: str, instead: str) -> str:
    """A line of the script with another program in the place of `python -m jobkit...`."""
    return text.replace(f"{sys.executable} -m jobkit.launch.", f"{instead} ")


@pytest.mark.parametrize(
    ("begin", "code", "goes_on"),
    [
        ("printf 'export JOBKIT_ATTEMPT=3\n'; true", 0, True),
        ("true", 0, False),
        ("exit 1; true", 1, False),
    ],
    ids=["begun", "finished or cancelled", "refused"],
)
def test_the_script_goes_on_only_with_an_attempt_that_has_begun(begin: str, code: int, goes_on: bool) -> None:
    setup = [stand_in(text, f"{begin} ") for text in batch_lines(plan())[0]]
    done = in_bash(*setup, "wait", 'echo "attempt $JOBKIT_ATTEMPT"')
    assert done.returncode == code
    assert ("attempt 3" in done.stdout) == goes_on


def test_a_watch_runs_beside_srun_and_is_ended_before_the_attempt_is() -> None:
    setup, _, teardown = batch_lines(plan())
    assert "jobkit.supervisor.beside_srun /runs/toy-12345678" in setup[-2]
    assert setup[-2].endswith('"$JOBKIT_ATTEMPT" &')
    instead = [stand_in(text, "stand_in") for text in [*setup[-2:], *teardown]]
    done = in_bash('stand_in() { [ "$1" = batch ] || exec sleep 300; echo end; }', *instead)
    assert done.stdout.endswith("end\n")


def test_the_exit_code_that_counts_is_the_end_of_the_attempts() -> None:
    made = plan({"slurm": {"teardown": ["echo tidy", "true"]}})
    _, command, teardown = batch_lines(made)
    assert teardown[0] == "jobkit_rc=$?"
    lines = [text for text in script(made).splitlines() if text and not text.startswith("#")]
    assert lines[-len(teardown) - 1 :] == [command, *teardown]
    instead = [stand_in(text, "stand_in") for text in teardown]
    said = "batch end /runs/toy-12345678 3 9\n"
    # One that was killed, or could not decide, is tried again.
    for code, times, whole in [(0, 1, 0), (76, 1, 1), (75, 1, 75), (1, 3, 1), (137, 3, 1)]:
        before = [f"stand_in() {{ echo $*; return {code}; }}", "jobkit_watch=", "JOBKIT_ATTEMPT=3", "(exit 9)"]
        done = in_bash(*before, *instead)
        assert (done.returncode, done.stdout) == (whole, "tidy\n" + times * said)


def test_what_follows_srun_outlives_slurms_sigterm() -> None:
    setup, _, teardown = batch_lines(plan())
    ends = 'sh -c "kill -TERM $$ \\$\\$; echo ended" '  # as at a time limit: the script and its children get it
    instead = [stand_in(text, ends) for text in teardown]
    done = in_bash(setup[0], "jobkit_watch=", "kill -TERM $$", "false", *instead)
    assert "ended" in done.stdout


def test_srun_says_who_died_first_into_a_file() -> None:
    assert batch_lines(plan())[1].endswith('2>"$JOBKIT_LOGS/srun.err"')


def test_srun_is_told_to_end_the_rest_when_a_rank_dies_and_what_else_the_user_says() -> None:
    _, command, _ = batch_lines(plan({"slurm": {"srun_args": ["--mpi=none", "--label=a b"]}}, cpus_per_task=4))
    assert "srun --unbuffered --kill-on-bad-exit=1 --cpus-per-task=4 --mpi=none '--label=a b' --output=" in command


def test_srun_args_may_be_one_text() -> None:
    _, command, _ = batch_lines(plan({"slurm": {"srun_args": "--mpi=none --label"}}))
    assert " --mpi=none --label " in command


def test_a_run_directory_with_a_space_is_quoted_everywhere() -> None:
    made = make_plan(Path("/my runs/toy-1"), Config(name="toy", task="m:f"), "slurm")
    setup, command, teardown = batch_lines(made)
    for text in [command, *setup, *teardown]:
        assert text.count("/my runs/toy-1") == text.count("'/my runs/toy-1")
    for verb in ("batch begin", "beside_srun", "batch end"):
        assert f"jobkit.launch.{verb} '/my runs/toy-1'" in script(made)
    assert subprocess.run(["bash", "-n", "-c", script(made)], check=False).returncode == 0


# GPUs of this machine


@pytest.mark.parametrize(
    ("listed", "count"), [("", 0), ("0", 1), ("0,1,3", 3), (" 4 , 5 ", 2), ("-1", 0), ("GPU-1a2b,MIG-3c", 2)]
)
def test_local_gpus_are_those_that_cuda_is_allowed_to_see(
    monkeypatch: pytest.MonkeyPatch, listed: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert visible_gpus() == count


@pytest.mark.parametrize(
    ("listed", "resources", "fits"),
    [
        ("0,1", {"tasks_per_node": 2, "gpus_per_task": 1}, True),
        ("0,1", {"tasks_per_node": 3, "gpus_per_task": 1}, False),
        ("0,1,2,3", {"nodes": 2, "tasks_per_node": 2, "gpus_per_task": 1}, True),
        ("0,1,2", {"nodes": 2, "tasks_per_node": 2, "gpus_per_task": 1}, False),
        ("", {"tasks_per_node": 8, "gpus_per_task": 0}, True),
        ("", {"gpus_per_task": 1}, False),
    ],
)
def test_more_ranks_than_gpus_are_refused_on_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, listed: str, resources: dict[str, int], fits: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    if fits:
        plan(cluster="local", **resources)
    else:
        with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES allows") as refused:
            plan(cluster="local", **resources)
        assert "resources.gpus_per_task=0" in str(refused.value)
    plan(cluster="slurm", **resources)
