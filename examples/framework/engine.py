"""The part of a project that other scripts share: one epoch, and its meters. No context is passed through."""

import torch
from torch import nn

import jobkit


class AverageMeter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total, self.count = self.total + value * n, self.count + n

    @property
    def avg(self):
        return self.total / max(1, self.count)

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


def train_one_epoch(model, loader, optimizer, losses):
    ctx = jobkit.current()
    model.train()
    for x, y in ctx.batches(loader):
        loss = nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), len(x))
        ctx.log({"train/loss": loss, "train/average": losses.avg})
