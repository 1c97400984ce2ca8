"""The running loss of docs/adopting.md, interrupted in the middle of an epoch."""

from __future__ import annotations

import argparse
import math
import textwrap
from pathlib import Path
from typing import Any

import torch
from harness.attempts import STOPPED, attempt, stop_after
from harness.documents import ROOT, block
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

EXAMPLE = block(ROOT / "docs/adopting.md", "state.running_loss += loss.item()")
BATCHES = 6


def train(ctx: Any, file: Path, stop: int | None) -> Any:
    """What the example prints, and the bars that it shows: (first, last) of each."""
    bars: list[Any] = []
    printed: list[tuple[Any, ...]] = []

    def shown(*words: Any, **options: Any) -> Any:
        bars.append(tqdm(*words, **options, disable=False))
        return bars[-1]

    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    if stop is not None:
        model.register_forward_hook(lambda *_: stop_after(ctx, stop))
    x = torch.randn(4 * BATCHES, 4) + ctx.rank  # each rank has losses of its own
    names = {
        "args": argparse.Namespace(epochs=3),
        "model": ctx.parallelize(model),
        "train_loader": DataLoader(TensorDataset(x, x[:, :1]), batch_size=4, shuffle=True),
        "tqdm": shown,
        "print": lambda *words: printed.append(words),
        "ctx": ctx,
        "math": math,
        "nn": nn,
    }
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.01, momentum=0.9)
    exec(compile(f"def loop():\n{textwrap.indent(EXAMPLE, '    ')}", file, "exec"), names)  # type: ignore[call-overload]
    names["loop"]()
    return printed, [(bar.initial, bar.n) for bar in bars]


def test_a_running_loss_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"def loop():\n{textwrap.indent(EXAMPLE, '    ')}")
    whole = attempt(2, tmp_path / "whole", train, file, None)
    assert attempt(2, tmp_path / "runs", train, file, BATCHES + 1) == [STOPPED, STOPPED]
    continued = attempt(2, tmp_path / "runs", train, file, None)
    for (printed, bars), (before, _) in zip(continued, whole, strict=True):
        assert printed == before[1:] and len(printed) == 2
        assert bars == [(2, BATCHES), (0, BATCHES)]
    assert whole[0][0] != whole[1][0]


FOLDS, EPOCHS = 2, 2


def train_folds(ctx: Any, stop: int | None) -> Any:
    """The weights of each fold."""
    torch.manual_seed(3)
    x = torch.randn(16, 4)
    models = nn.ModuleList(nn.Linear(4, 1) for _ in range(FOLDS))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    tracked = {f"optimizer_{fold}": one for fold, one in enumerate(optimizers)}
    for n in ctx.epochs(FOLDS * EPOCHS, models=models, **tracked):
        fold, _ = divmod(n, EPOCHS)
        loader = DataLoader(TensorDataset(x[8 * fold : 8 * fold + 8]), batch_size=2, shuffle=True)
        for (one,) in ctx.batches(loader):
            if stop is not None:
                stop_after(ctx, stop)
            models[fold](one).square().mean().backward()
            optimizers[fold].step()
            optimizers[fold].zero_grad()
    return [value for weight in models.parameters() for value in weight.flatten().tolist()]


def test_folds_in_one_loop_go_on_where_they_stood(tmp_path: Path) -> None:
    (whole,) = attempt(1, tmp_path / "whole", train_folds, None)
    for stop in (5, 10):
        assert attempt(1, tmp_path / f"{stop}", train_folds, stop) == [STOPPED]
        assert attempt(1, tmp_path / f"{stop}", train_folds, None) == [whole]
