"""Segmentation of a kind: a confusion matrix that is reset before each validation.

command: [python, sound_confusion.py, --epochs, "${params.epochs}"]
params: {epochs: 3}
steps: 24
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes = num_classes
        self.mat = torch.zeros((num_classes, num_classes), dtype=torch.int64)
        self.n_images = 0

    def update(self, a, b):
        n = self.num_classes
        with torch.inference_mode():
            k = (a >= 0) & (a < n)
            inds = n * a[k].to(torch.int64) + b[k]
            self.mat += torch.bincount(inds, minlength=n**2).reshape(n, n)
        self.n_images += a.shape[0]

    def reset(self):
        self.mat.zero_()
        self.n_images = 0

    def compute(self):
        h = self.mat.float()
        acc_global = torch.diag(h).sum() / h.sum()
        iu = torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h)).clamp(min=1)
        return acc_global.item(), iu.mean().item()


def evaluate(model, data_loader, confmat):
    model.eval()
    confmat.reset()
    with torch.no_grad():
        for image, target in data_loader:
            confmat.update(target.flatten(1), model(image).argmax(1).flatten(1))
    model.train()
    return confmat.compute()


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    images = nn.functional.avg_pool2d(torch.randn(n, 2, 8, 8, generator=g), 3, 1, 1)
    return TensorDataset(images, (images[:, 0] > 0).long() + (images[:, 1] > 0.2).long())


def main(args):
    ctx = jobkit.init(params=vars(args))
    data_loader = DataLoader(make_images(96, 0), batch_size=args.batch_size, shuffle=True, drop_last=True)
    data_loader_test = DataLoader(make_images(24, 1), batch_size=8)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda it: (1 - it / (12 * args.epochs)) ** 0.9)
    confmat = ConfusionMatrix(num_classes=3)

    for epoch in ctx.epochs(args.epochs, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler):
        for image, target in ctx.batches(data_loader):
            loss = nn.functional.cross_entropy(model(image), target, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            ctx.log({"loss": loss})
        acc_global, miou = evaluate(model, data_loader_test, confmat)
        print(f"epoch {epoch}: global correct: {acc_global:.3f} mean IoU: {miou:.3f} ({confmat.n_images} images)")
    ctx.finish({"acc": acc_global, "miou": miou})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    main(parser.parse_args())
