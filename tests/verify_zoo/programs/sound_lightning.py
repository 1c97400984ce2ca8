"""Lightning: callbacks that count and measure, an own progress bar, a module that remembers its last outputs.

task: sound_lightning:train
params: {epochs: 3}
steps: 24
"""

import time

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from jobkit.lightning import JobkitCallback


class Throughput(Callback):
    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.batches_seen = 0
        self.window = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.t0 = time.monotonic()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches_seen += 1
        self.window = [*self.window[-9:], time.monotonic() - self.t0]

    def on_train_end(self, trainer, pl_module):
        print(f"{self.batches_seen} batches, {self.batch_size * len(self.window) / sum(self.window):.0f} samples/s")


class LossBar(TQDMProgressBar):
    smoothed = None

    def get_metrics(self, trainer, pl_module):
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        loss = trainer.callback_metrics.get("train_loss")
        if loss is not None:
            self.smoothed = loss if self.smoothed is None else 0.8 * self.smoothed + 0.2 * loss
            items["smooth"] = float(self.smoothed)
        return items


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12))
        self.val_outputs = []
        self.last_z = None
        self.sanity_done = False

    def training_step(self, batch, batch_idx):
        (x,) = batch
        self.last_z = self.encoder(x)
        loss = nn.functional.mse_loss(self.decoder(self.last_z), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.val_outputs.append(nn.functional.l1_loss(self.decoder(self.encoder(x)), x))

    def on_validation_epoch_end(self):
        self.log("val_l1", torch.stack(self.val_outputs).mean())
        self.val_outputs.clear()
        self.sanity_done = True

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def train(ctx):
    data = torch.randn(112, 3) @ torch.randn(3, 12)
    train_loader = DataLoader(TensorDataset(data[:80]), batch_size=10, shuffle=True)
    val_loader = DataLoader(TensorDataset(data[80:]), batch_size=16)
    job = JobkitCallback()
    trainer = L.Trainer(
        max_epochs=ctx.params.epochs,
        accelerator="cpu",
        devices=ctx.world_size,
        log_every_n_steps=1,
        callbacks=[job, Throughput(batch_size=10), LossBar(refresh_rate=5)],
        enable_model_summary=False,
    )
    trainer.fit(LitAutoEncoder(), train_loader, val_loader, ckpt_path=job.checkpoint)
    return {"val_l1": trainer.callback_metrics["val_l1"].item()}
