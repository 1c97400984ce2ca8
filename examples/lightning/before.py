"""A script of PyTorch Lightning."""

import argparse

import lightning as L
import torch
from torch import nn


class Net(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x + 0.1 * torch.randn_like(x)), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, number):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def make_loader(samples, seed, **options):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    data = torch.utils.data.TensorDataset(x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=16, **options)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    L.seed_everything(1)
    model = Net(args.lr)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp",
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(model, make_loader(192, 1, shuffle=True), make_loader(64, 2))
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
