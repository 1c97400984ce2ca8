"""What a training function does with a spread model beside training it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import Team, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from jobkit.errors import JobkitError
from jobkit.run.config import Config, ParallelConfig
from jobkit.train.data_parallel import without_synchronisation
from jobkit.train.engine import Engine
from jobkit.train.parallel import unwrapped
from jobkit.train.sharding import reshard


def engine_of(team: Team, precision: Any = "fp32", **parallel: Any) -> Engine:
    config = Config(name="x", task="a:b", parallel=ParallelConfig(**parallel), precision=precision)
    return Engine(config, torch.device("cpu"), team.rank, team.world_size, team.world_size)


ALONE = Team(0, 1, None)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a spread model, whole. Collective."""
    reshard(model)
    found = unwrapped(model).named_parameters()
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in found}


# An optimizer and what it trains


def optimizers_made_before(team: Team, kinds: list[str]) -> list[str]:
    said = []
    for kind in kinds:
        engine, net = engine_of(team, data=kind), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = engine.parallelize(net)
        try:
            engine.check_tracked([model, optimizer])
            said.append("")
        except JobkitError as error:
            said.append(str(error))
        made_after = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(torch.ones(2, 4))  # zero2 leaves whole parameters in the place of shards
        engine.check_tracked([model, made_after])
    return said


def test_an_optimizer_made_before_its_model_is_sharded_is_refused() -> None:
    for ddp, *sharded in on_ranks(2, optimizers_made_before, ["ddp", "zero2", "zero3", "hsdp"]):
        assert ddp == "", "there it trains the model"
        assert len(sharded) == 3
        for said in sharded:
            assert said.startswith("the SGD would train 0.weight as it was before ctx.parallelize")


def test_an_optimizer_of_something_that_is_not_tracked_is_refused() -> None:
    engine, temperature = engine_of(ALONE), nn.Parameter(torch.ones(3))
    model = engine.parallelize(nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(JobkitError, match=r"a parameter of shape \[3\] that is in no tracked module"):
        engine.check_tracked([model, optimizer])
    holder = nn.ParameterList([temperature])
    engine.check_tracked([model, optimizer, holder])
    of_a_placeholder = torch.optim.SGD([torch.zeros(1)], lr=0.1)  # as of optimizers that step within backward

    class Lister:
        def parameters(self, kind: str) -> list[nn.Parameter]:
            raise AssertionError("nobody asks")

    engine.check_tracked([model, torch.optim.SGD(model.parameters()), of_a_placeholder, Lister()])


# torch.compile

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"data": "zero1"},
    "zero2": {"data": "zero2"},
    "zero3": {"data": "zero3"},
    "tensor": {"tensor": "all"},
}
WAYS = ("plain", "after", "before", "in place before", "in place after")


class Net(nn.Sequential):
    def tensor_plan(self) -> dict[str, ParallelStyle]:
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def compiled(engine: Engine, way: str) -> nn.Module:
    torch.manual_seed(0)
    net: Any = Net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    if way == "in place before":
        net.compile(backend="aot_eager")
    model = engine.parallelize(torch.compile(net, backend="aot_eager") if way == "before" else net)
    if way == "in place after":
        model.compile(backend="aot_eager")
    return torch.compile(model, backend="aot_eager") if way == "after" else model  # type: ignore[return-value]


def train_compiled(team: Team) -> dict[str, list[dict[str, Tensor]]]:
    found: dict[str, list[dict[str, Tensor]]] = {}
    for kind, parallel in KINDS.items():
        for way in WAYS if kind in ("ddp", "zero3") else WAYS[:2]:  # the others are of these two, and compiling is slow
            engine = engine_of(team, **parallel)
            model = compiled(engine, way)
            optimizer = engine.optimizer(model, torch.optim.SGD, lr=0.1)
            engine.check_tracked([model, optimizer])
            x = torch.arange(24.0).view(6, 4) / 24 + engine.parallel.data_rank
            for _ in range(2):
                engine.backward(model, x, nn.functional.mse_loss, x, micro_batch_size=2, global_batch_size=12)
                engine.update(optimizer, max_norm=1.0)
            found.setdefault(kind, []).append(whole(model))
    return found


def test_compiled_models_train_as_they_do_without_under_every_strategy() -> None:
    for of_rank in on_ranks(2, train_compiled):
        for kind, (plain, *others) in of_rank.items():
            for way, weights in zip(WAYS[1:], others, strict=False):
                assert weights.keys() == plain.keys()
                for name, tensor in weights.items():
                    torch.testing.assert_close(tensor, plain[name], msg=f"{kind}, compiled {way}: {name}")


def synchronise(team: Team) -> list[bool]:
    """Whether gradients of ranks with different samples are the same outside, and differ or are absent inside."""
    found = []
    for kind in ("ddp", "zero3"):
        model = compiled(engine_of(team, **KINDS[kind]), "after")
        with without_synchronisation(model):
            model(torch.full((2, 4), team.rank + 1.0)).sum().backward()
        gradient = next(model.parameters()).grad
        found.append(gradient is None)
        if gradient is not None:
            gathered = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(gathered, gradient)
            found[-1] = not torch.equal(*gathered)
    return found


def test_a_compiled_models_gradients_stay_on_the_rank_until_the_last_micro_batch() -> None:
    assert on_ranks(2, synchronise) == [[True, True]] * 2


# Copies


def copy_spread_models(team: Team) -> list[str]:
    said = []
    for parallel in ({"tensor": "all"}, {"pipeline": "all"}, {"data": "zero3"}):
        engine = engine_of(team, **parallel)
        model = compiled(engine, "plain")
        try:
            average = torch.optim.swa_utils.AveragedModel(model)
        except AssertionError as error:
            said.append(str(error))
            continue
        average.update_parameters(model)
        with torch.no_grad():
            x = torch.ones(2, 4)
            assert torch.equal(average(x), model(x))
        said.append("")
        if engine.parallel.stages is not None:
            with pytest.raises(JobkitError, match="a rank has one stage of the model"):
                torch.save(model, io.BytesIO())
    return said


def test_a_model_in_parts_is_averaged_and_what_torch_cannot_copy_is_said() -> None:
    for tensor, pipeline, zero3 in on_ranks(2, copy_spread_models):
        assert tensor == pipeline == "" and "use state dict" in zero3
