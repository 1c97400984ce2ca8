"""Measure data under jobkit: a step with its data loaded, images a second, and an evaluation with a slow rank.

    .venv/bin/python tools/bench/data.py [step images evaluation] [--repeats 9] [--quick]

step        a step whose batches ctx.loader loads / the same loop over a DataLoader by hand with as many workers
images      reading PNG files by ctx.loader       / by a DataLoader, each with one worker
evaluation  3 ranks, one of them three times slower / the time in which they would do it if none ever waited

Both sides run in turns in the same processes. Each row shows the least, the median and the most ratio, and the bound
that the project has set itself.
"""

from __future__ import annotations

import argparse

from training import project, result, show

TASK = """\
import itertools, time
from pathlib import Path
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Crops(Dataset):
    '''Images that are cropped and turned at random, at about a tenth of a millisecond each.'''
    images = torch.randint(0, 256, (512, 3, 40, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = self.images[index, :, top:top + 32, left:left + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image.float() / 255, index % 10

class Files(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.png"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1)

def endless(loader):
    for epoch in itertools.count():
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        yield from loader

def by_hand(ctx, dataset, batch):
    sampler = DistributedSampler(dataset, ctx.world_size, ctx.rank)
    return endless(DataLoader(dataset, batch // ctx.world_size, sampler=sampler, drop_last=True, num_workers=1,
                              persistent_workers=True))

def network():
    return nn.Sequential(nn.Conv2d(3, 24, 3, 2), nn.ReLU(), nn.Conv2d(24, 32, 3, 2), nn.ReLU(), nn.Flatten(),
                         nn.Linear(32 * 49, 10))

def ratios(ctx, mine, others, block):
    '''The seconds of blocks of two kinds of steps, as ratios, in turns; the first turn does not count.'''
    found, seconds = [], []
    for number in range(2 * (ctx.params.repeats + 1)):
        is_mine = number % 2 == number // 2 % 2  # each begins as often as the other
        ctx.barrier()
        began = time.perf_counter()
        for _ in range(block):
            (mine if is_mine else others)()
        ctx.barrier()
        seconds.append((is_mine, time.perf_counter() - began))
    for pair in zip(seconds[2::2], seconds[3::2]):
        times = dict(pair)
        found.append(times[True] / times[False])
    return {"ratios": found}

def step(ctx):
    def trainer(batches):
        model = ctx.parallelize(network())
        optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)
        ctx.track(**{f"model{id(model)}": model, f"optimizer{id(model)}": optimizer})
        def train():
            images, labels = next(batches)
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return train
    loader = ctx.loader(Crops(), global_batch_size=64, num_workers=1)
    ctx.track(loader=loader)
    return ratios(ctx, trainer(loader), trainer(by_hand(ctx, Crops(), 64)), 24)

def images(ctx):
    folder = ctx.run_dir / "outputs" / "images"
    folder.mkdir(parents=True)
    values = np.random.default_rng(0)
    for number in range(768):
        smooth = Image.fromarray(values.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((64, 64))
        smooth.save(folder / f"{number:04d}.png")
    loader = ctx.loader(Files(folder), global_batch_size=32, num_workers=1)
    ctx.track(loader=loader)
    others = by_hand(ctx, Files(folder), 32)
    return ratios(ctx, lambda: next(loader), lambda: next(others), 48)

def evaluation(ctx):
    seconds = 0.15 if ctx.rank == 0 else 0.05
    def wait(batch, ids):
        time.sleep(seconds)
        return ids
    found = []
    for _ in range(ctx.params.repeats):
        ctx.barrier()
        began = time.perf_counter()
        ctx.evaluate(wait, torch.zeros(140))
        found.append((time.perf_counter() - began) / (140 / (2 / 0.05 + 1 / 0.15)))
    return {"ratios": found}
"""


def measure(row: str, function: str, ranks: int, bound: float, repeats: int) -> None:
    made = project(function, ranks, repeats=repeats)
    made.write("bench_task.py", TASK)
    show(row, result(made), bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=["step", "images", "evaluation", []], help="all by default")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="each ratio twice: to see that it runs")
    arguments = parser.parse_args()
    rows, repeats = arguments.rows or ["step", "images", "evaluation"], 2 if arguments.quick else arguments.repeats
    if "step" in rows:
        for ranks in (1, 2):
            measure(f"step, {ranks} rank(s) / by hand", "step", ranks, 1.05, repeats)
    if "images" in rows:
        measure("images / a DataLoader's", "images", 1, 1.05, repeats)
    if "evaluation" in rows:
        measure("evaluation, a slow rank", "evaluation", 3, 1.1, repeats)


if __name__ == "__main__":
    main()
