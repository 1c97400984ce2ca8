"""A job that no node of its partition can run is refused with the key that asks for too much; nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobkit import slurm
from jobkit.errors import InvalidValue, SchedulerTimeout
from jobkit.run.config import Config, Resources
from jobkit.slurm import Node
from jobkit.submission.partition_check import refuse_impossible
from jobkit.submission.plan import make_plan

NODES = {
    "low": [Node(f"node{number}", 16, 1000, {"gpu": {"a100": 4}, "npu": {"": 8}}) for number in range(2)]
    + [Node("big", 64, 1000, {"gpu": {"h100": 8}})],
    "high": [Node("big", 64, 8000, {"gpu": {"h100": 8}})],
}


def said(monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], cluster: Any = NODES, **resources: Any) -> str:
    """What is refused of a job in such a partition, with its key; nothing for what is taken."""
    monkeypatch.setattr(slurm, "available", lambda: True)
    monkeypatch.setattr(slurm, "nodes", lambda partition: {one: cluster[one] for one in partition.split(",")})
    config = Config(name="x", task="a:b", resources=Resources(**resources), clusters={"here": entry})
    try:
        refuse_impossible(make_plan(Path("/runs/x"), config, "here"))
    except InvalidValue as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("entry", "resources", "expected"),
    [
        ({}, {"nodes": 4}, "resources.nodes: found 4, but partition low has 3 node(s)"),
        ({"nodes": 4}, {}, "clusters.here.nodes: found 4, but partition low has 3 node(s)"),
        ({}, {"nodes": 2, "spares": 2}, "resources.spares: found 2, but partition low has 3 node(s): with nodes: 2 at"),
        (
            {},
            {"tasks_per_node": 5, "cpus_per_task": 13},
            "resources.cpus_per_task: 5 task(s) of 13 core(s) need 65 cores on each of 1 node(s), "
            "but partition low has 3 node(s), and none has more than 64",
        ),
        ({}, {"nodes": 2, "cpus_per_task": 17}, "and 1 of them have as many"),
        ({}, {"gpus_per_task": 9}, "resources.gpus_per_task: found 9 GPU(s) on each of 1 node(s)"),
        ({"gpus_per_node": "a100:5"}, {}, "clusters.here.gpus_per_node: found 5 a100 GPU(s) on each"),
        ({"gres": "gpu:v100:1"}, {}, "clusters.here.gres: found 1 v100 GPU(s) on each"),
        ({"gres": "npu:16"}, {}, "clusters.here.gres: found 16 npu(s) on each"),
        ({"mem": "2G"}, {}, "clusters.here.mem: found 2G, which is 2048 MB on each"),
        ({"mem-per-cpu": 100}, {"cpus_per_task": 11}, "found 100, which is 1100 MB on each"),
        ({"mem_per_gpu": "0.5G"}, {"gpus_per_task": 4}, "found 0.5G, which is 2048 MB on each"),
        # More than one node can meet each of these, and none all of them.
        ({"gpus_per_node": "a100:1"}, {"cpus_per_task": 17}, "clusters.here.gpus_per_node: found 1 a100 GPU(s)"),
    ],
)
def test_what_no_node_can_meet_is_refused(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], resources: dict[str, Any], expected: str
) -> None:
    assert expected in said(monkeypatch, {"partition": "low", **entry}, **resources)


@pytest.mark.parametrize(
    ("entry", "resources"),
    [
        ({}, {"nodes": 3, "cpus_per_task": 16}),
        ({"gpus_per_node": "A100:4"}, {"nodes": 2}),
        ({"gres": "npu:8,lustre:40"}, {"nodes": 2}),
        ({"mem": 0}, {}),
        ({"mem": "all of it"}, {}),  # sbatch knows
        ({"overcommit": True}, {"tasks_per_node": 100}),
        ({"partition": "low,high", "mem": "4G"}, {}),  # one of them can
    ],
)
def test_what_some_node_can_meet_is_left_to_slurm(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any], resources: dict[str, Any]
) -> None:
    assert said(monkeypatch, {"partition": "low", **entry}, **resources) == ""


def test_memory_that_nobody_has_configured_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, {"partition": "p", "mem": "4G"}, {"p": [Node("node", 4, 1, {})]}) == ""


def test_nothing_is_refused_where_slurm_knows_no_such_partition_or_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def away(partition: str | None) -> None:
        raise SchedulerTimeout("no answer")

    plan = make_plan(Path("/runs/x"), Config(name="x", task="a:b", resources=Resources(nodes=9)), "slurm")
    monkeypatch.setattr(slurm, "available", lambda: True)
    for answer in (away, lambda partition: {}):
        monkeypatch.setattr(slurm, "nodes", answer)
        refuse_impossible(plan)
