"""A model whose shards are in host memory, on one rank too: stopped and continued there and on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from harness.project import status
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from jobkit.train.optim import fused_ema_adam

OFFLOADED = "parallel: {data: zero3, offload: true}"
ROUNDING = 1e-5
"""Between numbers of ranks: sums in another order."""


def train(ctx: Any, stopped_after: int | None) -> tuple[int, list[Tensor]]:
    """How many units have the policy of the host, and the averaged and the last weights, whole."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)) for _ in range(3)]
    model = ctx.parallelize(nn.Sequential(*blocks, nn.Linear(8, 8).requires_grad_(False)))
    groups = [one._get_fsdp_state()._fsdp_param_group for one in model.modules() if isinstance(one, FSDPModule)]
    on_host = sum(isinstance(one.offload_policy, CPUOffloadPolicy) for one in groups if one is not None)
    optimizer = ctx.optimizer(model, fused_ema_adam, lr=1e-2)
    samples = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    loader = ctx.loader(torch.utils.data.TensorDataset(samples), global_batch_size=12)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for _ in ctx.steps(10):
        (x,) = next(loader)
        ctx.backward(model, x, nn.functional.mse_loss, x, micro_batch_size=2)
        ctx.update(optimizer, max_norm=0.5)
        if stopped_after is not None:
            stop_after(ctx, stopped_after)
    with ctx.averaged(optimizer):
        averages = [whole(one) for one in model.parameters()]
    return on_host, [*averages, *(whole(one) for one in model.parameters())]


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter.data, DTensor) else parameter).detach().clone()


def difference(left: list[Tensor], right: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Tensor]:
    """The weights of one rank with its shards on the host."""
    ((on_host, weights),) = attempt(1, tmp_path_factory.mktemp("whole"), train, None, config=OFFLOADED)
    assert on_host == 4, "a unit for each block"
    return weights


def test_one_rank_with_its_shards_on_the_host_trains_as_one_without(
    tmp_path: Path, uninterrupted: list[Tensor]
) -> None:
    ((on_host, weights),) = attempt(1, tmp_path, train, None, config="parallel: ddp")
    assert on_host == 0
    assert difference(weights, uninterrupted) == 0.0


@pytest.mark.parametrize(("before", "after", "largest"), [(1, 1, 0.0), (1, 2, ROUNDING), (2, 1, ROUNDING)])
def test_it_is_stopped_and_goes_on_on_as_many_ranks_and_on_others(
    tmp_path: Path, uninterrupted: list[Tensor], before: int, after: int, largest: float
) -> None:
    assert attempt(before, tmp_path, train, 5, config=OFFLOADED) == [STOPPED] * before
    on_host, weights = attempt(after, tmp_path, train, None, config=OFFLOADED)[0]
    assert on_host == 4
    assert difference(weights, uninterrupted) <= largest
    (run,) = tmp_path.glob("run-*")
    assert [one["last_step"] for one in status(run)["attempts"]] == [6, 10]
