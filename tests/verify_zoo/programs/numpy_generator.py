"""Mixup and cutout by a NumPy generator that is a global of the script.

command: [python, numpy_generator.py, "${params.epochs}"]
params: {epochs: 5}
steps: 24
forgotten: rng
type: ctx.track(rng=jobkit.attributes(rng.bit_generator, "state"))
"""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
BATCH = 24
ALPHA = 0.4

ctx = jobkit.init(params={"epochs": EPOCHS, "alpha": ALPHA})
rng = np.random.default_rng(2024)
ctx.track(rng=jobkit.attributes(rng.bit_generator, "state"))  # forgets

images = torch.from_numpy(np.random.default_rng(0).normal(size=(144, 1, 8, 8)).astype("float32"))
labels = (images.mean(dim=(1, 2, 3)) > 0).long()


def mixup_data(x, y):
    lam = rng.beta(ALPHA, ALPHA)
    index = torch.from_numpy(rng.permutation(len(x)))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def cutout(x, size=3):
    top, left = rng.integers(0, 8 - size, size=2)
    x = x.clone()
    x[:, :, top : top + size, left : left + size] = 0
    return x


model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 2))
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
train_loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)

for epoch in ctx.epochs(EPOCHS, model=model, opt=opt):
    for x, y in ctx.batches(train_loader):
        x, y_a, y_b, lam = mixup_data(cutout(x), y)
        out = model(x)
        loss = lam * nn.functional.cross_entropy(out, y_a) + (1 - lam) * nn.functional.cross_entropy(out, y_b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ctx.log({"loss": loss, "lam": lam})
    print("epoch", epoch, "loss", loss.item())
ctx.finish({"loss": loss.item()})
