"""Runs in a real container on a real Slurm: preempted, killed, moved to another node, and options that srun refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.container import PYTHON, box, outside
from harness.runs import YAML, Project, is_alive, parent_of, wait_until
from slurmbox import Cluster


def test_a_container_is_preempted_and_killed_and_loses_a_node(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    cluster = make_slurm(nodes=3, cred_expire=5)
    project = on_slurm(cluster)
    entry = {"container": {"prefix": box(project.folder), "python": PYTHON}}
    project.yaml.write_text(f"{YAML}clusters: {json.dumps({'boxed': entry})}\n")
    launch = project.submit("--cluster", "boxed", "resources.nodes=2", "resources.min_nodes=1", steps=100_000, every=5)
    launch.wait_for_step(15)
    second = launch.status.attempts[0].nodes[1]
    os.kill(outside(launch, launch.rank_pid(1), second), signal.SIGKILL)
    launch.wait_for_attempt(2).wait_for_step(30)
    os.kill(parent_of(outside(launch, launch.rank_pid(1), second)), signal.SIGKILL)  # the agent
    launch.wait_for_attempt(3).wait_for_step(50)
    cluster.preempt(str(launch.status.job_id))
    launch.wait_for_attempt(4).wait_for_step(70)
    rank = outside(launch, launch.rank_pid(0))
    launch.kill_job_script()  # no agent can act for the script: the container has none of Slurm's commands
    wait_until(lambda: not is_alive(rank), "the ranks to save and end")
    assert (launch.run.durable_step() or 0) >= 70
    project.jobkit("wait", launch.run.name, check=False)
    again = project.submit("--cluster", "boxed", "resources.nodes=2", "resources.min_nodes=1", steps=100_000, every=5)
    assert again.run.path == launch.run.path
    launch.wait_for_attempt(5).wait_for_step(90)
    batch_node = launch.run.lease().node  # type: ignore[union-attr]
    lost = next(node for node in launch.status.attempts[4].nodes if node != batch_node)
    cluster.kill_node(lost)
    launch.wait_for_attempt(6).wait_for_step(110).end_training().wait_until_over()

    assert (launch.status.state, launch.causes[2]) == ("finished", "preempted")
    assert launch.causes[4:] == ["node_failure", "finished"]
    assert [launch.ends[number].next for number in (0, 1, 2, 4)] == ["in_place", "in_place", "requeue", "in_place"]
    since = "since the checkpoint"
    launch.assert_repeated(since, since, "none", "none", since)


def test_a_node_on_which_the_container_fails_is_replaced_by_a_spare(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """As where a mount is gone on one node: the run has trained in this container, which is fit."""
    cluster = make_slurm(nodes=3, cred_expire=5)
    project = on_slurm(cluster)
    start = project.write("start.sh", '[ ! -e "sick.$SLURMD_NODENAME" ] || exit 78\nexec "$@"\n')
    entry = {"container": {"prefix": ["bash", str(start), *box(project.folder)], "python": PYTHON}}
    project.yaml.write_text(f"{YAML}clusters: {json.dumps({'boxed': entry})}\n")
    launch = project.submit("--cluster", "boxed", "resources.nodes=2", "resources.spares=1", steps=100_000, every=5)
    launch.wait_for_step(15)
    nodes, batch_node = launch.status.attempts[0].nodes, launch.run.lease().node  # type: ignore[union-attr]
    sick = next(node for node in nodes if node != batch_node)
    (project.folder / f"sick.{sick}").touch()
    os.kill(parent_of(outside(launch, launch.rank_pid(nodes.index(sick)), sick)), signal.SIGKILL)
    launch.wait_for_attempt(2).wait_for_step(30)
    nodes = launch.status.attempts[1].nodes
    assert sick not in nodes
    for node in nodes:  # as where the disk of the image is away for a moment: no node is to blame
        (project.folder / f"sick.{node}").touch()
    for number, node in enumerate(nodes):
        os.kill(parent_of(outside(launch, launch.rank_pid(number), node)), signal.SIGKILL)
    wait_until(lambda: "node_failure" in launch.causes, "an attempt without agents")
    for node in nodes:
        (project.folder / f"sick.{node}").unlink()
    launch.wait_for_step(50).end_training().wait_until_over()
    assert (launch.status.state, launch.causes[:2], launch.causes[-1]) == ("finished", ["killed"] * 2, "finished")
    assert {ended.next for ended in launch.ends[:-1]} == {"in_place"}


def test_srun_itself_may_enter_the_container(slurm: Cluster, on_slurm: Callable[..., Project], tmp_path: Path) -> None:
    """As with pyxis: the image is an argument of srun, and only its Python is named."""
    environment, packages = tmp_path / "image", sysconfig.get_path("purelib")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    next(environment.glob("lib/python*/site-packages")).joinpath("all.pth").write_text(packages)
    project = on_slurm(slurm)
    entry = {"srun_args": ["--export=ALL,IMAGE=here"], "container": {"python": f"{environment}/bin/python"}}
    project.yaml.write_text(f"{YAML}clusters: {json.dumps({'boxed': entry})}\n")
    launch = project.submit("--cluster", "boxed", steps=100_000).wait_for_step(5)
    agent = Path("/proc", str(launch.agent_pid()))
    assert agent.joinpath("cmdline").read_text().startswith(f"{environment}/bin/python")
    assert "IMAGE=here" in agent.joinpath("environ").read_text().split("\0")
    launch.end_training().wait_until_over()
    assert launch.causes == ["finished"]


def test_a_container_that_starts_on_no_node_is_tried_in_two_attempts_and_logs_shows_all_its_words(
    slurm: Cluster, on_slurm: Callable[..., Project]
) -> None:
    project = on_slurm(slurm)
    prefix = ["sh", "-c", "echo FATAL: no such image; echo while creating the container; exit 255"]
    project.yaml.write_text(f"{YAML}container: {json.dumps({'prefix': prefix})}\n")
    launch = project.submit("--cluster", "slurm", "name=no-image", "resources.nodes=2").wait_until_over()
    assert (launch.status.state, launch.causes) == ("failed", ["node_failure", "crashed"])
    assert "no such image" in project.jobkit("logs", launch.run.name).stdout


@pytest.mark.parametrize("option", ["--mpi=nosuch", "--gres=nosuch:1"])
def test_a_value_that_srun_refuses_is_tried_once(slurm: Cluster, on_slurm: Callable[..., Project], option: str) -> None:
    words = ("--cluster", "slurm", f"clusters.slurm.srun_args=['{option}']", f"name={option[2:5]}")
    launch = on_slurm(slurm).submit(*words).wait_until_over()
    assert (launch.status.state, launch.causes) == ("failed", ["crashed"])
    assert launch.ends[0].final
    job = str(launch.status.job_id)
    wait_until(lambda: slurm.job(job)["JobState"] == "FAILED", "the job to end")
    assert (slurm.job(job)["ExitCode"], slurm.job(job)["Restarts"]) == ("1:0", "0")


def test_an_option_that_srun_does_not_know_is_refused_before_anything_is_queued(
    slurm: Cluster, on_slurm: Callable[..., Project]
) -> None:
    project = on_slurm(slurm)
    words = ("submit", str(project.yaml), "--cluster", "slurm", "clusters.slurm.srun_args=['--nosuch']")
    refused = project.jobkit(*words, check=False)
    assert refused.returncode == 2
    assert "--nosuch" in refused.stderr
    assert not list(project.folder.glob("runs/scripted-*"))
