"""What doctor asks of Slurm, and how often: with answers written down, and a clock of its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobkit import slurm
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission import observer, probe
from jobkit.submission.checks import OK, PROBLEM, WARNING, check_slurm

CONFIG = "SLURM_VERSION = 22.05\nPreemptType = preempt/partition_prio\nKillWait = 30 sec\nJobRequeue = 1\n"
PARTITIONS = (
    "PartitionName=low Default=YES MaxTime=UNLIMITED State=UP TotalNodes=4 PreemptMode=REQUEUE GraceTime=20\n"
    "PartitionName=tiny Default=NO MaxTime=UNLIMITED State=UP TotalNodes=1 PreemptMode=OFF GraceTime=0\n"
    "PartitionName=shut Default=NO MaxTime=UNLIMITED State=DOWN TotalNodes=4 PreemptMode=SUSPEND GraceTime=0\n"
)


def answer(*words: str, **_: Any) -> str:
    return CONFIG if "config" in words else PARTITIONS if "partition" in words else "low 3\n"


@pytest.mark.parametrize(
    ("partition", "partitions", "preemptions"),
    [
        (None, [OK], [OK]),
        ("low", [OK], [OK]),
        ("low,tiny", [OK, WARNING], [OK, OK]),
        ("shut,low", [WARNING, OK], [WARNING, OK]),
        ("tiny,shut", [PROBLEM, PROBLEM], [OK, WARNING]),
        ("low,none", [OK, PROBLEM], [OK]),
        ("none", [PROBLEM], []),
    ],
)
def test_each_of_several_partitions_is_checked_and_one_that_takes_the_job_is_enough(
    monkeypatch: pytest.MonkeyPatch, partition: str | None, partitions: list[str], preemptions: list[str]
) -> None:
    monkeypatch.setattr(slurm, "command", answer)
    found = list(check_slurm(partition, 2))
    assert [check.state for check in found if check.name == "partition"] == partitions
    assert [check.state for check in found if check.name == "preemption"] == preemptions
    assert [check.name for check in found].count("requeue") == bool(preemptions)


def test_a_probe_that_waits_asks_slurm_once_in_ten_seconds_and_sees_its_end_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, asked, said = 0.0, [], []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def show_job(job_id: str) -> slurm.JobInfo:
        asked.append(now)
        state = "JobState=PENDING Reason=Resources" if now < 60 else "JobState=RUNNING"
        return slurm.parse_job(f"JobId={job_id} {state}")

    def status() -> Status:
        state = State.QUEUED if now < 65 else State.RUNNING if now < 90 else State.FINISHED
        return Status(state=state, scheduler="slurm", job_id="7", submissions=1)

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(probe, "time", clock)
    monkeypatch.setattr(observer, "time", clock)
    monkeypatch.setattr(observer, "is_here", lambda *_: True)
    monkeypatch.setattr(slurm, "show_job", show_job)
    run = cast(RunDir, SimpleNamespace(status=status, batch_script=Path("/batch")))
    ended = probe._wait(run, [], said.append)
    assert ended.state == State.FINISHED and now < 91
    assert len(asked) == 9 and all(later - earlier >= 10 for earlier, later in itertools.pairwise(asked))
    assert "Resources" in said[0] and said[-1] == probe.MEASURING
