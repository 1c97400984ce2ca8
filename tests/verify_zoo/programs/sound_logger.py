"""A history of losses for a plot, and a CSV file that is cut back to its size.

command: [python, sound_logger.py, "${params.epochs}"]
params: {epochs: 3}
steps: 24
"""

import csv
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class History:
    """Keras-like: a list of values for each name."""

    def __init__(self):
        self.history = {}
        self.epoch = []

    def append(self, **logs):
        for key, value in logs.items():
            self.history.setdefault(key, []).append(float(value))

    def last(self, key, n=5):
        return sum(self.history[key][-n:]) / len(self.history[key][-n:])


class CSVLogger:
    def __init__(self, filename, keys):
        self.file = open(filename, "a", newline="")  # noqa: PTH123, SIM115
        self.writer = csv.DictWriter(self.file, fieldnames=keys)
        self.keys = keys
        self.rows_written = 0

    def log(self, **row):
        if self.file.tell() == 0:
            self.writer.writeheader()
        self.writer.writerow({key: row[key] for key in self.keys})
        self.rows_written += 1
        self.file.flush()


n_epochs = int(sys.argv[1])
ctx = jobkit.init(params={"epochs": n_epochs})
torch.manual_seed(11)
x = torch.rand(96, 5)
loader = DataLoader(TensorDataset(x, x.max(1).values), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(5, 20), nn.LeakyReLU(), nn.Linear(20, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

history = History()
logger = CSVLogger(ctx.run_dir / "outputs" / "train.csv", ["step", "loss"])
state = ctx.values(size=0)
logger.file.truncate(state.size)

for epoch in ctx.epochs(n_epochs, model=model, optimizer=optimizer):
    history.epoch.append(epoch)
    for xb, yb in ctx.batches(loader):
        loss = nn.functional.mse_loss(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss=loss.item(), weight_norm=model[0].weight.norm().item())
        logger.log(step=ctx.step, loss=loss.item())
        state.size = logger.file.tell()
        ctx.log({"loss": loss})
    print(f"epoch {epoch}: loss {history.last('loss'):.4f}")

print("lowest loss in this session:", min(history.history["loss"], default=None))
ctx.finish({"loss": loss.item()})
