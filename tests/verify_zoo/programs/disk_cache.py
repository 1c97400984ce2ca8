"""Replays features of earlier batches: the tensors lie on the disk, the list of what is there in memory.

task: disk_cache:main
params: {epochs: 3, capacity: 24}
steps: 24
forgotten: memory.entries
type: jobkit.attributes(memory, "entries"
"""

import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class FeatureMemory:
    """Old features in files, and a reservoir of their names and labels."""

    def __init__(self, root, capacity):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self.capacity = capacity
        self.entries = []
        self.n_seen = 0

    def add(self, key, feature, label):
        self.n_seen += 1
        if len(self.entries) < self.capacity:
            slot = len(self.entries)
            self.entries.append((key, label))
        else:
            slot = random.randrange(self.n_seen)
            if slot >= self.capacity:
                return
            self.entries[slot] = (key, label)
        torch.save(feature, self.root / f"{key}.pt")

    def sample(self, k):
        chosen = random.sample(self.entries, min(k, len(self.entries)))
        features = torch.stack([torch.load(self.root / f"{key}.pt") for key, _ in chosen])
        return features, torch.tensor([label for _, label in chosen])

    def __len__(self):
        return len(self.entries)


def main(ctx):
    torch.manual_seed(7)
    x = torch.randn(64, 16)
    loader = DataLoader(TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long()), batch_size=8, shuffle=True)
    backbone = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).requires_grad_(False)
    head = nn.Linear(16, 2)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.05)
    memory = FeatureMemory(ctx.run_dir / "outputs" / "features", ctx.params.capacity)
    ctx.track(memory=jobkit.attributes(memory, "entries", "n_seen"))  # forgets

    for epoch in ctx.epochs(ctx.params.epochs, head=head, backbone=backbone, optimizer=optimizer):
        for x, y in ctx.batches(loader):
            feats = backbone(x)
            loss = nn.functional.cross_entropy(head(feats), y)
            if len(memory):
                old, old_y = memory.sample(8)
                loss = loss + 0.5 * nn.functional.cross_entropy(head(old), old_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            memory.add(f"{epoch}_{ctx.step}", feats[0].clone(), int(y[0]))
            ctx.log({"loss": loss})
    return {"loss": loss.item(), "memory": len(memory)}
