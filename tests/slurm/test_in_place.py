"""What dies starts again in the same job: the nodes are kept, and a lost one is replaced or left out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from harness.processes import command_line, ranks_of
from harness.project import Project, begun, causes, describe, events, logged_steps, status, step, wait_for, weights
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster, process_table

STEPS = 60

Weights = Callable[[int], bytes]


@pytest.fixture
def cluster(short_dir: Path) -> Iterator[Cluster]:
    """With Slurm's own times: a requeued job would wait for two minutes, and a lost node be noticed after five."""
    with Cluster(short_dir) as cluster:
        yield cluster


class Started(Project):
    """A run that has begun to train."""

    def __init__(self, path: Path, cluster: Cluster, *overrides: str) -> None:
        super().__init__(path, cluster.env)
        self.cluster = cluster
        self.slow_down(attempts=1)
        every = ["checkpoint.every=5", "params.sleep=0.02"]
        self.submit("--cluster", "slurm", *every, *overrides)
        (self.run,) = self.runs
        self.reach(1, 6)

    def reach(self, attempt: int, at_step: int) -> None:
        def reached() -> bool:
            now = status(self.run)
            return (
                len(now.get("attempts", [])) >= attempt and (now["checkpoint"] or 0) > 0 and step(self.run) >= at_step
            )

        wait_for(f"step {at_step} in attempt {attempt}", reached, self.run)

    def lose(self, attempt: int, strike: Callable[[], object]) -> None:
        """Let an attempt train, strike it, and wait for the next one."""
        self.slow_down(attempts=attempt)
        self.reach(attempt, 6 * attempt)
        strike()
        wait_for("the next attempt", lambda: len(status(self.run)["attempts"]) > attempt, self.run)

    def kill_rank_1(self, attempt: int) -> None:
        os.kill(ranks_of(self.run, attempt)[1].pid, signal.SIGKILL)

    def wait_until_over(self) -> None:
        wait_for("the end", lambda: status(self.run)["state"] in ("finished", "failed", "cancelled"), self.run)

    def assert_in_place(self, expected: list[str]) -> None:
        """It has ended well, with these causes, as one start of one job."""
        assert causes(self.run) == [*expected, "finished"], describe(self.run)
        assert [one["began"] for one in status(self.run)["attempts"]] == ["submitted"] + ["in place"] * len(expected)
        assert self.cluster.job(status(self.run)["job_id"])["Restarts"] == "0"
        assert logged_steps(self.run) == list(range(STEPS)), describe(self.run)

    def parents(self) -> dict[str, int]:
        """The process ids of the parents by node: what has forked a rank, or stands by to do so."""
        found = {}
        for process in process_table().values():
            variables = dict(line.partition("=")[::2] for line in process.environment())
            if "jobkit.worker.parent" in command_line(process) and variables.get("JOBKIT_RUN") == str(self.run):
                output = Path(f"/proc/{process.pid}/fd/1").readlink()
                if output.name.startswith("node_"):
                    found[variables["SLURMD_NODENAME"]] = process.pid
        return found


def test_a_spare_takes_the_place_of_a_lost_node(cluster: Cluster, tmp_path: Path, uninterrupted: Weights) -> None:
    started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", "resources.spares=1")
    run = started.run
    assert sorted(started.parents()) == ["node1", "node2", "node3"]
    cluster.kill_node("node2")
    started.wait_until_over()
    started.assert_in_place(["node_failure"])
    first, second = status(run)["attempts"]
    assert (first["nodes"], second["nodes"]) == (["node1", "node2"], ["node1", "node3"])
    assert first["failure"]["node"] == "node2"
    assert weights(run) == uninterrupted(2)


def test_a_spare_takes_the_place_of_a_node_that_nothing_can_be_started_on(
    cluster: Cluster, tmp_path: Path, uninterrupted: Weights
) -> None:
    started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", "resources.spares=1")
    cluster.daemons()["node2"].send(signal.SIGKILL)  # what runs there runs on, and Slurm does not know yet
    os.kill(started.parents()["node2"], signal.SIGKILL)
    started.wait_until_over()
    started.assert_in_place(["killed", "node_failure"])
    lost = status(started.run)["attempts"][1]["failure"]
    assert lost["node"] == "node2" and "Task launch for StepId=" in lost["error"], describe(started.run)
    assert status(started.run)["attempts"][2]["nodes"] == ["node1", "node3"]
    assert weights(started.run) == uninterrupted(2)


def test_a_controller_that_is_away_while_a_parent_is_started_again_has_failed_no_attempt(
    cluster: Cluster, tmp_path: Path, uninterrupted: Weights
) -> None:
    started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", "retry.crash=2")
    cluster.stop_controller()
    os.kill(started.parents()["node2"], signal.SIGKILL)
    (log,) = started.run.glob("logs/submitit/*.err")
    asked = "scontrol: Unable to contact slurm controller"  # before the attempt, and when srun could not start
    wait_for("a question after srun's end", lambda: asked in log.read_text().partition("; srun: ")[2], started.run)
    cluster.start_controller()
    started.wait_until_over()
    started.assert_in_place(["killed"])
    assert weights(started.run) == uninterrupted(2)


def test_without_a_spare_fewer_nodes_go_on_with_the_same_samples(cluster: Cluster, tmp_path: Path) -> None:
    started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", "resources.min_nodes=1")
    run = started.run
    before = begun(run, 0)[:4], begun(run, 1)[:4]
    cluster.kill_node("node2")
    started.wait_until_over()
    started.assert_in_place(["node_failure"])
    last = status(run)["attempts"][-1]
    assert (last["nodes"], last["wanted_nodes"]) == (["node1"], 2)
    ids = {one["step"]: one["ids"] for one in begun(run, 0) if one["attempt"] == last["id"]}
    assert all(len(one) == 12 for one in ids.values())
    for one, other in zip(*before, strict=True):
        assert set(one["ids"]).isdisjoint(other["ids"])
    assert "1 of 2 nodes" in started.jobkit("status", run.name).stdout


def test_a_killed_parent_is_started_again_where_it_was(
    cluster: Cluster, tmp_path: Path, uninterrupted: Weights
) -> None:
    setup = f"clusters.slurm.setup=['echo once >> {tmp_path}/setup']"
    started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", setup)
    os.kill(started.parents()["node2"], signal.SIGKILL)
    started.wait_until_over()
    started.assert_in_place(["killed"])
    assert (tmp_path / "setup").read_text().split() == ["once"], "the user's setup is the job's, not the attempt's"
    assert [one["nodes"] for one in events(started.run) if one["event"] == "placed"] == [["node1", "node2"]]
    assert weights(started.run) == uninterrupted(2)


def test_a_node_that_nothing_could_replace_is_used_again(
    short_dir: Path, tmp_path: Path, uninterrupted: Weights
) -> None:
    with Cluster(short_dir, nodes=2, **QUICK) as cluster:
        two = ["resources.nodes=2", "resources.tasks_per_node=1", "retry.exclude_after=1"]
        started = Started(tmp_path, cluster, *two)
        for number in (1, 2):
            started.lose(number, partial(started.kill_rank_1, number))
        started.wait_until_over()
        started.assert_in_place(["killed"] * 2)
        assert weights(started.run) == uninterrupted(2)


def test_a_node_that_only_nodes_without_its_features_could_replace_is_used_again(
    short_dir: Path, tmp_path: Path, uninterrupted: Weights
) -> None:
    with Cluster(short_dir, **QUICK) as cluster:
        cluster.command("scontrol", "update", "NodeName=node1,node2", "AvailableFeatures=big")
        own = ["clusters.slurm.constraint=big", "retry.exclude_after=1"]
        started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", *own)
        started.kill_rank_1(1)
        started.wait_until_over()
        started.assert_in_place(["killed"])
        assert weights(started.run) == uninterrupted(2)


def test_a_run_for_whose_spares_too_few_nodes_are_left_goes_on_without_them(
    short_dir: Path, tmp_path: Path, uninterrupted: Weights
) -> None:
    with Cluster(short_dir, **QUICK) as cluster:
        started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", "resources.spares=1")
        run = started.run
        for number, node in ((1, "node2"), (2, "node3")):
            started.lose(number, partial(cluster.kill_node, node))
        started.wait_until_over()
        assert causes(run) == ["node_failure", "node_failure", "finished"], describe(run)
        assert [one["began"] for one in status(run)["attempts"]] == ["submitted", "in place", "resubmitted"]
        assert status(run)["attempts"][-1]["nodes"] == ["node1", "node4"]
        assert weights(run) == uninterrupted(2)


def test_a_late_signal_of_an_attempt_does_not_reach_the_next(
    cluster: Cluster, tmp_path: Path, uninterrupted: Weights
) -> None:
    started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", "retry.exclude_after=9")
    for number in (1, 2, 3):
        started.lose(number, partial(started.kill_rank_1, number))
    started.wait_until_over()
    started.assert_in_place(["killed"] * 3)
    assert weights(started.run) == uninterrupted(2)


def test_when_the_node_of_the_batch_script_loses_all_processes_another_one_requeues_the_job(
    short_dir: Path, tmp_path: Path, uninterrupted: Weights
) -> None:
    with Cluster(short_dir, **QUICK) as cluster:
        started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1", "resources.spares=1")
        run = started.run
        job = cluster.job(status(run)["job_id"])
        own = {f"SLURMD_NODENAME={job['BatchHost']}", f"SLURM_CONF={cluster.env['SLURM_CONF']}", "SLURM_JOB_ID=1"}
        victims = [one.pid for one in process_table().values() if own <= set(one.environment())]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # at once, as the OOM killer of the cgroup, or an epilog
            for pid in victims:
                os.kill(pid, number)
        started.wait_until_over()
        assert causes(run) == ["killed", "finished"], describe(run)
        assert status(run)["attempts"][1]["began"] == "requeued"
        assert cluster.job(status(run)["job_id"])["Restarts"] == "1"
        assert logged_steps(run) == list(range(STEPS)), describe(run)
        assert weights(run) == uninterrupted(2)


def test_when_the_node_of_the_batch_script_dies_another_one_requeues_the_job(
    short_dir: Path, tmp_path: Path, uninterrupted: Weights
) -> None:
    with Cluster(short_dir, **QUICK) as cluster:
        started = Started(tmp_path, cluster, "resources.nodes=2", "resources.tasks_per_node=1")
        run = started.run
        host = cluster.job(status(run)["job_id"])["BatchHost"]
        cluster.kill_node(host)
        started.wait_until_over()
        assert causes(run) == ["node_failure", "finished"], describe(run)  # Slurm itself finds out later
        assert status(run)["attempts"][0]["failure"]["node"] == host
        assert cluster.job(status(run)["job_id"])["Restarts"] == "1"
        assert logged_steps(run) == list(range(STEPS)), describe(run)
        assert weights(run) == uninterrupted(2)
