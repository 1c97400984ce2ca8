"""A script's own validation, whose workers outlive a pass: interrupted anywhere, the run goes on as without a stop."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from torch.utils.data import DataLoader, Dataset, get_worker_info

SEED = "seed: null\n"


class Noisy(Dataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        worker = get_worker_info()
        seed = worker.seed % 1000 if worker is not None else 0
        return torch.tensor(index + random.random() + float(torch.rand(())) + seed, dtype=torch.float64)


def kept(samples: int) -> DataLoader[Any]:
    return DataLoader(Noisy(samples), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True)


def train(ctx: Any, when: str, stop_at: int | None = None) -> Any:
    random.seed(3)
    torch.manual_seed(3)
    model, training, validation = torch.nn.Linear(1, 1), DataLoader(Noisy(9), batch_size=3, shuffle=True), kept(6)
    values = ctx.values(history=[])
    later = kept(7)
    if when == "before the first step" and ctx.step == 0:
        values.history.append([one.tolist() for one in validation])
    for epoch in ctx.epochs(4, model=model):
        if when == "a new loader each epoch":
            validation = kept(6)
        if when == "at the top":
            values.history.append(([one.tolist() for one in validation], random.random(), float(torch.rand(()))))
        for batch in ctx.batches(training):
            values.history.append((batch.tolist(), float(torch.rand(()))))
            if when == "in the middle" and ctx.batch % 2:
                values.history.append([one.tolist() for one in validation])
            if stop_at is not None:
                stop_after(ctx, stop_at)
        if when == "left early":
            values.history.append(next(iter(validation)).tolist())
        elif when == "two loaders":
            for loader in (validation, later) if epoch else (validation,):
                values.history.append([one.tolist() for one in loader])
        else:
            values.history.append([one.tolist() for one in validation])
    return values.history


@pytest.mark.parametrize(
    "when",
    [
        "at the end",
        "at the top",
        "in the middle",
        "left early",
        "two loaders",
        "a new loader each epoch",
        "before the first step",
    ],
)
def test_a_validation_with_kept_workers_goes_on(tmp_path: Path, when: str) -> None:
    [whole] = attempt(1, tmp_path / "whole", train, when, config=SEED)
    for stop in (1, 5, 7):
        assert attempt(1, tmp_path / "runs", train, when, stop, config=SEED) == [STOPPED]
    assert attempt(1, tmp_path / "runs", train, when, config=SEED) == [whole]


def validate(ctx: Any) -> tuple[int, int]:
    """Batches that live after their passes, and loaders that do."""
    batches, loaders = [], []
    for _ in ctx.epochs(3, model=torch.nn.Linear(1, 1)):
        for _ in ctx.batches(DataLoader(Noisy(6), batch_size=3)):
            pass
        validation = kept(12)
        loaders.append(weakref.ref(validation.dataset))
        batches += [weakref.ref(one) for one in validation]
        del validation
        gc.collect()
    return sum(one() is not None for one in batches), sum(one() is not None for one in loaders)


def test_neither_batches_nor_loaders_are_held(tmp_path: Path) -> None:
    [(batches, loaders)] = attempt(1, tmp_path, validate, config=SEED)
    assert batches == 0
    assert loaders <= 1  # the newest, until another begins
