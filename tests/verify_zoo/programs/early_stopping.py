"""A regression that ends early, by the well-known class with patience and a counter.

forgotten: early_stopping
type: jobkit.attributes(early_stopping,
"""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import jobkit


class EarlyStopping:
    """Early stops the training if validation loss doesn't improve after a given patience."""

    def __init__(self, patience=7, verbose=False, delta=0.0):
        self.patience = patience
        self.verbose = verbose
        self.counter = 0
        self.best_score = None
        self.early_stop = False
        self.val_loss_min = float("inf")
        self.delta = delta

    def __call__(self, val_loss):
        score = -val_loss
        if self.best_score is None or score > self.best_score + self.delta:
            self.best_score = score
            if self.verbose:
                print(f"Validation loss decreased ({self.val_loss_min:.6f} --> {val_loss:.6f}).")
            self.val_loss_min = val_loss
            self.counter = 0
        else:
            self.counter += 1
            print(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            if self.counter >= self.patience:
                self.early_stop = True


def train_model(ctx, model, patience, n_epochs):
    x = torch.rand(160, 3)
    y = x.prod(1, keepdim=True) + 0.3 * torch.randn(160, 1)
    train_set, valid_set = random_split(TensorDataset(x, y), [96, 64])
    train_loader = DataLoader(train_set, batch_size=48, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=64)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    early_stopping = EarlyStopping(patience=patience, verbose=True)
    ctx.track(model=model, optimizer=optimizer)
    names = ["counter", "best_score", "early_stop", "val_loss_min"]
    ctx.track(early_stopping=jobkit.attributes(early_stopping, *names))  # forgets

    for epoch in ctx.epochs(n_epochs):
        train_losses, valid_losses = [], []
        model.train()
        for data, target in ctx.batches(train_loader):
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            train_losses.append(loss.item())

        model.eval()
        with torch.no_grad():
            for data, target in valid_loader:
                valid_losses.append(criterion(model(data), target).item())
        valid_loss = np.average(valid_losses)
        ctx.log({"valid_loss": valid_loss})
        print(f"[{epoch}/{n_epochs}] train_loss: {np.average(train_losses):.5f} valid_loss: {valid_loss:.5f}")
        early_stopping(valid_loss)
        if early_stopping.early_stop:
            print("Early stopping")
            break
    return early_stopping.val_loss_min


if __name__ == "__main__":
    ctx = jobkit.init(seed=0)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    best = train_model(ctx, model, patience=3, n_epochs=15)
    ctx.finish({"best": best})
