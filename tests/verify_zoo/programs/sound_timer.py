"""Speed meters: deques of step times and losses, a throughput, and a text of what remains.

command: [python, sound_timer.py, --num-steps, "${params.steps}"]
params: {steps: 24}
steps: 24
"""

import argparse
import datetime
import time
from collections import defaultdict, deque

import torch
from torch import nn
from torch.utils.data import TensorDataset

import jobkit


class SmoothedValue:
    """Tracks a series of values; gives the median and the mean over a window, and the global mean."""

    def __init__(self, window_size=10):
        self.deque = deque(maxlen=window_size)
        self.total = 0.0
        self.count = 0

    def update(self, value):
        self.deque.append(value)
        self.count += 1
        self.total += value

    @property
    def median(self):
        return torch.tensor(list(self.deque)).median().item()

    @property
    def global_avg(self):
        return self.total / self.count


class MetricLogger:
    def __init__(self, delimiter="  "):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs):
        for name, value in kwargs.items():
            self.meters[name].update(value.item() if isinstance(value, torch.Tensor) else value)

    def __str__(self):
        return self.delimiter.join(f"{n}: {m.median:.4f} ({m.global_avg:.4f})" for n, m in self.meters.items())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    ctx = jobkit.init(params=vars(args))

    frames = torch.randn(300, 3, 6)
    model = ctx.parallelize(nn.GRU(6, 6, batch_first=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = ctx.loader(TensorDataset(frames), global_batch_size=args.batch_size)
    ctx.track(model=model, optimizer=optimizer, loader=loader)

    metric_logger = MetricLogger()
    start, end, samples_seen = time.time(), time.time(), 0
    for step in ctx.steps(args.num_steps):
        (x,) = next(loader)
        data_time = time.time() - end
        out, _ = model(x[:, :-1])
        loss = nn.functional.mse_loss(out, x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples_seen += len(x)
        metric_logger.update(loss=loss, data=data_time, time=time.time() - end)
        ctx.log({"loss": loss})
        if step % 6 == 0:
            eta = datetime.timedelta(seconds=int(metric_logger.meters["time"].global_avg * (args.num_steps - step)))
            speed = samples_seen / (time.time() - start)
            print(f"step {step}  eta: {eta}  {metric_logger}  {speed:.0f} samples/s")
        end = time.time()
    ctx.finish({"loss": loss.item()})


if __name__ == "__main__":
    main()
