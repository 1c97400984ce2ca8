"""A LightningModule and its Trainer: validation within the epoch, a plateau scheduler, early stopping."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit
from jobkit.lightning import JobkitCallback


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x + 0.1 * torch.randn_like(x)), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def make_loader(samples, **options):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(samples))
    return DataLoader(TensorDataset(x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)), batch_size=16, **options)


def train(ctx):
    trainer = L.Trainer(
        max_epochs=ctx.params.epochs,
        callbacks=[EarlyStopping("val_loss", patience=9), job := JobkitCallback()],
        accelerator="cpu",
        devices=ctx.world_size,
        log_every_n_steps=1,
        val_check_interval=0.5,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), make_loader(192, shuffle=True), make_loader(64), ckpt_path=job.checkpoint)


if __name__ == "__main__":
    ctx = jobkit.init(params={"epochs": 20})
    ctx.finish(train(ctx))
