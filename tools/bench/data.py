"""Measure data under jobkit: a step with its data loaded, images a second, and an evaluation with a slow rank.

    .venv/bin/python tools/bench/data.py [step images evaluation] [--repeats 9] [--quick]

step        a step whose batches ctx.loader loads / the same loop over a DataLoader by hand with as many workers
images      reading PNG files by ctx.loader       / by a DataLoader, each with one worker
evaluation  3 ranks, one of them three times slower / the time in which they would do it if none ever waited

Both sides run in turns in the same processes; on a machine that others use, the rows of processor time, the workers'
with it, say more. ctx.loader seeds three generators for each sample, which a sample of a few microseconds would show.
"""

from __future__ import annotations

from table import QUICK, options, show
from training import project, result

TASK = """\
import io, multiprocessing, os, time
from pathlib import Path
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH = 1_000_000  # an epoch that begins would hold the DataLoader up

def files():
    values = np.random.default_rng(0)
    for _ in range(256):
        file = io.BytesIO()
        smooth = Image.fromarray(values.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize((64, 64))
        smooth.save(file, "PNG")
        yield file.getvalue()

class Images(Dataset):
    '''PNG files of 64 x 64, turned at random.'''
    files = list(files())

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        with Image.open(io.BytesIO(self.files[index % len(self.files)])) as image:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return (pixels.flip(-1) if torch.rand(()) < 0.5 else pixels), index % 10

def by_hand(ctx, dataset, batch):
    sampler = DistributedSampler(dataset, ctx.world_size, ctx.rank)
    yield from DataLoader(dataset, batch // ctx.world_size, sampler=sampler, num_workers=1)

def network():
    return nn.Sequential(nn.Conv2d(3, 24, 3, 2), nn.ReLU(), nn.Conv2d(24, 32, 3, 2), nn.ReLU(), nn.Flatten(),
                         nn.Linear(32 * 225, 10))

def nanoseconds(processes):
    '''Processor time of some processes.'''
    files = [file for pid in processes for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files)

def ratios(ctx, mine, others, block):
    '''The seconds of blocks of two kinds of steps, as ratios, in turns; the first turn does not count.'''
    workers = {}
    for is_mine, step in ((True, mine), (False, others)):
        before = multiprocessing.active_children()
        step()
        workers[is_mine] = [child.pid for child in multiprocessing.active_children() if child not in before]
    wall, processor = [], []
    for turn in range(ctx.params.repeats + 1):
        seconds, work = {}, {is_mine: -nanoseconds(pids) for is_mine, pids in workers.items()}
        for is_mine in (turn % 2 == 0, turn % 2 == 1):
            ctx.barrier()
            began, work_began = time.perf_counter(), nanoseconds([os.getpid()])
            for _ in range(block):
                (mine if is_mine else others)()
            work[is_mine] += nanoseconds([os.getpid()]) - work_began
            ctx.barrier()
            seconds[is_mine] = time.perf_counter() - began
        for is_mine, pids in workers.items():
            work[is_mine] += nanoseconds(pids)
        wall.append(seconds[True] / seconds[False])
        processor.append(work[True] / work[False])
    return {"ratios": wall[1:], "processor": processor[1:]}

def step(ctx):
    def trainer(batches):
        model = ctx.parallelize(network())
        optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)
        ctx.track(**{f"model{id(model)}": model, f"optimizer{id(model)}": optimizer})
        def train():
            images, labels = next(batches)
            nn.functional.cross_entropy(model(images.float() / 255), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return train
    loader = ctx.loader(Images(), global_batch_size=64, num_workers=1)
    ctx.track(loader=loader)
    return ratios(ctx, trainer(loader), trainer(by_hand(ctx, Images(), 64)), 24)

def images(ctx):
    loader = ctx.loader(Images(), global_batch_size=32, num_workers=1)
    ctx.track(loader=loader)
    others = by_hand(ctx, Images(), 32)
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
    results = result(made)
    show(row, results["ratios"], bound, "times")
    if "processor" in results:
        show(f"{row} (processor)", results["processor"], bound, "times")


def main() -> None:
    parts = ("step", "images", "evaluation")
    arguments = options(__doc__, 9, parts).parse_args()
    rows, repeats = arguments.parts or parts, arguments.repeats
    if "step" in rows:
        for ranks in (2,) if QUICK else (1, 2):
            measure(f"step, {ranks} rank(s)", "step", ranks, 1.05, repeats)
    if "images" in rows:
        measure("images", "images", 1, 1.05, repeats)
    if "evaluation" in rows:
        measure("evaluation, a slow rank", "evaluation", 3, 1.1, repeats)


if __name__ == "__main__":
    main()
