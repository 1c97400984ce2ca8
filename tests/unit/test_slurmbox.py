"""slurmbox is a real Slurm: jobs run, nodes get lost and come back, a controller stops answering."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from slurmbox import Cluster, ClusterError, wait_until

MakeSlurm = Callable[..., Cluster]


def submit(cluster: Cluster, script: str, *options: str, user: str | None = None) -> str:
    return cluster.command("sbatch", "--parsable", "--chdir=/tmp", *options, f"--wrap={script}", user=user)


def wait_for_state(cluster: Cluster, job: str, state: str) -> None:
    wait_until(lambda: cluster.job(job)["JobState"] == state, f"job {job} to be {state}")


def test_users_share_a_group_directory(slurm: Cluster, slurm_users: tuple[str, str]) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        for user in slurm_users:
            folder.chmod(0o777)
            job = submit(slurm, "srun id -un", "--nodes=2", f"--output={folder}/{user}", user=user)
            wait_for_state(slurm, job, "COMPLETED")
            output = folder / user
            assert (output.owner(), output.read_text().split()) == (user, [user, user])


def test_a_node_is_lost_and_comes_back(make_slurm: MakeSlurm) -> None:
    cluster = make_slurm(nodes=2, name="second", partitions="PartitionName=short Nodes=ALL MaxTime=2")
    assert "ClusterName             = second" in cluster.command("scontrol", "show", "config")

    def step_on_both_nodes() -> str:
        job = submit(cluster, "srun sleep 600", "--nodes=2", "--output=/dev/null", "--partition=short")
        for node in ("node1", "node2"):
            wait_until(lambda node=node: "sleep" in {p.name for p in cluster.job_processes(node)}, "the step")
        return job

    job = step_on_both_nodes()
    assert cluster.job(job)["TimeLimit"] == "00:02:00"
    cluster.kill_node_processes("node1")
    wait_for_state(cluster, job, "FAILED")  # the batch script died; with the whole node Slurm would requeue the job
    assert "node1" in cluster.daemons()

    step_on_both_nodes()
    cluster.kill_node("node2")
    assert cluster.job_processes("node2") == []
    assert "node2" not in cluster.daemons()
    cluster.restart_node("node2")
    cluster.command("srun", "--nodelist=node2", "--overcommit", "true")


def test_a_paused_controller_answers_later(make_slurm: MakeSlurm) -> None:
    cluster = make_slurm(nodes=1, message_timeout=2)

    def is_idle() -> bool:
        with contextlib.suppress(ClusterError):  # no answer within these 2 seconds
            return cluster.node_state("node1") == "idle"
        return False

    cluster.pause_controller()
    with pytest.raises(ClusterError, match=r"squeue.*(timed out|no end)"):
        cluster.command("squeue", timeout=20)
    cluster.resume_controller()
    wait_until(is_idle, "an answer")

    cluster.kill_controller()
    assert cluster.is_up
    cluster.start_controller()
    wait_until(is_idle, "the node to register")


def test_accounting_limits_submitted_jobs(make_slurm: MakeSlurm) -> None:
    cluster = make_slurm(nodes=1, accounting=True)
    cluster.set_limit(MaxSubmitJobs=1)
    job = submit(cluster, "exit 3", "--output=/dev/null", "--hold")
    with pytest.raises(ClusterError, match="AssocMaxSubmitJobLimit"):
        submit(cluster, "exit 0")
    cluster.set_limit(MaxSubmitJobs=-1)
    submit(cluster, "exit 0", "--output=/dev/null")
    cluster.command("scontrol", "release", job)
    wait_for_state(cluster, job, "FAILED")
    wait_until(lambda: "FAILED" in cluster.command("sacct", "-n", "-j", job, "--format=state"), "sacct")


@pytest.mark.usefixtures("slurm")  # which skips without Slurm's programs
def test_a_killed_user_of_a_cluster_leaves_nothing_behind() -> None:
    directory = Path(tempfile.mkdtemp(prefix="slurmbox-", dir="/tmp"))
    program = "with slurmbox.Cluster(sys.argv[1], nodes=1): print('up', flush=True), time.sleep(600)"
    program = f"import slurmbox, sys, time\n{program}"
    environment = os.environ | {"PYTHONPATH": str(Path(sys.modules["slurmbox"].__path__[0]).parent)}
    user = subprocess.Popen([sys.executable, "-c", program, directory], env=environment, stdout=subprocess.PIPE)
    assert user.stdout and user.stdout.readline() == b"up\n"
    daemons = Cluster(directory).daemons()
    assert {"guard", "munged", "node1", "slurmctld"} == set(daemons)
    user.send_signal(signal.SIGKILL)
    user.wait()
    user.stdout.close()
    wait_until(lambda: not directory.exists(), "the guard")
    assert not any(daemon.alive for name, daemon in daemons.items() if name != "guard")
