"""A plain script: argparse, epochs, a cosine schedule with a warm-up that goes on by epochs.

forgotten: scheduler
type: ctx.track(scheduler=scheduler)
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit

parser = argparse.ArgumentParser(description="two moons, mlp")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=2)
args = parser.parse_args()

ctx = jobkit.init(params=vars(args))
torch.manual_seed(args.seed)


def two_moons(n):
    angle, label = torch.rand(n) * torch.pi, torch.randint(2, (n,))
    side = 1.0 - 2.0 * label
    points = torch.stack([angle.cos() * side + label, angle.sin() * side + 0.4 * label], dim=1)
    return TensorDataset(points + 0.1 * torch.randn(n, 2), label)


train_loader = DataLoader(two_moons(512), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(two_moons(128), batch_size=128)

model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - 2)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[2])
ctx.track(model=model, optimizer=optimizer)
ctx.track(scheduler=scheduler)  # forgets

for epoch in ctx.epochs(args.epochs):
    model.train()
    for batch_idx, (data, target) in enumerate(ctx.batches(train_loader), ctx.batch):
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss.item()})
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")

    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += (model(data).argmax(1) == target).sum().item()
    print(f"Test set: accuracy {correct}/{len(test_loader.dataset)}, lr {scheduler.get_last_lr()[0]:.4f}")
    scheduler.step()

ctx.finish({"accuracy": correct / len(test_loader.dataset)})
