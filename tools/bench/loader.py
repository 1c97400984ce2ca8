"""What a sample costs in a loader, against a plain DataLoader with RandomSampler; and what the order costs.

`random` is a dataset that draws one number of each generator, `fixed` one that draws none, `together` one that loads a
batch at once (`__getitems__`). The samples are next to nothing, so this is the cost itself: the loader seeds three
generators for each sample, so that what augments it depends on nothing else.
    python tools/bench/loader.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from jobkit.train.data import Loader
from jobkit.train.order import SampleOrder


class Fixed(Dataset[int]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


class Together(Fixed):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Random(Fixed):
    def __getitem__(self, index: int) -> Any:
        return random.random() + np.random.rand() + torch.rand(()).item()


def seconds(action: Callable[[], object]) -> float:
    started = time.process_time()  # of the processor: the machine may have other work
    action()
    return time.process_time() - started


def per_sample(batches: Iterator[Any], count: int, size: int) -> float:
    next(batches)  # begins workers, and draws the first order
    return seconds(lambda: [*itertools.islice(batches, count)]) / count / size * 1e6


def say(**values: Any) -> None:
    print(json.dumps(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size, count = arguments.batch, arguments.batches
    for dataset in (Fixed(), Together(), Random()):
        found: dict[str, list[float]] = {"loader": [], "dataloader": []}
        for _ in range(arguments.repeats):
            plain = DataLoader(dataset, batch_size=size, sampler=RandomSampler(dataset))
            found["dataloader"].append(per_sample(iter(plain), count, size))
            found["loader"].append(per_sample(Loader(dataset, global_batch_size=size), count, size))
        ours, torchs = (statistics.median(found[way]) for way in ("loader", "dataloader"))
        name = type(dataset).__name__.lower()
        say(dataset=name, us_a_sample=round(ours, 2), dataloader=round(torchs, 2), more=round(ours - torchs, 2))
    order = SampleOrder(10**9, size, seed=0)
    started = seconds(lambda: order.share(0, 0, 1))
    each = seconds(lambda: [order.share(number, 0, 1) for number in range(1, 101)]) / 100 / size
    randperm = seconds(lambda: torch.randperm(10**7)) * 100
    say(order_of=10**9, first_batch_ms=round(started * 1e3, 2), us_a_sample=round(each * 1e6, 2))
    say(randperm_of=10**9, seconds_an_epoch=round(randperm, 1), from_one_of=10**7, gigabytes=8)


if __name__ == "__main__":
    main()
