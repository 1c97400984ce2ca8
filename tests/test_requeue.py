"""Why an attempt ended, what comes after it, and what the batch script will do about it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster, wait_until

from jobkit.errors import InputError
from jobkit.launch import options
from jobkit.launch.plan import LaunchPlan, batch_lines, make_plan, visible_gpus
from jobkit.launch.requeue import MAX_TIMEOUTS_WITHOUT_PROGRESS, decide
from jobkit.launch.slurm import script
from jobkit.run.config import Config, Resources
from jobkit.run.status import Attempt
from jobkit.scheduler.slurm import JobInfo, early_timeout_signal, explain, parse_job, stop_cause, stop_margin

# The decision


def attempts(*ends: tuple[str, int | None, int | None]) -> list[Attempt]:
    """Attempts of (cause, first step, last step)."""
    return [
        Attempt(id=number, cluster="slurm", job_id="7", started=0.0, cause=cause, first_step=first, last_step=last)
        for number, (cause, first, last) in enumerate(ends, start=1)
    ]


NO_STEP = ("timeout", 5, 5)

DECISIONS: list[tuple[str, Sequence[tuple[str, int | None, int | None]], bool]] = [
    ("preempted", [("preempted", 0, 5)], True),
    ("preempted, for the hundredth time and with nothing done", [("preempted", 0, 0)] * 100, True),
    ("a signal of somebody's own", [("signal", 0, 5)], True),
    ("out of time", [("timeout", 0, 5)], True),
    ("out of time a hundred times, each a step further", [("timeout", n, n + 1) for n in range(100)], True),
    ("out of time without a step, once", [NO_STEP], True),
    ("out of time without a step, twice", [NO_STEP] * 2, True),
    ("out of time without a step, once too often", [NO_STEP] * MAX_TIMEOUTS_WITHOUT_PROGRESS, False),
    ("out of time before the loop, once too often", [("timeout", None, None)] * 3, False),
    ("a preemption between starts the count anew", [NO_STEP, NO_STEP, ("preempted", 5, 5), NO_STEP], True),
    ("a step between starts the count anew", [NO_STEP, NO_STEP, ("timeout", 5, 6), ("timeout", 6, 6)], True),
    ("steps long ago do not help", [("timeout", 0, 5), NO_STEP, NO_STEP, NO_STEP], False),
    ("finished", [("finished", 0, 5)], False),
    ("cancelled", [("cancelled", 0, 5)], False),
    ("stopped by its user", [("user", 0, 5)], False),
    ("crashed", [("crashed", 0, 5)], False),
    ("killed", [("killed", 0, 5)], False),
    ("something new", [("eaten", 0, 5)], False),
]


@pytest.mark.parametrize(("ends", "again"), [row[1:] for row in DECISIONS], ids=[row[0] for row in DECISIONS])
def test_what_comes_after_an_attempt(ends: Sequence[tuple[str, int | None, int | None]], again: bool) -> None:
    decision = decide(ends[-1][0], attempts(*ends))
    assert decision.requeue == again
    assert decision.reason


def test_a_run_that_never_gets_anywhere_in_its_time_is_told_what_to_change() -> None:
    reason = decide("timeout", attempts(NO_STEP, NO_STEP, NO_STEP)).reason
    assert "3 times" in reason
    assert "resources.time" in reason


def test_a_cancel_during_the_last_save_beats_the_preemption_before_it() -> None:
    assert not decide("cancelled", attempts(("preempted", 0, 5))).requeue


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
    "JobState=COMPLETING Reason=None Requeue=1 Restarts=1 BatchFlag=1 ExitCode=0:0 TimeLimit=00:05:00",
    "StartTime=2026-03-05T06:27:22 EndTime=Unknown SuspendTime=None",
)
BACK = line(
    "JobState=RUNNING Reason=None Requeue=1 Restarts=1 BatchFlag=1 ExitCode=0:0 RunTime=00:01:13 TimeLimit=00:05:00",
    "StartTime=2026-03-05T06:27:39 EndTime=2026-03-05T06:32:39 PreemptTime=None SuspendTime=None",
)
SCANCEL = line(
    "JobState=COMPLETING Reason=None Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:15 TimeLimit=00:05:00",
    "StartTime=2026-03-05T06:27:06 EndTime=2026-03-05T06:27:07 PreemptTime=None SuspendTime=None",
)
SCANCEL_OVER = line(
    "JobState=CANCELLED Reason=Priority Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 RunTime=00:00:00",
    "StartTime=2026-03-05T06:23:47 EndTime=2026-03-05T06:23:47 PreemptTime=None SuspendTime=None",
)
TIME_LIMIT = line(
    "JobState=COMPLETING Reason=TimeLimit Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:15 TimeLimit=00:01:00",
    "StartTime=2026-03-05T06:27:17 EndTime=2026-03-05T06:28:35 PreemptTime=None SuspendTime=None",
)
TIMEOUT = TIME_LIMIT.replace("COMPLETING", "TIMEOUT")
HELD = line(
    "JobState=PENDING Reason=JobHeldUser Requeue=1 Restarts=0 BatchFlag=1 ExitCode=0:0 TimeLimit=UNLIMITED",
    "EligibleTime=Unknown StartTime=Unknown EndTime=Unknown SuspendTime=None",
    "NodeList= NumNodes=1-1",
)
CRASHED = line(
    "JobState=FAILED Reason=NonZeroExitCode Requeue=1 Restarts=0 BatchFlag=1 ExitCode=3:0 TimeLimit=365-00:00:00",
    "StartTime=2026-03-05T06:23:48 EndTime=2026-03-05T06:23:48 PreemptTime=None SuspendTime=None",
)


def at(clock: str) -> float:
    return datetime.fromisoformat(f"2026-03-05T{clock}").timestamp()


def test_a_jobs_record_is_read() -> None:
    assert parse_job(RUNNING) == JobInfo(
        job_id="9",
        state="RUNNING",
        reason="None",
        preempted=False,
        start=at("06:27:00"),
        end=at("06:32:00"),
        restarts=0,
        nodes="node1",
    )
    assert parse_job(PREEMPTED).preempted
    assert parse_job(BACK).restarts == 1
    held = parse_job(HELD)
    assert (held.start, held.end, held.nodes, held.ended) == (None, None, "", False)
    assert parse_job("").state == "UNKNOWN"


@pytest.mark.parametrize(
    ("text", "ended"),
    [(RUNNING, False), (PREEMPTED, False), (SCANCEL, False), (TIME_LIMIT, False), (HELD, False)]
    + [(SCANCEL_OVER, True), (TIMEOUT, True), (CRASHED, True)],
)
def test_a_job_has_ended_when_slurm_will_do_no_more_with_it(text: str, ended: bool) -> None:
    assert parse_job(text).ended == ended


CAUSES = [
    ("running", RUNNING, "06:28:00", None),
    ("running, and back from the queue", BACK, "06:28:50", None),
    ("a minute and a half before the end", RUNNING, "06:30:29", None),
    ("in the margin before the end", RUNNING, "06:30:30", "timeout"),
    ("past the end", RUNNING, "06:33:00", "timeout"),
    ("preempted", PREEMPTED, "06:27:03", "preempted"),
    ("preempted, in the margin of the grace time's end", PREEMPTED, "06:27:17", "preempted"),
    ("scancel", SCANCEL, "06:27:07", "cancelled"),
    ("scancel, over", SCANCEL_OVER, "06:24:00", "cancelled"),
    ("the time limit's kill, over", TIMEOUT, "06:28:40", "timeout"),
    ("waiting", HELD, "06:28:00", None),
    ("crashed", CRASHED, "06:28:00", None),
]


@pytest.mark.parametrize(("text", "clock", "cause"), [row[1:] for row in CAUSES], ids=[row[0] for row in CAUSES])
def test_the_jobs_record_says_why_it_is_being_stopped(text: str, clock: str, cause: str | None) -> None:
    assert stop_cause(parse_job(text), margin=90.0, now=at(clock)) == cause


def test_a_job_that_slurm_kills_at_its_time_limit_is_not_taken_for_cancelled() -> None:
    assert stop_cause(parse_job(TIME_LIMIT), margin=0.0, now=at("06:28:40")) == "timeout"


def test_a_job_that_is_cancelled_in_its_grace_time_is_cancelled() -> None:
    assert stop_cause(parse_job(SCANCEL_IN_GRACE), margin=0.0, now=at("06:27:10")) == "cancelled"


def test_a_job_that_slurm_requeues_at_the_end_of_its_grace_time_is_not_taken_for_cancelled() -> None:
    assert stop_cause(parse_job(GRACE_OVER), margin=0.0, now=at("06:27:20")) == "preempted"


@pytest.mark.parametrize(
    ("clock", "early"),
    [("06:27:10", False), ("06:29:24", False), ("06:29:25", True), ("06:30:00", True), ("06:31:59", True)],
)
def test_slurm_may_send_its_signal_a_minute_early(clock: str, early: bool) -> None:
    assert early_timeout_signal(parse_job(RUNNING), margin=90.0, now=at(clock)) == early


def test_a_job_without_an_end_has_no_early_signal() -> None:
    assert not early_timeout_signal(parse_job(HELD), margin=90.0, now=at("06:30:00"))


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
        return stop_cause(parse_job(slurm.command("scontrol", "--oneliner", "show", "job", job)), 12.0, time.time())

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
            options.split("slurm", {key: "x"}, lambda key: key)
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


def test_setup_that_fails_ends_the_job_before_the_attempt_begins(tmp_path: Path) -> None:
    made = plan({"slurm": {"setup": ["true", "false", f"touch {tmp_path}/after"]}})
    setup, _, _ = batch_lines(made)
    assert subprocess.run(["bash", "-c", "\n".join([*setup[:-2], f"touch {tmp_path}/begun"])], check=False).returncode
    assert list(tmp_path.iterdir()) == []


def test_setup_that_works_leaves_the_shell_as_it_was() -> None:
    setup, _, _ = batch_lines(plan({"slurm": {"setup": "export GREETING=hello"}}))
    text = "\n".join([*setup[:-2], "false", 'echo "$GREETING"'])
    assert subprocess.check_output(["bash", "-c", text], text=True) == "hello\n"


def test_without_setup_the_attempt_begins_at_once() -> None:
    assert "attempt begin" in batch_lines(plan())[0][0]


def test_the_exit_code_that_counts_is_the_end_of_the_attempts() -> None:
    made = plan({"slurm": {"teardown": ["echo tidy", "true"]}})
    _, command, teardown = batch_lines(made)
    assert teardown[0] == "jobkit_rc=$?"
    assert teardown[1:3] == ["echo tidy", "true"]
    assert 'attempt end /runs/toy-12345678 "$jobkit_rc"' in teardown[3]
    assert teardown[-1] == "exit $?"
    lines = [text for text in script(made).splitlines() if text and not text.startswith("#")]
    assert lines[-6:] == [command, *teardown]


def test_srun_is_told_to_end_the_rest_when_a_rank_dies_and_what_else_the_user_says() -> None:
    _, command, _ = batch_lines(plan({"slurm": {"srun_args": ["--mpi=none", "--label=a b"]}}, cpus_per_task=4))
    assert "srun --unbuffered --kill-on-bad-exit=1 --cpus-per-task=4 --mpi=none '--label=a b' --output=" in command


def test_srun_args_may_be_one_text() -> None:
    _, command, _ = batch_lines(plan({"slurm": {"srun_args": "--mpi=none --label"}}))
    assert " --mpi=none --label " in command


def test_a_run_directory_with_a_space_is_quoted_everywhere() -> None:
    made = make_plan(Path("/my runs/toy-1"), Config(name="toy", task="m:f"), "slurm")
    for text in [batch_lines(made)[0][0], batch_lines(made)[1], batch_lines(made)[2][-2]]:
        assert "'/my runs/toy-1" in text
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
