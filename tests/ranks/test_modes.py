"""What a loop freezes, unfreezes and puts into evaluation mode goes on as it was; what cannot be trained is refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from jobkit.train.parallel import unwrapped


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))  # type: ignore[no-any-return]


def learn(ctx: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.arange(16.0).view(4, 4).sin() + ctx.rank).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([one.detach().flatten() for one in unwrapped(model).state_dict().values()]).tolist()


def in_stages(ctx: Any, freeze: str, stop_at: int | None = None) -> Any:
    """The head alone, then all; and the statistics are frozen at some time, as in fine-tuning."""
    net = Net()
    if freeze == "before":
        net.backbone.requires_grad_(False)
    model = ctx.parallelize(net, **({"find_unused_parameters": True} if ctx.world_size > 1 else {}))
    net.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    model.train()
    for step in ctx.steps(8):
        if step == 2:
            net.backbone.requires_grad_(True)
        if step == 3:
            net.backbone[1].eval()
        learn(ctx, model, optimizer)
        if stop_at is not None:
            stop_after(ctx, stop_at)
    return weights(model), [part.training for part in model.modules()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_unfrozen_or_put_into_evaluation_mode_is_so_after_a_resume(tmp_path: Path, ranks: int) -> None:
    uninterrupted = attempt(ranks, tmp_path / "whole", in_stages, "after")
    for step in (4, 5):  # each attempt makes the network anew, and takes the changes over to the next
        assert attempt(ranks, tmp_path / "stopped", in_stages, "after", step) == [STOPPED] * ranks
    assert attempt(ranks, tmp_path / "stopped", in_stages, "after") == uninterrupted
    assert uninterrupted[0][1].count(False) == 1


def test_what_ranks_would_train_each_for_itself_is_refused(tmp_path: Path) -> None:
    for found in attempt(2, tmp_path, in_stages, "before"):
        assert found.startswith("UsageError: backbone.0.weight was frozen when ctx.parallelize was called"), found
        assert "find_unused_parameters=True" in found
    assert len(attempt(1, tmp_path / "alone", in_stages, "before")[0][0]) > 0


def evaluating_in_between(ctx: Any, stop: bool) -> Any:
    model = ctx.parallelize(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)

    def score(batch: Tensor, ids: Tensor) -> Tensor:
        if stop and ctx.step == 3:
            ctx._signals.signal = 15
        return model(batch.float().expand(4, len(ids)).T)[:, 0]

    for step in ctx.steps(6):
        if step % 3 == 0:
            before = model.training
            model.eval()
            ctx.evaluate(score, range(8), batch_size=2)  # type: ignore[arg-type]
            model.train(before)
        learn(ctx, model, optimizer)
    return weights(model), model.training


def test_a_stop_in_an_evaluation_saves_the_modes_that_the_step_began_with(tmp_path: Path) -> None:
    uninterrupted = attempt(1, tmp_path / "whole", evaluating_in_between, False)
    assert attempt(1, tmp_path / "stopped", evaluating_in_between, True) == [STOPPED]
    assert attempt(1, tmp_path / "stopped", evaluating_in_between, False) == uninterrupted


def validating_on_rank_0(ctx: Any, stop: bool) -> Any:
    """Rank 0 alone is in evaluation mode at the end of a step, as is usual, and the others are not."""
    model = ctx.parallelize(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(6):
        if step % 3 == 0:
            model.train()
        learn(ctx, model, optimizer)
        if ctx.is_main:
            model.eval()
        if stop:
            stop_after(ctx, 1)
    return weights(model), model.training


def test_a_rank_may_be_in_another_mode_than_the_others(tmp_path: Path) -> None:
    uninterrupted = attempt(2, tmp_path / "whole", validating_on_rank_0, False, config="checkpoint: {every: 2}")
    assert uninterrupted[1][1] and not uninterrupted[0][1]
    assert attempt(2, tmp_path / "stopped", validating_on_rank_0, True) == [STOPPED] * 2
    assert attempt(2, tmp_path / "stopped", validating_on_rank_0, False) == uninterrupted


def in_epochs(ctx: Any, stop_at: int | None) -> Any:
    """Frozen at the beginning of an epoch, which an attempt that begins in the middle of it does before its loop."""
    model = ctx.parallelize(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    steps = ctx.steps(9)
    for epoch in range(ctx.step // 3, 3):
        if epoch == 1:
            unwrapped(model).backbone.requires_grad_(False)
        for _ in islice(steps, 3 * (epoch + 1) - ctx.step):
            learn(ctx, model, optimizer)
            if stop_at is not None:
                stop_after(ctx, stop_at)
    for _ in steps:
        pass
    return weights(model)


def test_what_was_frozen_two_attempts_ago_is_frozen(tmp_path: Path) -> None:
    uninterrupted = attempt(1, tmp_path / "whole", in_epochs, None)
    for step in (3, 6):
        assert attempt(1, tmp_path / "stopped", in_epochs, step) == [STOPPED]
    assert attempt(1, tmp_path / "stopped", in_epochs, None) == uninterrupted


def of_each_rank(ctx: Any, stop: bool) -> Any:
    model = Net()
    with torch.no_grad():
        model.head.weight.add_(ctx.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(per_rank={"model": model, "optimizer": optimizer})
    for step in ctx.steps(6):
        if step == 1:
            model.backbone[0].requires_grad_(False)
            model.backbone[1].eval()
        learn(ctx, model, optimizer)
        if stop:
            stop_after(ctx, 3)
    return weights(model)


def test_the_modes_of_a_module_that_each_rank_has_for_itself_go_on_too(tmp_path: Path) -> None:
    uninterrupted = attempt(2, tmp_path / "whole", of_each_rank, False)
    assert attempt(2, tmp_path / "stopped", of_each_rank, True) == [STOPPED] * 2
    assert attempt(2, tmp_path / "stopped", of_each_rank, False) == uninterrupted


def unfrozen_after_an_evaluation(ctx: Any) -> bool:
    model: Any = ctx.parallelize(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(1):
        ctx.evaluate(lambda batch, ids: model(batch.float().expand(2, len(ids)).T)[:, 0], range(4), batch_size=2)
        model[0].requires_grad_(True)
        model(torch.ones(1, 2)).sum().backward()
        found = model[0].weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_sharded_parameters_are_the_models_own_after_an_evaluation(tmp_path: Path) -> None:
    config = "parallel: {data: zero2}"
    assert attempt(2, tmp_path, unfrozen_after_an_evaluation, config=config) == [True, True]


def unfrozen_from(ctx: Any, first: int, stop: bool) -> Any:
    torch.manual_seed(0)
    model = ctx.parallelize(Net())
    unwrapped(model).backbone.requires_grad_(ctx.step >= first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(6):
        if step == first:
            unwrapped(model).backbone.requires_grad_(True)
        learn(ctx, model, optimizer)
        if stop:
            stop_after(ctx, first - 1)
    return weights(model)


def test_what_is_unfrozen_where_a_run_was_stopped_need_not_be_in_its_checkpoint(tmp_path: Path) -> None:
    trainable = "checkpoint: {weights: trainable}"
    uninterrupted = attempt(1, tmp_path / "whole", unfrozen_from, 3, False, config=trainable)
    assert attempt(1, tmp_path / "stopped", unfrozen_from, 3, True, config=trainable) == [STOPPED]
    assert attempt(1, tmp_path / "stopped", unfrozen_from, 3, False, config=trainable) == uninterrupted


class Counting(Net):
    """Has state in attributes of all kinds, which its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self._calls, self.seen, self.sum, self.limit = 0, [], torch.zeros(1), None
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        self.seen: list[int] = [*self.seen, self._calls]
        self.sum = self.sum + x[0, 0]
        self.limit: int | None = None if self.limit else self._calls
        drawn = torch.rand((), generator=self.generator)
        return super().forward(x) * (len(self.seen) + self.sum + (self.limit or 0) + drawn)  # type: ignore[no-any-return]


def counting(ctx: Any, stop_at: int | None = None) -> Any:
    model = ctx.parallelize(Counting())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(8):
        learn(ctx, model, optimizer)
        if stop_at is not None:
            stop_after(ctx, stop_at)
    return weights(model)


def with_schedules(ctx: Any, stop_at: int | None = None) -> Any:
    """Attributes that the loop changes: dropout's, a temperature, and one that is each rank's own."""
    net: Any = Net()
    net.temperature, net.seen = 1.0, 0
    model = ctx.parallelize(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    model.train()
    for step in ctx.steps(8):
        loss = (model(torch.arange(16.0).view(4, 4).sin()) / net.temperature).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        net.temperature *= 0.9
        net.backbone[2].p += 0.05
        if step == 2:
            net.seen += 1 - ctx.rank
        if stop_at is not None:
            stop_after(ctx, stop_at)
    return weights(model), net.temperature, net.backbone[2].p, net.seen


@pytest.mark.parametrize("train", [counting, with_schedules], ids=lambda one: one.__name__)
@pytest.mark.parametrize("ranks", [1, 2])
def test_attributes_of_modules_that_the_training_changes_go_on(tmp_path: Path, ranks: int, train: Any) -> None:
    uninterrupted = attempt(ranks, tmp_path / "whole", train)
    for step in (4, 5):
        assert attempt(ranks, tmp_path / "stopped", train, step) == [STOPPED] * ranks
    assert attempt(ranks, tmp_path / "stopped", train) == uninterrupted


def test_another_number_of_ranks_goes_on_with_the_first_ranks_attributes(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, with_schedules, 4) == [STOPPED] * 2
    [(_, temperature, dropout, seen)] = attempt(1, tmp_path, with_schedules)
    assert (temperature, dropout) == (pytest.approx(0.9**8), pytest.approx(0.9)) and seen == 1


def decaying(ctx: Any, stop_at: int | None = None) -> Any:
    """What each epoch begins with is done again where one is continued in its middle."""
    net: Any = Net()
    net.temperature = 1.0
    model = ctx.parallelize(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in ctx.epochs(3, model=model, optimizer=optimizer):
        net.temperature *= 0.8
        for _ in ctx.batches(DataLoader(TensorDataset(torch.zeros(4)))):
            learn(ctx, model, optimizer)
            if stop_at is not None:
                stop_after(ctx, stop_at)
    return net.temperature


@pytest.mark.parametrize(("first", "then"), [(1, 1), (1, 2), (2, 2)])
def test_an_attribute_that_an_epoch_s_first_lines_change_is_changed_once(tmp_path: Path, first: int, then: int) -> None:
    assert attempt(first, tmp_path, decaying, 6) == [STOPPED] * first
    assert attempt(then, tmp_path, decaying) == [pytest.approx(0.8**3)] * then
