"""`--check-model`: a training function up to its first step on a rank that only pretends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import jobkit
from jobkit.run.config import Config, ParallelConfig, Resources
from jobkit.run.records import ModelCheck
from jobkit.submission.model_check import describe
from jobkit.train.optim import fused_ema_adam
from jobkit.worker.model_check import PretendedContext, check, ranks_to_check

WIDTH = 1024
BLOCK = WIDTH * WIDTH + WIDTH


class Net(nn.Sequential):
    def tensor_plan(self) -> dict[str, Any]:
        return {"0": ColwiseParallel(), "1": RowwiseParallel()}


class NoPlan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


def train(ctx: Any, whole: bool = True) -> None:
    net = Net(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    assert net[0].weight.is_meta, "nothing of the model's size is in memory"
    model = ctx.parallelize(net)
    optimizer = ctx.optimizer(model, fused_ema_adam, lr=1e-3)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(100, 8)), global_batch_size=16)
    ctx.track(model=model, optimizer=optimizer, **({"loader": loader} if whole else {}))
    for _ in ctx.steps(10):
        raise AssertionError("a step was taken")


def without_a_plan(ctx: Any) -> None:
    ctx.parallelize(NoPlan())


def forgets_the_loader(ctx: Any) -> None:
    train(ctx, whole=False)


def reads_data_first(ctx: Any) -> None:
    raise FileNotFoundError("/only/there")


def reads_data_later(ctx: Any) -> None:
    model = ctx.parallelize(nn.Linear(WIDTH, WIDTH))
    ctx.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    reads_data_first(ctx)


def generates(ctx: Any) -> None:
    ctx.evaluate(lambda batch, ids: ids, [1, 2], batch_size=1)


def wants_a_value(ctx: Any) -> None:
    ctx.parallelize(nn.Linear(WIDTH, int(torch.linspace(1, WIDTH, 2)[1].item())))


def says_wrong_name(ctx: Any) -> None:
    ctx.paralellize(nn.Linear(1, 1))


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "ddp": (train, {}, "meta"),
    "zero3": (train, {"data": "zero3"}, "meta"),
    "tensor": (train, {"tensor": 2}, "meta"),
    "pipeline": (train, {"pipeline": 2}, "meta"),
    "no plan": (without_a_plan, {"tensor": 2}, "meta"),
    "no sequence": (without_a_plan, {"pipeline": 2}, "meta"),
    "not tracked": (forgets_the_loader, {}, "meta"),
    "data first": (reads_data_first, {}, "meta"),
    "data later": (reads_data_later, {}, "meta"),
    "evaluation": (generates, {}, "meta"),
    "a value": (wants_a_value, {}, "meta"),
    "a value, on the CPU": (wants_a_value, {}, "cpu"),
    "a wrong name": (says_wrong_name, {}, "meta"),
}


def check_all(team: Team) -> dict[str, ModelCheck]:
    found = {}
    for name, (function, parallel, device) in CASES.items():
        resources = Resources(nodes=2, tasks_per_node=4)
        config = Config(name="a", task="m:f", parallel=ParallelConfig(**parallel), resources=resources)
        found[name] = check(config, function, ranks_to_check(config)[-1], torch.device(device))
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, ModelCheck]:
    return on_ranks(1, check_all)[0]


@pytest.mark.parametrize(
    ("name", "own"),
    [("ddp", 2 * BLOCK), ("zero3", BLOCK / 4), ("tensor", WIDTH * WIDTH + 1.5 * WIDTH), ("pipeline", BLOCK)],
)
def test_what_a_rank_of_the_world_would_have_is_told(found: dict[str, ModelCheck], name: str, own: float) -> None:
    (model,) = found[name].models
    assert (found[name].problem, found[name].refused, found[name].reached) == (None, None, "ctx.steps")
    assert (model.name, model.parameters, model.own) == ("Net", 2 * BLOCK, own)
    assert (model.weights, model.gradients, model.optimizer) == (4 * own, 4 * own, 12 * own)  # two moments, an average


WORLD = Config(name="a", task="m:f", resources=Resources(nodes=2, tasks_per_node=4))


def test_it_is_told_in_lines(found: dict[str, ModelCheck]) -> None:
    assert list(describe([found["zero3"]], WORLD)) == [
        "Net: 2,099,200 parameters; rank 7 of 8 has 262,400: 1.00 MiB weights, 1.00 MiB gradients, 3.00 MiB optimizer",
        "(without activations, and without what is gathered of other ranks for a moment)",
        "checked up to ctx.steps",
    ]
    offloaded = dataclasses.replace(WORLD, parallel=ParallelConfig(data="zero3", offload=True))
    first, *_ = describe([found["zero3"]], offloaded)
    assert first.endswith(" 3.00 MiB optimizer, in host memory")
    nothing = ["no model was given to ctx.parallelize", "checked up to ctx.evaluate"]
    assert list(describe([found["evaluation"]], WORLD)) == nothing
    *_, last = describe([found["data later"]], WORLD)
    assert last.startswith(
        "not checked any further, for lack of data here or by a mistake: FileNotFoundError: /only/th"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no plan", "parallel.tensor: NoPlan has no tensor_plan()"),
        ("no sequence", "parallel.pipeline: a pipeline cuts an nn.Sequential between its children, and NoPlan is none"),
        ("not tracked", "the loader of ctx.loader is not tracked"),
    ],
)
def test_what_could_not_train_is_refused(found: dict[str, ModelCheck], name: str, said: str) -> None:
    assert (found[name].refused or "").startswith(said)


def test_what_only_a_run_has_ends_the_check(found: dict[str, ModelCheck]) -> None:
    assert found["evaluation"].reached == "ctx.evaluate"
    assert (found["data first"].problem or "").startswith("FileNotFoundError: /only/there (")
    later = found["data later"]
    assert (later.problem or "").startswith("FileNotFoundError") and len(later.models) == 1
    assert later.models[0].optimizer == 0
    assert "has no 'paralellize'" in (found["a wrong name"].problem or "")


def test_a_function_that_needs_values_is_checked_with_them(found: dict[str, ModelCheck]) -> None:
    assert "meta" in (found["a value"].problem or "") and not found["a value"].models
    assert found["a value, on the CPU"].models[0].own == WIDTH * WIDTH + WIDTH


def test_a_rank_of_each_stage_is_checked() -> None:
    def ranks(pipeline: int, nodes: int) -> list[int]:
        resources = Resources(nodes=nodes, tasks_per_node=2)
        return ranks_to_check(Config(name="a", parallel=ParallelConfig(pipeline=pipeline), resources=resources))

    assert (ranks(1, 2), ranks(2, 2), ranks(16, 8)) == ([3], [1, 3], [0, 15])


def test_a_pretended_rank_has_what_a_training_function_asks_before_its_loop() -> None:
    before_the_loop = {"parallelize", "optimizer", "loader", "track", "steps", "barrier", "autocast", "averaged"}
    before_the_loop |= {"log", "log_image", "log_video", "log_text"}
    assert all(name in vars(jobkit.Context) and name in vars(PretendedContext) for name in before_the_loop)
