"""A curriculum: sums of longer and longer lists, as soon as the average loss of the present length is low enough.

task: curriculum:run
params: {iterations: 60, batch: 64, threshold: 0.6}
forgotten: progress
type: ctx.track(progress=jobkit.attributes(progress,
"""

from dataclasses import dataclass

import torch
from torch import nn

import jobkit

MAX_LENGTH = 12


@dataclass
class Progress:
    """How far the curriculum is."""

    length: int = 1
    average: float = 1.0

    def update(self, loss, threshold, decay=0.7):
        self.average = decay * self.average + (1 - decay) * loss
        if self.average < threshold and self.length < MAX_LENGTH:
            self.length += 1
            self.average = 1.0  # harder from here on


class SumNet(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x):
        return self.out(self.rnn(x[..., None])[0][:, -1]).squeeze(1)


def make_batch(size, length):
    x = torch.randn(size, length)
    return x, x.sum(1) / length**0.5


def run(ctx):
    cfg = ctx.params
    net = SumNet()
    opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
    progress = Progress()
    ctx.track(net=net, opt=opt)
    ctx.track(progress=jobkit.attributes(progress, "length", "average"))  # forgets

    for it in ctx.steps(cfg.iterations):
        x, y = make_batch(cfg.batch, progress.length)
        loss = nn.functional.smooth_l1_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        before = progress.length
        progress.update(loss.item(), cfg.threshold)
        if progress.length > before:
            print(f"iteration {it}: now lists of {progress.length}")
        ctx.log({"loss": loss})
    return {"length": progress.length}
