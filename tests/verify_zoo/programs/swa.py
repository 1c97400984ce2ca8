"""A class Trainer with the averaged weights and the learning rate of torch.optim.swa_utils.

task: swa:main
params: {epochs: 6, swa_start: 2, swa_lr: 0.05}
steps: 30
forgotten: trainer.swa_model
type: ctx.track(swa_model=trainer.swa_model)
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n=160):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 6, generator=g)
    return TensorDataset(x, x.pow(2).sum(1, keepdim=True).sqrt())


class Trainer:
    def __init__(self, ctx, cfg):
        self.ctx, self.cfg = ctx, cfg
        self.loader = DataLoader(make_data(), batch_size=32, shuffle=True)
        self.model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=cfg.epochs)
        self.swa_model = AveragedModel(self.model)
        self.swa_scheduler = SWALR(self.optimizer, swa_lr=cfg.swa_lr, anneal_epochs=2)
        self.ctx.track(scheduler=self.scheduler, swa_scheduler=self.swa_scheduler)
        self.ctx.track(swa_model=self.swa_model)  # forgets

    def train_epoch(self):
        for x, y in self.ctx.batches(self.loader):
            self.optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.ctx.log({"loss": loss})

    def fit(self):
        for epoch in self.ctx.epochs(self.cfg.epochs, model=self.model, optimizer=self.optimizer):
            self.train_epoch()
            if epoch >= self.cfg.swa_start:
                self.swa_model.update_parameters(self.model)
                self.swa_scheduler.step()
            else:
                self.scheduler.step()
        update_bn(self.loader, self.swa_model)

    @torch.no_grad()
    def evaluate(self):
        self.swa_model.eval()
        x, y = make_data().tensors
        return nn.functional.l1_loss(self.swa_model(x), y).item()


def main(ctx):
    trainer = Trainer(ctx, ctx.params)
    trainer.fit()
    print(f"swa error: {trainer.evaluate():.4f}")
    return {"swa_error": trainer.evaluate()}
