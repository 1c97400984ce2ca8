"""What Slurm says of a job, and what it means: real records of Slurm 22.05."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from jobkit import slurm
from jobkit.errors import SchedulerTimeout
from jobkit.slurm import (
    JobInfo,
    early_timeout_signal,
    explain,
    job_control,
    job_id_of,
    job_records,
    node_info,
    parse_job,
    stop_cause,
    stop_margin,
)

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
    return datetime.fromisoformat(f"2026-03-05T{clock}+00:00").timestamp()


def test_times_are_asked_for_in_utc_and_sbatch_takes_them_as_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("scontrol", "sbatch"):
        (tmp_path / name).write_text('#!/bin/sh\necho "$TZ"\n')
        (tmp_path / name).chmod(0o755)
    assert slurm.command("scontrol") == "UTC\n"
    assert slurm.command("sbatch") == "America/New_York\n"


def test_a_job_in_the_night_in_which_clocks_go_back_has_its_whole_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        job = parse_job("JobId=9 JobState=RUNNING StartTime=2026-11-01T01:30:00 EndTime=2026-11-01T02:15:00")
        assert job.limit == 45 * 60
    finally:
        monkeypatch.undo()
        time.tzset()


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


@pytest.mark.parametrize(("ahead", "cause"), [(0, None), (1, None), (200, "timeout"), (-200, None)])
def test_within_a_job_its_time_is_counted_by_the_controllers_clock(
    monkeypatch: pytest.MonkeyPatch, ahead: int, cause: str | None
) -> None:
    def answer(*arguments: str, **_: object) -> str:
        told = int(time.time()) + ahead
        return f"***\nsdiag output at Sun Nov 22 17:15:19 2026 ({told})\n" if arguments[0] == "sdiag" else text

    text = after("00:01:40")  # by the node's clock, which may be another one
    monkeypatch.setattr(job_records, "command", answer)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    job_records._clock_offset.cache_clear()
    job = slurm.show_job("9")
    job_records._clock_offset.cache_clear()
    assert job is not None and stop_cause(job, margin=90.0) == cause
    assert abs(job.elapsed - 100 - (ahead if abs(ahead) > 1 else 0)) <= 1


def test_a_shells_variables_do_not_reach_slurms_commands() -> None:
    given = {
        "SBATCH_JOB_NAME": "mine",
        "SLURM_MEM_PER_CPU": "1",
        "SQUEUE_FORMAT": "%A",
        "SLURM_CONF": "/c",
        "HOME": "/h",
    }
    assert slurm.without_options(given) == {"SLURM_CONF": "/c", "HOME": "/h"}


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
        ("", ["failed without a message"]),
    ],
)
def test_slurms_complaint_is_told_in_one_line_with_what_to_do(stderr: str, said: list[str]) -> None:
    text = explain("sbatch", stderr)
    assert "\n" not in text
    for part in said:
        assert part in text


ANSWERS = [
    ("123\n", "123"),
    ("123;cluster\n", "123"),
    ("Welcome to the cluster\n123;cluster", "123"),
    ("123\nYour project has 40 hours left\n", "123"),
    ("  123  \n\n", "123"),
    ("Submitted batch job 123\n", "123"),
    ("Submitted batch job 123 on cluster gpu\n", "123"),
    ("sbatch: Submitted batch job 123\n40\n", "123"),
    ("=====\nbanner\n=====\nSubmitted batch job 123\nGood luck\n", "123"),
    ("Submitted batch job 123\n123;cluster\n", "123"),
    ("123\n123\n", "123"),
    ("40\n123\n", None),
    ("Submitted batch job 123\nSubmitted batch job 124\n", None),
    ("Your project has 40 hours left\n", None),
    ("", None),
]


@pytest.mark.parametrize(("answer", "job_id"), ANSWERS)
def test_the_jobs_id_is_found_in_what_a_sites_sbatch_prints(answer: str, job_id: str | None) -> None:
    assert job_id_of(answer) == job_id


def test_an_answer_without_an_id_leaves_open_whether_the_job_was_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_control, "command", lambda *_, **__: "Have a nice day\nyour quota: 3 of 4\n")
    with pytest.raises(SchedulerTimeout, match="Have a nice day; your quota: 3 of 4"):
        slurm.submit("script")


ROWS = "low*|node1|16|1000|gpu:8\nlow*|node2|8|1000|(null)\nhigh|node1|16|1000|gpu:8\nsaid by a banner\n"


@pytest.mark.parametrize(
    ("partition", "plugin", "names"),
    [
        (None, "(null)", {"low": ["node1", "node2"]}),
        (None, "job_submit/lua", {"low": ["node1", "node2"], "high": ["node1"]}),
        ("high", "(null)", {"high": ["node1"]}),
        ("low,high", "job_submit/lua", {"low": ["node1", "node2"], "high": ["node1"]}),
        ("none", "(null)", {}),
    ],
)
def test_nodes_are_those_of_the_partitions_that_a_job_may_get(
    monkeypatch: pytest.MonkeyPatch, partition: str | None, plugin: str, names: dict[str, list[str]]
) -> None:
    monkeypatch.setattr(node_info, "command", lambda *_, **__: ROWS)
    monkeypatch.setattr(node_info, "config", lambda *_: {"JobSubmitPlugins": plugin})
    found = slurm.nodes(partition)
    assert {one: [node.name for node in nodes] for one, nodes in found.items()} == names


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:8", {"": 8}),
        ("gpu:A100:4(S:0-1),shard:8,gpu:h100:2(S:0,2)", {"a100": 4, "h100": 2}),
    ],
)
def test_a_nodes_gpus_are_counted_by_type(monkeypatch: pytest.MonkeyPatch, gres: str, gpus: dict[str, int]) -> None:
    monkeypatch.setattr(node_info, "command", lambda *_, **__: f"low*|node1|16|1000|{gres}\n")
    (node,) = slurm.nodes("low")["low"]
    assert node.gres.get("gpu", {}) == gpus and node.count("gpu") == sum(gpus.values())
    assert node.count("gpu", "other") == node.count("other") == 0


def test_what_a_command_said_before_it_was_ended_is_told() -> None:
    """An sbatch that MaxJobCount refuses tries again for two minutes."""
    words = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    with pytest.raises(SchedulerTimeout, match=r"unable to accept job.*MaxJobCount.*; ended after 0\.5 s"):
        slurm.command("sh", "-c", f"echo '{words}' >&2; exec sleep 60", timeout=0.5)
