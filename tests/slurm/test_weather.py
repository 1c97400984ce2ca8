"""Bad weather on a real Slurm: an outage keeps the job and its nodes, a sick device loses its node."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from harness.runs import Launch, Project, wait_until
from harness.training import result
from harness.weather import be, with_task
from slurmbox import Cluster

ON_SLURM = ("--cluster", "slurm")


def train_in_fine_weather(project: Project) -> tuple[Launch, Any]:
    launch = with_task(project).submit("--local", "--detach", "resources.tasks_per_node=3")
    return launch, result(launch)


@pytest.fixture(scope="session")
def fine(seen_once: Callable[..., tuple[Launch, Any]]) -> Any:
    """The result of three ranks in fine weather, on this machine."""
    return seen_once("fine-weather", train_in_fine_weather)[1]


@pytest.mark.parametrize(("nodes", "kind"), [(1, "connection"), (3, "bucket")])
def test_an_outage_keeps_the_job_and_excludes_nothing(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project], fine: Any, nodes: int, kind: str
) -> None:
    slurm = make_slurm(cred_expire=5)
    words = (*ON_SLURM, f"resources.nodes={nodes}", f"resources.tasks_per_node={3 // nodes}")
    launch = with_task(on_slurm(slurm, plain=False)).submit(*words).wait_for_step(40)
    since, job = time.monotonic(), str(launch.status.job_id)
    be(launch, kind)
    launch.wait_until(lambda me: len(me.ends) >= 4 and time.monotonic() > since + 5, "four deaths")
    if nodes > 1:  # a preemption in the middle
        slurm.preempt(job)
        launch.wait_until(lambda me: "preempted" in me.causes, "the preemption")
    (launch.project.folder / "weather").unlink()
    assert result(launch) == fine
    assert {"crashed", "finished"} <= set(launch.causes) <= {"crashed", "preempted", "finished"}
    assert [list(end.avoid) for end in launch.ends] == [[]] * len(launch.ends)
    record = slurm.job(job)
    assert (launch.status.job_id, record["Restarts"]) == (job, str(launch.causes.count("preempted")))
    assert record["ExcNodeList"] == "(null)"


def test_a_long_outage_gives_the_nodes_back_and_the_same_job_comes_again(
    slurm: Cluster, on_slurm: Callable[..., Project], fine: Any
) -> None:
    words = (*ON_SLURM, "resources.tasks_per_node=3", "checkpoint.memory=off")
    launch = with_task(on_slurm(slurm, plain=False)).submit(*words).wait_for_step(60)
    job = str(launch.status.job_id)
    be(launch, "bucket")
    launch.wait_until(lambda me: me.ends and me.ends[-1].next == "requeue", "the end of the job's first start")
    earlier = launch.ends[:-1]
    record = wait_until(lambda: (now := slurm.job(job))["JobState"] == "PENDING" and now, "the job in the queue")
    assert record["NodeList"] == ""
    (launch.project.folder / "weather").unlink()
    assert result(launch) == fine
    assert [end.next for end in earlier] == ["in_place"] * len(earlier) and len(earlier) > 5
    assert launch.causes == ["crashed"] * (len(earlier) + 1) + ["finished"]
    assert launch.status.attempts[-1].began.how == "requeue"
    assert (slurm.job(job)["Restarts"], slurm.job(job)["ExcNodeList"]) == ("1", "(null)")


@pytest.mark.parametrize(
    ("kind", "nodes", "spares", "deaths"),
    [("device", 2, 1, 3), ("device", 2, 0, 3), ("ecc", 1, 0, 2)],
    ids=["a spare takes the place", "the job gets another node", "a job of one node moves"],
)
def test_a_sick_device_loses_its_node(
    make_slurm: Callable[..., Cluster],
    on_slurm: Callable[..., Project],
    kind: str,
    nodes: int,
    spares: int,
    deaths: int,
) -> None:
    cluster = make_slurm(nodes=4, cred_expire=5)
    words = (*ON_SLURM, f"resources.nodes={nodes}", f"resources.spares={spares}", "resources.tasks_per_node=2")
    launch = with_task(on_slurm(cluster, plain=False)).submit(*words).wait_for_step(100)
    (sick, *_) = launch.status.attempts[-1].nodes
    be(launch, kind, node=sick)
    assert result(launch)
    assert launch.causes == ["crashed"] * deaths + ["finished"]
    assert {end.node for end in launch.ends[:deaths]} == {sick} and list(launch.ends[-2].avoid) == [sick]
    assert sick not in launch.status.attempts[-1].nodes and len(launch.status.attempts[-1].nodes) == nodes
    assert cluster.job(str(launch.status.job_id))["Restarts"] == ("0" if spares else "1")


def test_a_sick_device_everywhere_is_given_up_with_its_words(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    cluster = make_slurm(nodes=2, cred_expire=5)
    project = with_task(on_slurm(cluster, plain=False))
    launch = project.submit(*ON_SLURM, "resources.nodes=2", "retry.patience=3s").wait_for_step(50)
    be(launch, "ecc")
    launch.wait_until_over()
    assert (launch.status.state, launch.ends[-1].next) == ("interrupted", "stop")
    assert "gave up after" in launch.status.reason and "AcceleratorError: CUDA error" in launch.status.reason
    assert launch.ends[-1].avoid == {}, "there is nothing else"
