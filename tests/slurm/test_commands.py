"""jobkit's Slurm commands on a real Slurm: a job's way through the queue, and a controller or node that is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from slurmbox import Cluster, wait_until

from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.slurm import commands, jobs, nodes
from jobkit.slurm.jobs import Job, controller_time, stop_cause

OPTIONS = ("--output=/dev/null", "--chdir=/tmp", "--time=5")
SLEEPS = """\
#!/bin/bash
name=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}
srun --overlap sh -c 'trap "touch $0/term" TERM; touch $0/'$name'; while :; do sleep 0.2; done'
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A batch script whose step ignores SIGTERM, so that a job stays in COMPLETING; the file `term` notes it.

    A file with the job's id says that the step does so: one that Slurm lists may not have come so far.
    """
    path = tmp_path / "job.sh"
    path.write_text(SLEEPS.replace("$0", str(tmp_path)))
    return str(path)


def shown(job_id: str) -> Job:
    job = jobs.show(job_id)
    assert job is not None
    return job


def wait_for(job_id: str, state: str) -> None:
    wait_until(lambda: shown(job_id).state == state, f"job {job_id} to be {state}")


def wait_for_step(job_id: str, script: str) -> None:
    wait_for(job_id, "RUNNING")
    wait_until(Path(script).with_name(job_id).exists, f"the step of job {job_id}")


def cause(job_id: str) -> str | None:
    return stop_cause(shown(job_id), controller_time(), margin=12.0, restarts=0)


def test_a_job_goes_through_the_queue(
    slurm: Cluster, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("SBATCH_TIMELIMIT", "7")  # the submitting shell's, for other jobs
    token = f"token-{os.getpid()}"

    held = commands.submit(script, *OPTIONS, "--hold", f"--comment=jobkit {token}")
    assert (shown(held).state, shown(held).held, shown(held).start) == ("PENDING", True, None)
    assert [job.job_id for job in jobs.with_token(jobs.queue(), token)] == [held]
    jobs.exclude_nodes(held, "node1")
    commands.run("scontrol", "release", held)
    wait_for_step(held, script)
    running = shown(held)
    assert (running.excluded, running.comment) == ("node1", f"jobkit {token}")
    assert running.nodes and running.nodes != "node1"
    assert running.start is not None and running.end == running.start + 300
    seconds = jobs.time_left(running, controller_time())
    assert seconds is not None and 0 < seconds <= 300
    assert cause(held) is None
    assert nodes.batch_step_alive(held)
    with pytest.raises(SchedulerError, match="no longer pending") as raised:  # only after the requeue
        jobs.exclude_nodes(held, "node2")
    assert not commands.is_away(raised.value)

    assert jobs.requeue(held)
    assert cause(held) == "preempted"  # for a process of its first start
    assert jobs.requeue(held)  # again: it is in the queue
    asked = controller_time()
    jobs.begin_later(held, 200.0)  # while its processes end
    wait_for(held, "PENDING")
    again = shown(held)
    assert again.restarts == 1 and again.start is not None and again.start >= asked + 199
    jobs.cancel(held)
    assert shown(held).state == "CANCELLED"
    jobs.cancel(held, "99999999")  # gone is gone
    assert jobs.show("99999999") is None
    with pytest.raises(SchedulerError):
        commands.submit(script, "--partition=nosuch")


def test_a_preempted_job_is_told_from_a_cancelled_one(
    make_slurm: Callable[..., Cluster], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = make_slurm()
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    preempted, cancelled = (commands.submit(script, *OPTIONS, "--exclusive") for _ in range(2))
    for job in (preempted, cancelled):
        wait_for_step(job, script)
    slurm.preempt(preempted)
    wait_until(lambda: cause(preempted), "the preemption")
    assert (shown(preempted).runs, cause(preempted)) == (True, "preempted")
    jobs.cancel(cancelled)
    assert cause(cancelled) == "cancelled"
    assert not jobs.requeue(cancelled)
    chosen = shown(preempted).preempt_time
    assert chosen is not None
    # An end within a second of the preemption is PreemptMode=CANCEL's.
    wait_until(lambda: controller_time() > chosen + 2, "another second")
    jobs.cancel(preempted)
    assert cause(preempted) == "cancelled"


def test_each_waiting_task_of_an_array_is_a_job(slurm: Cluster, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    token = f"array-{os.getpid()}"
    array = commands.submit(script, *OPTIONS, "--array=0-4%1", f"--comment={token}")
    wait_for_step(f"{array}_0", script)
    assert (shown(f"{array}_0").job_id, shown(f"{array}_3").job_id) == (f"{array}_0", f"{array}_3")
    tasks = {task: jobs_[0].state for (word, task), jobs_ in jobs.by_token(jobs.queue()).items() if word == token}
    assert tasks == {0: "RUNNING", **dict.fromkeys(range(1, 5), "PENDING")}
    jobs.cancel(f"{array}_4")
    assert jobs.show(f"{array}_4") is None and shown(f"{array}_0").state == "RUNNING"  # the array goes on
    jobs.cancel(array)


def test_a_controller_and_a_node_are_lost(
    make_slurm: Callable[..., Cluster], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = "PartitionName=short Nodes=node1 MaxTime=10 MaxNodes=1 Hidden=YES"
    cluster = make_slurm(nodes=2, message_timeout=2, slurmd_timeout=5, partitions=limits)
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    assert nodes.expand("node[1-2],node1") == ["node1", "node2"]
    (short,) = nodes.partitions("short")
    assert (short.total_nodes, short.max_nodes, short.max_seconds, short.preempt_mode) == (1, 1, 600, "REQUEUE")
    assert [part.name for part in nodes.partitions(None)] == ["low"]
    job = commands.submit(script, *OPTIONS, "--nodes=2", "--no-kill", "--partition=low")
    wait_for_step(job, script)
    assert nodes.batch_step_alive(job) and nodes.dead_node("node[1-2]") is None

    cluster.pause_controller()
    with pytest.raises(SchedulerTimeout):
        commands.submit(script, *OPTIONS, "--partition=low")
    with pytest.raises(SchedulerError) as raised:
        jobs.show(job)
    assert commands.is_away(raised.value)
    cluster.resume_controller()
    cluster.stop_controller()
    with pytest.raises(SchedulerError) as raised:
        jobs.requeue(job)
    assert commands.is_away(raised.value)
    cluster.start_controller()
    assert shown(job).state == "RUNNING"

    cluster.kill_node("node1")  # with the batch script
    assert not nodes.batch_step_alive(job)  # long before Slurm knows it
    wait_until(lambda: nodes.dead_node("node[1-2]"), "Slurm to notice")
    assert nodes.dead_node("node[1-2]") == "node1" and nodes.usable_nodes("low") == {"node2"}
    assert nodes.usable_nodes("short") == set()
    assert nodes.died_since("node1", 0.0)
