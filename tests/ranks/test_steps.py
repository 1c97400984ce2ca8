"""Gradients and evaluations on several ranks: the global batch's, and the same bits on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from harness.ranks import run_ranks
from torch import nn

from jobkit.group import RankGroup
from jobkit.run.schema import Config
from jobkit.train.spread import Spread, independent_forwards
from jobkit.train.step import Step

CONFIG = Config(name="test", task="module:function")
X = torch.rand(24, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True).sin()


def gradients(ranks: RankGroup, micro_batch_size: int | None) -> tuple[float, list[list[float]]]:
    torch.manual_seed(ranks.rank)  # rank 0's weights count
    spread = Spread(CONFIG, torch.device("cpu"), ranks)
    step = Step(CONFIG, spread)
    if ranks.rank != 0:
        torch.manual_seed(99)
    else:
        torch.manual_seed(0)
    model = spread.parallelize(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    share = slice(24 * ranks.rank // ranks.world_size, 24 * (ranks.rank + 1) // ranks.world_size)
    batch = X[share].double(), Y[share].double()
    loss = step.backward(model, batch, nn.functional.mse_loss, micro_batch_size=micro_batch_size, global_batch_size=24)
    return float(loss), [parameter.grad.flatten().tolist() for parameter in model.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 5), (2, None), (3, 4), (5, 2)])
def test_gradients_are_the_global_batchs(world_size: int, micro_batch_size: int | None) -> None:
    (expected_loss, expected) = run_ranks(gradients, 1, None)[0]
    for loss, values in run_ranks(gradients, world_size, micro_batch_size):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        for value, other in zip(values, expected, strict=True):
            assert value == pytest.approx(other, rel=1e-9)


def averages_alone(ranks: RankGroup) -> float:
    module = nn.BatchNorm1d(1, momentum=1.0)
    with independent_forwards([module]):
        module(torch.tensor([[1.0], [3.0]]))
    assert module.running_mean is not None
    return module.running_mean.item()


def test_on_a_single_rank_an_evaluation_may_change_buffers() -> None:
    assert run_ranks(averages_alone, 1) == [2.0]


def averages_by_hand(ranks: RankGroup) -> tuple[float, float]:
    module = nn.BatchNorm1d(1)
    assert module.running_mean is not None
    module.running_mean.fill_(ranks.rank + 5)
    with independent_forwards([module]):
        within = module.running_mean.item()
    return within, module.running_mean.item()


def test_within_an_evaluation_the_buffers_of_every_module_are_rank_0s() -> None:
    assert run_ranks(averages_by_hand, 2) == [(5.0, 5.0), (5.0, 6.0)]


def differs(ranks: RankGroup) -> str:
    spread = Spread(CONFIG, torch.device("cpu"), ranks)
    try:
        spread.parallelize(nn.Linear(3, 4 + ranks.rank))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_module_of_another_shape_is_refused_on_all_ranks() -> None:
    for text in run_ranks(differs, 2):
        assert text.startswith("UsageError: ctx.parallelize: rank 0 has weight [4, 3] float32, where rank 1")
