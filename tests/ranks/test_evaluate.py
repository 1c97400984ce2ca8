"""Evaluations and maps of a Context: the same bits on any ranks, and what an attempt leaves that was broken off."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import make_context, run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from jobkit.config.schema import Config
from jobkit.data.seeds import generator_state
from jobkit.errors import Stopped
from jobkit.optim import EmaAdamW
from jobkit.parallel.parallelizer import independent_forwards
from jobkit.wire.group import RankGroup

X = torch.rand(23, 3, generator=torch.Generator().manual_seed(0))


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Tensor:
        return X[index] + random.random()


def evaluation(ranks: RankGroup, folder: Path, precision: str, together: bool) -> tuple[Any, ...]:
    """Evaluate within a step; the function draws, and meets the other ranks if `together`."""
    torch.manual_seed(0)
    config = Config(name="test", task="module:function", precision=precision, seed=1)
    ctx = make_context(folder / str(ranks.world_size), ranks, config)
    ctx._parallelizer.forward_is_collective = together
    model = ctx.parallelize(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = EmaAdamW(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    seen: list[int] = []

    def outputs(batch: Tensor, ids: Tensor) -> dict[str, Tensor]:
        seen.extend(ids.tolist())
        if together and ranks.world_size > 1:
            dist.all_reduce(torch.ones(1))
        with ctx.autocast():
            return {"loss": model(batch + torch.rand(3)).square().mean(1), "id": ids}

    for _ in ctx.steps(1):
        model(X)  # moves the averages of BatchNorm
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state, modes = generator_state(), [part.training for part in model.modules()]
        with ctx.evaluating(model, optimizer):
            means = ctx.evaluate(outputs, Noisy(), batch_size=6)
            samples = ctx.evaluate_samples(outputs, Noisy(), batch_size=6)
            mapped = ctx.map(lambda batch, ids: batch, Noisy(), batch_size=6, to="all")
        assert generator_state() == state
        assert [part.training for part in model.modules()] == modes
        model(X).sum().backward()  # ranks that computed no batch meet the others in DDP's collectives
    return means, samples["loss"].tolist(), samples["id"].tolist(), mapped.tolist(), seen


@pytest.mark.parametrize(("precision", "together"), [("fp32", False), ("bf16", True)])
def test_an_evaluation_has_the_same_bits_on_any_ranks(tmp_path: Path, precision: str, together: bool) -> None:
    (*expected, _) = run_ranks(evaluation, 1, tmp_path, precision, together)[0]
    assert expected[2] == list(range(23))
    for world_size in (2, 3, 5):  # 5 ranks, 4 batches
        answers = run_ranks(evaluation, world_size, tmp_path, precision, together)
        for *answer, seen in answers:
            assert answer == expected
            assert not together or len(seen) in range(2 * 5, 99)  # every rank has a batch
        if not together:
            assert sorted(sample for *_, seen in answers for sample in seen) == sorted(2 * list(range(23)))


def test_what_changes_within_evaluating_is_as_before_even_after_an_error(tmp_path: Path) -> None:
    ctx = make_context(tmp_path, RankGroup.alone())
    model = ctx.parallelize(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1).eval(), nn.Dropout()))
    optimizer = EmaAdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    trained, state = model[0].weight.clone(), generator_state()
    with pytest.raises(ZeroDivisionError), ctx.evaluating(model, optimizer):
        assert torch.equal(model[0].weight, optimizer.state[model[0].weight]["ema"])
        assert not torch.equal(model[0].weight, trained)
        assert not any(part.training for part in model.modules())
        torch.rand(1)
        raise ZeroDivisionError
    ctx.close()
    assert torch.equal(model[0].weight, trained)
    assert [part.training for part in model] == [True, False, True]
    assert generator_state() == state


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


def generation(ranks: RankGroup, folder: Path, attempt: int, stop: int | None, step: int = 0) -> list[int]:
    """Return the prompts of which this rank made something; the attempt is told to stop at one of them."""
    ctx = make_context(folder, ranks, attempt=attempt)
    made: list[int] = []

    def generate(batch: tuple[Tensor], ids: Tensor) -> Tensor:
        made.extend(ids.tolist())
        if stop in ids.tolist():
            ctx._rank.page.ask_to_stop()
        return batch[0] + 100 * step + torch.rand(1)

    ctx._loop.boundary = ctx._loop.boundary.__class__(step)
    try:
        for _ in range(1 if stop is None and attempt > 1 else 2):
            ctx.map(generate, TensorDataset(X), to=folder / "clips", batch_size=2)
    except Stopped:
        pass
    ctx.close()
    return made


def contents(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((folder / "clips").glob("batch_*"))]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_generation_that_was_broken_off_goes_on_with_the_files_that_lack(tmp_path: Path, ranks: int) -> None:
    run_ranks(generation, 1, tmp_path / "whole", 2, None)
    whole = contents(tmp_path / "whole")
    first = run_ranks(generation, ranks, tmp_path / "stops", 1, 9)
    files = contents(tmp_path / "stops")
    assert 0 < len(files) < 12
    assert set(files) < set(whole)  # each is whole
    second = run_ranks(generation, ranks, tmp_path / "stops", 2, None)
    assert sorted(chain(*first, *second)) == list(range(23))
    assert contents(tmp_path / "stops") == whole
    # Other code makes all files anew, and so do a map of another step and a second one of the same attempt.
    (tmp_path / "stops" / "test-01234567" / "code").symlink_to(tmp_path / "other")
    assert sum(map(len, run_ranks(generation, ranks, tmp_path / "stops", 3, None))) == 23
    assert sum(map(len, run_ranks(generation, ranks, tmp_path / "stops", 4, None, 500))) == 23
    assert not set(contents(tmp_path / "stops")) & set(whole)
    assert sum(map(len, run_ranks(generation, ranks, tmp_path / "twice", 1, None))) == 46
