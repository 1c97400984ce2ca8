"""A script of a framework of one's own."""

import argparse

import torch
from framework import Trainer
from torch import nn


def make_batch(step, rank):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x + 0.1 * torch.randn(16, 8), (x[:, :4] * x[:, 4:]).sum(1, keepdim=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    trainer = Trainer(model, make_batch, args.steps, args.lr)
    trainer.fit()
    trainer.save("weights.pt")


if __name__ == "__main__":
    main()
