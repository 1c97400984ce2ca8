"""Controllers that are away, limits that refuse, prologs that fail: all of it is said, nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.runs import Project, wait_until
from slurmbox import Cluster

from jobkit.errors import EXIT_BAD_INPUT

ON_SLURM = ("--cluster", "slurm")

PARTITIONS = """\
PartitionName=short Nodes=ALL MaxTime=2
PartitionName=narrow Nodes=ALL MaxNodes=1
PartitionName=small Nodes=ALL MaxMemPerNode=100"""


@pytest.fixture
def cluster(make_slurm: Callable[..., Cluster], tmp_path: Path) -> Cluster:
    """A cluster whose prolog fails while there is a file `broken`, and whose partitions have limits."""
    prolog = tmp_path / "prolog"
    prolog.write_text(f"#!/bin/sh\n[ ! -e {tmp_path}/broken ]\n")
    prolog.chmod(0o755)
    return make_slurm(nodes=2, cred_expire=5, kill_wait=2, prolog=str(prolog), partitions=PARTITIONS)


def queue(cluster: Cluster) -> list[str]:
    return cluster.command("squeue", "-h", "-o%i").split()


def test_what_a_cluster_refuses_and_what_it_holds_is_said(
    cluster: Cluster, on_slurm: Callable[..., Project], tmp_path: Path
) -> None:
    project = on_slurm(cluster)
    for partition, key, override in (
        ("short", "time", "resources.time=1h"),
        ("narrow", "nodes", "resources.nodes=2"),
        ("small", "mem", "clusters.slurm.mem=1G"),
    ):
        words = ("submit", str(project.yaml), *ON_SLURM, f"clusters.slurm.partition={partition}", override)
        refused = project.jobkit(*words, check=False)
        assert (refused.returncode, key in refused.stderr) == (EXIT_BAD_INPUT, True), refused.stderr
        assert len(refused.stderr.splitlines()) <= 2
    assert queue(cluster) == []

    # `time: auto` is what the partition allows.
    launch = project.submit(*ON_SLURM, "clusters.slurm.partition=short", steps=5).wait_until_over()
    assert cluster.job(str(launch.status.job_id))["TimeLimit"] == "00:02:00"
    wait_until(lambda: not queue(cluster), "an empty queue")  # a job goes on for a moment after its run is over

    # A prolog that fails: Slurm holds the job for ever.
    (tmp_path / "broken").touch()
    held = project.submit(*ON_SLURM, steps=6)
    (job_id,) = wait_until(lambda: queue(cluster), "the job")
    wait_until(lambda: "held" in cluster.job(job_id)["Reason"], "Slurm to hold the job")
    shown = project.jobkit("status", held.run.name).stdout
    assert cluster.job(job_id)["Reason"].replace("_", " ") in shown, "Slurm's own word"
    (release,) = re.findall(r"scontrol release \S+", shown)
    assert json.loads(project.jobkit("status", held.run.name, "--json").stdout)["state"] == "queued"
    (tmp_path / "broken").unlink()
    for node in cluster.settings.node_names:  # Slurm drains the node whose prolog failed
        if "drain" in cluster.node_state(node):
            cluster.command("scontrol", "update", f"NodeName={node}", "State=resume")
    cluster.command(*release.split())  # what the words say is what helps
    assert held.wait_until_over().status.state == "finished"
    wait_until(lambda: cluster.job(job_id)["JobState"] == "COMPLETED", "the job to end")


def test_a_controller_that_is_away_is_waited_for(cluster: Cluster, on_slurm: Callable[..., Project]) -> None:
    project = on_slurm(cluster)
    cluster.stop_controller()
    submission = project.start("submit", str(project.yaml), *ON_SLURM, "params.steps=100000")
    assert submission.stdout is not None
    assert submission.stdout.readline(), "the user hears of it before the controller is back"
    cluster.start_controller()
    submission.communicate()
    assert submission.returncode == os.EX_OK
    assert len(queue(cluster)) == 1
    (folder,) = (project.folder / "runs").glob("scripted-*")
    launch = project.launch(folder).wait_for_step(10)

    # While it is away the run trains on, deaths are mended in place, and a requeue waits.
    cluster.stop_controller()
    launch.kill_rank(0)
    launch.wait_for_attempt(2).wait_for_step(40)
    shown = project.jobkit("status", launch.run.name)
    assert "running" in shown.stdout
    # A SIGTERM may be Slurm's, for a preemption: no attempt begins before Slurm has given the reason.
    os.kill(launch.agent_pid(), signal.SIGTERM)
    launch.wait_until(lambda me: me.run.ends(2), "the ranks to save")
    time.sleep(cluster.settings.kill_wait + 5)
    assert len(launch.status.attempts) == 2
    cluster.start_controller()
    launch.wait_for_attempt(3).wait_until(lambda me: me.step > 0, "a step")
    cluster.stop_controller()
    project.jobkit("preempt", launch.run.name)
    launch.wait_until(lambda me: len(me.ends) == 3, "the ranks to save")
    cluster.start_controller()
    launch.wait_for_attempt(4)
    assert cluster.job(str(launch.status.job_id))["Restarts"] == "1"
    assert launch.causes == ["killed", "unknown", "preempted"]
    assert [ended.next for ended in launch.ends] == ["in_place", "in_place", "requeue"]
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()


def test_a_limit_of_the_user_refuses_and_the_same_command_works_later(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """MaxSubmitJobs, for a new run and for one that was there before."""
    if os.getuid() != 0:
        pytest.skip("accounting needs root")
    cluster = make_slurm(nodes=1, accounting=True)
    project = on_slurm(cluster)
    project.submit(*ON_SLURM, steps=5).wait_until_over()
    before = project.submit(*ON_SLURM, steps=100_000).wait_for_step(5)
    project.jobkit("cancel", "-y", before.run.name)
    wait_until(lambda: not queue(cluster), "an empty queue")

    cluster.set_limit(MaxSubmitJobs=1)
    cluster.command("sbatch", "--hold", "-o/dev/null", "--wrap=true")
    for steps in (100_000, 6):
        words = ("submit", str(project.yaml), *ON_SLURM, f"params.steps={steps}")
        refused = project.jobkit(*words, check=False)
        assert refused.returncode == EXIT_BAD_INPUT
        assert "Traceback" not in refused.stderr
        assert len(refused.stderr.splitlines()) <= 2, refused.stderr
        assert len(queue(cluster)) == 1, "the other job of this user alone"
    assert (before.status.state, len(list((project.folder / "runs").glob("scripted-*")))) == ("interrupted", 2)

    cluster.set_limit(MaxSubmitJobs=-1)
    assert project.submit(*ON_SLURM, steps=6).wait_until_over().status.state == "finished"
    before = project.submit(*ON_SLURM, steps=100_000).wait_for_attempt(2)
    project.jobkit("cancel", "-y", before.run.name)
