"""How ranks divide a model: the axes of a world, and the products that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from jobkit.config.layout import Layout, check
from jobkit.config.schema import CommConfig, Config, ParallelConfig, Resources
from jobkit.errors import InputError


def config(parallel: dict[str, Any], comm: dict[str, Any] | None = None, **others: Any) -> Config:
    resources = Resources(nodes=2, tasks_per_node=4)
    made = {"parallel": ParallelConfig(**parallel), "comm": CommConfig(**(comm or {})), "resources": resources}
    return Config(name="test", task="m:f", **made, **others)


LAYOUTS: list[tuple[dict[str, Any], Layout]] = [
    ({}, Layout(replicas=8)),
    ({"data": "zero3"}, Layout(shards=8)),
    ({"data": "hsdp"}, Layout(replicas=2, shards=4)),
    ({"data": "hsdp", "shards": 2}, Layout(replicas=4, shards=2)),
    ({"tensor": 2, "pipeline": 2}, Layout(pipeline=2, replicas=2, tensor=2)),
    ({"tensor": 4, "pipeline": "all"}, Layout(pipeline=2, tensor=4)),
    ({"data": "hsdp", "tensor": 2}, Layout(replicas=2, shards=2, tensor=2)),
]


@pytest.mark.parametrize(("parallel", "expected"), LAYOUTS, ids=["-".join(row[0]) or "ddp" for row in LAYOUTS])
def test_ranks_divide_along_the_axes(parallel: dict[str, Any], expected: Layout) -> None:
    assert check(config(parallel), 8, 4) == expected


def test_ranks_that_compute_together_have_one_share() -> None:
    layout = Layout(pipeline=2, replicas=2, tensor=2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ({"tensor": 3}, {}, {}, "parallel.tensor"),
    ({"tensor": "all"}, {}, {}, "parallel.tensor"),  # over two nodes
    ({"pipeline": 3}, {}, {}, "parallel.pipeline"),
    ({"data": "hsdp", "shards": 3}, {}, {}, "parallel.shards"),
    ({"shards": 2}, {}, {}, "parallel.shards"),
    ({"microbatches": 4}, {}, {}, "parallel.microbatches"),
    ({"offload": True}, {}, {}, "parallel.offload"),
    ({"data": "zero1", "tensor": 2}, {}, {}, "parallel.data"),
    ({"data": "zero3"}, {"hook": "fp16"}, {}, "comm.hook"),
    ({}, {"hook": "bf16"}, {}, "comm.hook"),
    ({}, {"hook": "powersgd"}, {"precision": "fp16"}, "comm.hook"),
    ({"data": "zero1"}, {"local_sgd": 4}, {}, "comm.local_sgd"),
    ({}, {"local_sgd": 4, "hook": "fp16"}, {}, "comm.local_sgd"),
]


@pytest.mark.parametrize(("parallel", "comm", "others", "key"), REFUSED)
def test_a_product_that_cannot_work_is_refused(
    parallel: dict[str, Any], comm: dict[str, Any], others: dict[str, Any], key: str
) -> None:
    with pytest.raises(InputError) as refused:
        check(config(parallel, comm, **others), 8, 4)
    assert refused.value.key == key
