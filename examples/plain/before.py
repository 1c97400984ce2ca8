"""A plain DDP script: argparse, DistributedSampler, an average of the weights, a plateau scheduler, a best score."""

import argparse
import copy
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


def make_data(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 8, generator=generator)
    data = TensorDataset(x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True))
    return random_split(data, [192, 64], generator)


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    errors = [(model(x) - y).square() for x, y in loader]
    return torch.cat(errors).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(args.seed + dist.get_rank())
    train_set, val_set = make_data(args.seed)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size=64)

    model = DistributedDataParallel(make_model())
    ema = copy.deepcopy(model.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    best = {"loss": math.inf, "epoch": -1}

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for average, parameter in zip(ema.parameters(), model.parameters(), strict=True):
                    average.lerp_(parameter, 0.05)
        val_loss = evaluate(ema, val_loader)
        scheduler.step(val_loss)
        if val_loss < best["loss"]:
            best.update(loss=val_loss, epoch=epoch)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: validation loss {val_loss:.4f}, best {best['loss']:.4f} in epoch {best['epoch']}")

    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "ema": ema.state_dict(), "best": best}, "weights.pt")


if __name__ == "__main__":
    main()
