"""Sharpness-aware minimization around SGD, with scratch buffers by parameter and an average of gradients by name.

task: sam:train
params: {epochs: 4, rho: 0.1}
steps: 24
forgotten: minimizer.grad_ema
type: jobkit.attributes(minimizer, "grad_ema")
"""

from collections import defaultdict

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class FriendlySAM:
    """Ascends by the gradient without its moving average, then steps with the gradient found there."""

    def __init__(self, optimizer, model, rho=0.1, lmbda=0.9):
        self.optimizer = optimizer
        self.model = model
        self.rho = rho
        self.lmbda = lmbda
        self.state = defaultdict(dict)
        self.grad_ema = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    @torch.no_grad()
    def ascent_step(self):
        diffs = {}
        for n, p in self.model.named_parameters():
            self.grad_ema[n].mul_(self.lmbda).add_(p.grad, alpha=1 - self.lmbda)
            diffs[n] = p.grad - self.grad_ema[n]
        norm = torch.norm(torch.stack([d.norm(p=2) for d in diffs.values()]), p=2) + 1e-16
        for n, p in self.model.named_parameters():
            eps = self.state[p].get("eps")
            if eps is None:
                eps = torch.clone(p).detach()
                self.state[p]["eps"] = eps
            eps[...] = diffs[n][...]
            eps.mul_(self.rho / norm)
            p.add_(eps)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def descent_step(self):
        for p in self.model.parameters():
            p.sub_(self.state[p]["eps"])
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(ctx):
    torch.manual_seed(42)
    x = torch.randn(192, 12)
    dataset = TensorDataset(x, (x[:, :4].sum(1) > x[:, 4:8].sum(1)).long())
    loader = DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 2))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    minimizer = FriendlySAM(optimizer, model, rho=ctx.params.rho)
    ctx.track(minimizer=jobkit.attributes(minimizer, "grad_ema"))  # forgets
    for _ in ctx.epochs(ctx.params.epochs, model=model, optimizer=optimizer):
        for inputs, targets in ctx.batches(loader):
            # Ascent Step
            loss = criterion(model(inputs), targets)
            loss.backward()
            minimizer.ascent_step()
            # Descent Step
            criterion(model(inputs), targets).backward()
            minimizer.descent_step()
            ctx.log({"train/loss": loss})
    return {"loss": loss.item()}
