"""Gradients and evaluations on several ranks: the global batch's, and the same bits on any number of ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from jobkit.group import RankGroup
from jobkit.run.schema import Config
from jobkit.train.evaluate import Batches, HandOut, as_values, computed, in_order, mean
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


def evaluation(ranks: RankGroup, batch_size: int) -> tuple[float, int, list[int]]:
    torch.manual_seed(0)
    spread = Spread(CONFIG, torch.device("cpu"), ranks)
    model = spread.parallelize(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    model.eval()
    batches = Batches(TensorDataset(X, Y), batch_size, 0, None)
    store = torch.distributed.distributed_c10d._get_default_store() if ranks.world_size > 1 else None
    seen: list[int] = []

    def error(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        seen.extend(ids.tolist())
        if ranks.rank == 1:
            time.sleep(0.05)  # a slow rank does less
        return (model(batch[0] + 0.1 * torch.rand(1)) - batch[1]).square().mean(1)

    results = {}
    with independent_forwards([model]):
        for number, value in computed(error, batches, HandOut(range(len(batches)), store, "key"), spread.device):
            results[number] = as_values(value, len(batches.ids(number)))
    parts = in_order(ranks.gather(results))
    model.train()
    model(X).sum().backward()  # ranks that computed no batch meet the others in DDP's collectives
    return mean(torch.cat([part[""] for part in parts])), len(results), seen


def test_an_evaluation_has_the_same_bits_on_any_number_of_ranks() -> None:
    expected = run_ranks(evaluation, 1, 4)[0][0]
    for world_size in (2, 3, 5):
        answers = run_ranks(evaluation, world_size, 4)
        assert {value for value, _, _ in answers} == {expected}
        assert sorted(sample for _, _, seen in answers for sample in seen) == list(range(24))


def test_training_goes_on_where_a_rank_computed_no_batch() -> None:
    counts = [count for _, count, _ in run_ranks(evaluation, 3, 24)]
    assert sorted(counts) == [0, 0, 1]


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
