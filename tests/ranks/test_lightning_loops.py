"""What Lightning's loops can be in the middle of, stopped there by real signals and continued in another attempt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from jobkit.lightning import JobkitCallback

YAML = "seed: null\ncheckpoint: {every: 4}\n"


class Numbers(Dataset[torch.Tensor]):
    """Samples that are augmented with every kind of random numbers."""

    def __init__(self, length: int) -> None:
        self.data = torch.randn(length, 6, generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = self.data[index] + 0.1 * torch.randn(6)
        return (sample.flip(0) if random.random() < 0.5 else sample) * float(np.random.rand() + 0.5)


class Stream(IterableDataset[torch.Tensor]):
    """The same, without numbers or a length."""

    def __iter__(self) -> Any:
        numbers = Numbers(44)
        for index in torch.randperm(44).tolist():
            yield numbers[index]


class Net(L.LightningModule):
    """Keeps what scripts keep: a list of losses, a metric, sums of self.log."""

    def __init__(self, ctx: Any, stops: tuple[int, ...], by_hand: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 6)
        )
        self.mean = MeanMetric()
        self.losses: list[float] = []
        self.curve: list[tuple[int, float]] = []
        self._ctx, self._stops = ctx, stops
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        batch = torch.cat(list(batch.values())) if isinstance(batch, dict) else batch
        loss = (self.layers(batch) - batch).square().mean()
        if not self.automatic_optimization:  # its gradients are cleared before they are added to, and not after
            optimizer: Any = self.optimizers()
            if number % 3 == 0:
                optimizer.zero_grad()
            self.manual_backward(loss)
            if number % 3 == 1:
                optimizer.step()
        self.losses.append(loss.item())
        self.curve.append((self.trainer.global_step, loss.item()))
        self.mean(loss.detach())
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.mean, on_epoch=True)
        for stop in self._stops:
            stop_after(self._ctx, stop)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("of_list", float(np.mean(self.losses)))
        self.losses.clear()

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", (self.layers(batch) - batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.automatic_optimization:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Growing(L.LightningDataModule):
    """More samples with each time that it is asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return DataLoader(Numbers(20 + 8 * self.asked), 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(8), 4)


def loaders(kind: str, ranks: int) -> Any:
    """The training's loader of a kind."""
    generator = torch.Generator().manual_seed(3)
    if kind == "stream":
        return DataLoader(Stream(), 4)
    if kind == "workers":
        return DataLoader(
            Numbers(44 * ranks), 4, shuffle=True, generator=generator, num_workers=2, persistent_workers=True
        )
    first = DataLoader(Numbers(44 * ranks), 4, shuffle=True)
    return {"a": first, "b": DataLoader(Numbers(16), 4, shuffle=True)} if kind == "two loaders" else first


def fit(ctx: Any, kind: str, options: dict[str, Any], stops: tuple[int, ...]) -> Any:
    """The run's end: weights, optimizer, and the last values that were logged."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    job = JobkitCallback(ctx)
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=ctx.world_size,
        strategy="ddp" if ctx.world_size > 1 else "auto",
        callbacks=[job, EarlyStopping("val_loss", patience=4)],
        logger=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Net(ctx, stops, by_hand=kind == "by hand")
    if kind == "by hand":
        trainer.fit(model, datamodule=Growing(), ckpt_path=job.checkpoint)
    else:
        trainer.fit(model, loaders(kind, ctx.world_size), DataLoader(Numbers(8), 4), ckpt_path=job.checkpoint)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found = [*model.state_dict().values(), *trainer.optimizers[0].state_dict()["state"].values()]
    return trainer.global_step, [_plain(one) for one in found], logged, model.curve


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "accumulation and validation within epochs": (1, "plain", {"accumulate_grad_batches": 2, "val_check_interval": 5}),
    "steps by hand, validation every second epoch, loaders made anew": (
        *(1, "by hand"),
        {"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1},
    ),
    "workers that stay": (1, "workers", {}),
    "a stream": (1, "stream", {}),
    "two loaders of different lengths": (1, "two loaders", {}),
    "two ranks": (2, "plain", {"val_check_interval": 0.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(tmp_path: Path, case: str) -> None:
    ranks, kind, options = CASES[case]
    whole = attempt(ranks, tmp_path / "whole", fit, kind, options, (), config=YAML)
    steps, runs = whole[0][0], tmp_path / "stopped"
    for stop in (3, steps // 2 + 1) if case == "two ranks" else (steps // 2 + 1,):
        assert attempt(ranks, runs, fit, kind, options, (stop,), config=YAML) == [STOPPED] * ranks
    assert attempt(ranks, runs, fit, kind, options, (), config=YAML) == whole


def test_on_another_number_of_ranks_an_epoch_begins_anew(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, fit, "plain", {}, (3,), config=YAML) == [STOPPED] * 2
    ends = attempt(3, tmp_path, fit, "plain", {}, (), config=YAML)
    assert [steps for steps, *_ in ends] == [4 + 4 * 11] * 3
