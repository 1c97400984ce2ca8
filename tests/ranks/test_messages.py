"""What a loop tells a person: when it says so, and whether the words fit the loop that the script has."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import attempt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from jobkit.worker import checkpoint_schedule


def make(ctx: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = ctx.parallelize(nn.Linear(3, 1))
    loader = DataLoader(TensorDataset(torch.ones(8, 3)), batch_size=4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader


# How often there are checkpoints


def train(ctx: Any, first: float, seconds: float) -> str:
    """Epochs of one step, for so long; the first checkpoint after `first` seconds."""
    checkpoint_schedule.FIRST_SECONDS = first  # type: ignore[misc]
    model, optimizer, loader = make(ctx)
    until = time.monotonic() + seconds
    for _ in ctx.epochs(100_000, model=model, optimizer=optimizer):
        for (x,) in ctx.batches(loader):
            model(x).sum().backward()
            optimizer.step()
            time.sleep(0.01)
        if time.monotonic() > until:
            break
    return "ok"


def test_how_often_there_are_checkpoints_is_told_only_while_there_will_be_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = r"a checkpoint every [\d.]+ s from here on: .* One failure in 8:00:00 is assumed until this run has had one"
    assert attempt(1, tmp_path / "short", train, 30.0, 0.1) == ["ok"]
    assert "a checkpoint every" not in capfd.readouterr().out
    assert attempt(1, tmp_path / "long", train, 0.0, 1.0) == ["ok"]
    assert re.search(line, capfd.readouterr().out)


# Words of the loop that the script has


def another_optimizer(ctx: Any) -> None:
    model, optimizer, loader = make(ctx)
    for epoch in ctx.epochs(4, model=model, optimizer=optimizer):
        if epoch == 2:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for (x,) in ctx.batches(loader):
            model(x).sum().backward()
            optimizer.step()


def folds(ctx: Any) -> None:
    for _ in range(2):
        model, optimizer, loader = make(ctx)
        for _ in ctx.epochs(2, model=model, optimizer=optimizer):
            for (x,) in ctx.batches(loader):
                model(x).sum().backward()
                optimizer.step()


def tracked_late(ctx: Any) -> None:
    for _ in ctx.epochs(2):
        ctx.track(model=nn.Linear(1, 1))


def values_late(ctx: Any) -> None:
    for _ in ctx.steps(2):
        ctx.values(best=0.0)


TOLD = [
    (another_optimizer, "give it to ctx.epochs, or to ctx.track, before the loop. Another is tracked: if this one is"),
    (folds, "one loop in a run, and ctx.epochs has begun one: a second would not know where it was resumed. For folds"),
    (tracked_late, "ctx.track comes before ctx.epochs: "),
    (values_late, "ctx.values comes before ctx.steps: "),
]


@pytest.mark.parametrize(("script", "told"), TOLD, ids=[script.__name__ for script, _ in TOLD])
def test_a_mistake_is_told_in_the_words_of_the_loop(tmp_path: Path, script: Any, told: str) -> None:
    (said,) = attempt(1, tmp_path, script)
    assert told in said
