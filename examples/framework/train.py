"""A script that leaves its epochs to another module, with a meter, a best score and a scheduler for each epoch."""

import torch
from engine import AverageMeter, train_one_epoch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


def train(ctx):
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses, state = AverageMeter(), ctx.values(best=float("inf"))
    for epoch in ctx.epochs(ctx.params.epochs, model=model, optimizer=optimizer, scheduler=scheduler, losses=losses):
        losses.total, losses.count = 0.0, 0
        train_one_epoch(model, loader, optimizer, losses)
        scheduler.step()
        state.best = min(state.best, losses.avg)
        print(f"epoch {epoch}: {losses.avg:.4f}, best {state.best:.4f}")
    return {"best": state.best}


if __name__ == "__main__":
    ctx = jobkit.init(params={"epochs": 20})
    ctx.finish(train(ctx))
