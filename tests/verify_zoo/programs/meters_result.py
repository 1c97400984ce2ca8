"""A main() with the meters that half of all repositories have; their means are the result.

command: [python, meters_result.py, --epochs, "${params.epochs}"]
params: {epochs: 4}
steps: 28
forgotten: losses
type: jobkit.attributes(losses, "
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import jobkit


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target):
    return 100.0 * (output.argmax(1) == target).float().mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=4, type=int)
    parser.add_argument("-p", "--print-freq", default=3, type=int)
    args = parser.parse_args()
    ctx = jobkit.init(params=vars(args))

    x = torch.randn(224, 10)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train_loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)

    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    top1 = AverageMeter("Acc@1", ":6.2f")
    ctx.track(losses=jobkit.attributes(losses, "val", "avg", "sum", "count"))  # forgets
    ctx.track(top1=jobkit.attributes(top1, "val", "avg", "sum", "count"))

    for epoch in ctx.epochs(args.epochs, model=model, optimizer=optimizer):
        for meter in (batch_time, losses, top1):
            meter.reset()
        end = time.time()
        for i, (images, target) in enumerate(ctx.batches(train_loader), ctx.batch):
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            top1.update(accuracy(output, target).item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch_time.update(time.time() - end)
            end = time.time()
            if i % args.print_freq == 0:
                print(f"Epoch: [{epoch}][{i}/{len(train_loader)}]", batch_time, losses, top1, sep="\t")
    ctx.finish({"loss": losses.avg, "acc1": top1.avg})


if __name__ == "__main__":
    main()
