"""A script with argparse: the best accuracy and its weights in a dict, which the last lines load and test.

command: [python, best_metric.py, "--epochs=${params.epochs}", "--lr=0.5"]
params: {epochs: 6}
forgotten: best
type: ctx.values(best=best)
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import jobkit


def get_args():
    parser = argparse.ArgumentParser(description="tiny classifier")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


@torch.no_grad()
def test(model, loader):
    model.eval()
    correct = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return correct / len(loader.dataset)


args = get_args()
ctx = jobkit.init(params=vars(args))
torch.manual_seed(args.seed)

points = torch.rand(320, 2) * 2 - 1
labels = (points.norm(dim=1) * 3).long().clamp(max=2) ^ (torch.rand(320) < 0.2).long()
train_set, val_set = random_split(TensorDataset(points, labels), [192, 128])
train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size=128)

model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
best = {"acc": 0.0, "epoch": -1, "weights": None}
best = ctx.values(best=best).best  # forgets

for epoch in ctx.epochs(args.epochs, model=model, optimizer=optimizer):
    for x, y in ctx.batches(train_loader):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss})
    acc = test(model, val_loader)
    print(f"epoch {epoch}: val acc {acc:.3f}")
    if acc > best["acc"]:
        best.update(acc=acc, epoch=epoch, weights=copy.deepcopy(model.state_dict()))

model.load_state_dict(best["weights"])
ctx.finish({"best_acc": best["acc"], "best_epoch": best["epoch"], "test_acc": test(model, val_loader)})
