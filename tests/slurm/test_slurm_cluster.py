"""The private Slurm cluster that other tests rely on behaves as a real one does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster, ClusterError, process_table, wait_until

TOOL = Path(__file__).parents[2] / "tools" / "slurm_cluster.py"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="jobkit-slurm-", dir="/tmp") as name:
        yield Path(name)


def submit(cluster: Cluster, script: str, *options: str) -> str:
    output = f"--output={cluster.dir}/%j.out"
    return cluster.command("sbatch", "--parsable", output, "--open-mode=append", *options, f"--wrap={script}")


def wait_for_state(cluster: Cluster, job_id: str, state: str) -> None:
    try:
        wait_until(lambda: cluster.job(job_id)["JobState"] == state, f"job {job_id} to be {state}")
    except ClusterError as error:
        job, nodes = cluster.command("scontrol", "show", "job", job_id), cluster.command("sinfo", "-N", "--long")
        raise AssertionError(f"{error}\n{job}\n{nodes}\n{cluster.command('squeue', '--long')}") from error


def output(cluster: Cluster, job_id: str) -> list[str]:
    return sorted((cluster.dir / f"{job_id}.out").read_text().splitlines())


def processes_with(text: str) -> list[str]:
    return [p.name for p in process_table().values() if any(text in line for line in p.environment())]


def test_a_job_runs_on_several_nodes_with_its_gpus(slurm: Cluster) -> None:
    show = "srun sh -c 'echo $SLURM_PROCID $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    job_id = submit(slurm, show, "--nodes=2", "--ntasks-per-node=2", "--gpus-per-task=2")
    wait_for_state(slurm, job_id, "COMPLETED")
    tasks = [line.split() for line in output(slurm, job_id)]
    assert [rank for rank, _, _ in tasks] == ["0", "1", "2", "3"]
    assert len({node for _, node, _ in tasks}) == 2
    assert sorted(gpus for _, _, gpus in tasks) == ["0,1", "0,1", "2,3", "2,3"]


def test_a_preempted_job_can_requeue_itself(slurm: Cluster, tmp_path: Path) -> None:
    # SIGTERM may end the sleep, and with it the wait, a moment before the shell itself gets it: hence the loop.
    (tmp_path / "task.sh").write_text(
        "trap 'test $SLURM_PROCID -ne 0 || scontrol requeue $SLURM_JOB_ID; exit' TERM\n"
        "echo attempt $SLURM_RESTART_COUNT\n"
        'while test -z "$SLURM_RESTART_COUNT"; do sleep 300 & wait; done\n'
    )
    job_id = submit(slurm, f"srun sh {tmp_path}/task.sh", "--nodes=2", "--requeue")
    wait_until(lambda: (slurm.dir / f"{job_id}.out").exists() and len(output(slurm, job_id)) == 2, "two tasks to start")
    high = slurm.preempt(job_id)
    wait_for_state(slurm, high, "COMPLETED")
    wait_for_state(slurm, job_id, "COMPLETED")
    assert [line for line in output(slurm, job_id) if "attempt" in line] == ["attempt"] * 2 + ["attempt 1"] * 2


def test_a_lost_node_takes_its_processes_along_and_comes_back(slurm: Cluster) -> None:
    # The second sleep: srun fails with its node, and the job shall still be there to be cancelled.
    job_id = submit(slurm, "srun sleep 300; sleep 300", "--nodes=2", "--nodelist=node1,node2", "--no-requeue")
    wait_for_state(slurm, job_id, "RUNNING")
    # Those of this cluster: other processes of the session have a node2 too.
    wait_until(lambda: any(one.name == "sleep" for one in slurm.job_processes("node2")), "a task on node2")
    slurm.kill_node("node2")
    assert "node2" not in slurm.daemons()
    slurm.command("scancel", job_id)
    slurm.restart_node("node2")
    # It may have missed that the job was cancelled, and Slurm repeats that only once a minute.
    try:
        wait_until(lambda: slurm.node_state("node2") == "idle", "node2 to be idle")
    except ClusterError as error:
        found = [slurm.command("sinfo", "-N", "--long"), slurm.command("scontrol", "show", "node", "node2")]
        pytest.fail("\n".join([str(error), slurm.node_state("node2"), *found, slurm.command("squeue")]))
    assert slurm.job(job_id)["JobState"] in ("CANCELLED", "NODE_FAIL")


def test_jobs_survive_a_controller_that_restarts(slurm: Cluster) -> None:
    job_id = submit(slurm, "sleep 2; echo done")
    wait_for_state(slurm, job_id, "RUNNING")
    slurm.stop_controller()
    with pytest.raises(ClusterError):
        slurm.command("scontrol", "ping")
    slurm.start_controller()
    wait_for_state(slurm, job_id, "COMPLETED")
    assert output(slurm, job_id) == ["done"]


def test_a_cluster_beside_another_ends_without_a_trace(slurm: Cluster, directory: Path) -> None:
    def run(verb: str) -> subprocess.CompletedProcess[str]:
        options = ["--nodes=1", "--gpus=0"] if verb == "up" else []
        command = [sys.executable, str(TOOL), verb, f"--dir={directory}", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert run("status").returncode == 1
    export = f"export SLURM_CONF={directory}/slurm.conf\n"
    assert run("up").stdout == export
    assert run("up").stdout == export
    assert export in run("status").stdout

    beside = Cluster(directory)
    config = beside.command("scontrol", "show", "config")
    assert re.search(r"^AuthInfo .*,cred_expire=120$", config, re.MULTILINE), "not Slurm's own"
    assert re.search(r"^SlurmdTimeout += 300 sec$", config, re.MULTILINE), "not Slurm's own"
    job_id = submit(beside, "srun sh -c 'trap \"\" TERM; setsid sleep 300 & sleep 300'")
    wait_for_state(beside, job_id, "RUNNING")
    wait_until(lambda: len(processes_with(str(directory))) > 3, "the job's processes")
    bystander = subprocess.Popen(["sleep", "300"], env=os.environ | {"SLURM_CONF": str(beside.conf)})
    try:
        assert run("down").returncode == 0
        assert processes_with(str(directory)) == ["sleep"], "only the bystander, which is no job, may live on"
    finally:
        bystander.kill()
        bystander.wait()
    assert not list(directory.iterdir())
    assert slurm.is_up


def test_a_directory_that_holds_something_else_is_left_alone(directory: Path) -> None:
    (directory / "thesis.tex").touch()
    for act in (Cluster(directory).up, Cluster(directory).down):
        with pytest.raises(ClusterError, match="holds something else"):
            act()
    assert (directory / "thesis.tex").exists()
