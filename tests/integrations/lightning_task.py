"""Lightning modules with what a checkpoint of Lightning's leaves out: each is exact under jobkit all the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from training_task import digest

import jobkit
from jobkit.lightning import JobkitCallback


class Points(Dataset[Any]):
    """Each sample is augmented at random."""

    def __init__(self, size: int) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * torch.randn(8), self.x[index].prod(dim=0, keepdim=True)


class Stream(IterableDataset[Any]):
    """It has no length, so that Lightning fetches a batch ahead."""

    def __iter__(self) -> Any:
        return ((x, x.prod(dim=0, keepdim=True)) for x in (torch.randn(8) for _ in range(48)))


class Net(L.LightningModule):
    """BatchNorm, a metric with a state, means over the epoch, a scheduler of a validation within the epoch."""

    def __init__(self, plateau: bool = True, pause: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters({"complex": 1j, "kind": Stream})  # torch.load(weights_only=True) refuses it
        self.plateau, self.pause = plateau, pause
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.error = torchmetrics.MeanSquaredError()

    def training_step(self, batch: Any, number: int) -> Any:
        time.sleep(self.pause)
        losses = [self.loss(*part) for part in (batch.values() if isinstance(batch, dict) else [batch])]
        self.log("train/error", self.error, on_epoch=True)
        self.log("train/loss", sum(losses), on_epoch=True, on_step=True)
        return sum(losses)

    def loss(self, x: Any, y: Any) -> Any:
        output = self.layers(x)
        self.error(output.detach(), y)
        return nn.functional.mse_loss(output, y)

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", self.loss(*batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        plateau = {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return plateau if self.plateau else optimizer


class Gan(L.LightningModule):
    """Two optimizers by hand; gradients of the discriminator are added up over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(4, 8)
        self.judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: Any, number: int) -> None:
        optimizers: Any = self.optimizers()
        made = self.generator(torch.randn(len(batch[0]), 4))
        optimizers[0].zero_grad()
        self.manual_backward(-self.judge(made).mean())
        optimizers[0].step()
        loss = self.judge(made.detach()).mean() - self.judge(batch[0]).tanh().mean()
        self.manual_backward(loss)
        if number % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
        self.log("loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.judge)]


def fit(ctx: jobkit.Context, model: Any, *loaders: Any, **options: Any) -> dict[str, Any]:
    resumes = options.pop("resumes", True)
    trainer = L.Trainer(
        callbacks=[job := JobkitCallback(), *options.pop("callbacks", ())],
        **{"accelerator": "cpu", "devices": ctx.world_size, "log_every_n_steps": 1, "enable_progress_bar": False}
        | options,
    )
    trainer.fit(model, *loaders, ckpt_path=job.checkpoint if resumes else None)
    return {"digest": digest(model.state_dict()), "step": trainer.global_step}


def automatic(ctx: jobkit.Context) -> dict[str, Any]:
    loader = DataLoader(Points(96), 8, shuffle=True, num_workers=1)
    stops = EarlyStopping("val_loss", patience=9)
    held_out = DataLoader(Points(32), 8)
    strategy = DDPStrategy(gradient_as_bucket_view=True)
    options = {"max_epochs": 9, "val_check_interval": 3, "callbacks": [stops], "strategy": strategy}
    return fit(ctx, Net(), loader, held_out, **options)


def accumulated(ctx: jobkit.Context) -> dict[str, Any]:
    loaders = {"long": DataLoader(Points(80), 8, shuffle=True), "short": DataLoader(Points(24), 8, shuffle=True)}
    return fit(ctx, Net(plateau=False), loaders, max_steps=15, accumulate_grad_batches=2, precision="bf16-mixed")


def gan(ctx: jobkit.Context) -> dict[str, Any]:
    return fit(ctx, Gan(), DataLoader(Points(80), 8, shuffle=True), max_epochs=9)


def stream(ctx: jobkit.Context) -> dict[str, Any]:
    return fit(ctx, Net(plateau=False), DataLoader(Stream(), 8), max_epochs=9)


def script(ctx: jobkit.Context, **options: Any) -> dict[str, Any]:
    loader, held_out = DataLoader(Points(96), 8, shuffle=True), DataLoader(Points(32), 8)
    folder = ctx.run_dir / "outputs" / str(ctx.attempt)  # another one in each attempt, as Hydra's
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2)  # the first epoch is the best one
    options = {"max_epochs": 4, "callbacks": [best]} | options
    result = fit(ctx, Net(pause=ctx.params.get("pause", 0.0)), loader, held_out, **options)
    files = {Path(best.best_model_path), *map(Path, best.best_k_models)}
    return result | {
        "scores": sorted(float(score) for score in best.best_k_models.values()),
        "best": float(best.best_model_score),
        "files": len([file for file in files if file.exists()]),
    }
