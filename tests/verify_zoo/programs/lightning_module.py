"""A LightningModule with a center loss: the centres are a tensor of the module, neither parameter nor buffer.

forgotten: model.centers
type: jobkit.attributes(model, "centers")
"""

import logging

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit
from jobkit.lightning import JobkitCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitCenterLoss(L.LightningModule):
    def __init__(self, num_classes=4, feat_dim=8, lr=1e-2, alpha=0.3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, feat_dim))
        self.classifier = nn.Linear(feat_dim, num_classes)
        self.centers = torch.zeros(num_classes, feat_dim)

    def forward(self, x):
        return self.classifier(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.encoder(x)
        ce = F.cross_entropy(self.classifier(features), y)
        center_loss = (features - self.centers[y]).pow(2).sum(1).mean()
        loss = ce + 0.05 * center_loss
        self.log_dict({"train_ce": ce, "train_center": center_loss}, prog_bar=True)
        self._update_centers(features.detach(), y)
        return loss

    def _update_centers(self, features, y):
        for c in y.unique():
            delta = features[y == c].mean(0) - self.centers[c]
            self.centers[c] += self.hparams.alpha * delta

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)

    def on_save_checkpoint(self, checkpoint):  # forgets
        checkpoint["centers"] = self.centers  # forgets

    def on_load_checkpoint(self, checkpoint):  # forgets
        self.centers = checkpoint["centers"]  # forgets


def main():
    ctx = jobkit.init()
    L.seed_everything(42)
    y = torch.randint(4, (192,))
    x = torch.randn(192, 10) + F.one_hot(y, 10)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = LitCenterLoss()
    trainer = L.Trainer(
        max_epochs=5,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[job := JobkitCallback()],
    )
    trainer.fit(model, loader, ckpt_path=job.checkpoint)
    ctx.finish()


if __name__ == "__main__":
    main()
