"""A rank's own time ends where it first waits for others: in DDP's backward, or before a sharded model's forward."""

from __future__ import annotations

import math
import time

import pytest
import torch
from harness.ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from jobkit.loop.own_time import WINDOW, OwnTime
from jobkit.wire.group import RankGroup


def train(ranks: RankGroup, is_sharded: bool) -> tuple[list[float], list[float] | None]:
    """Return all ranks' least times in a step, and their medians; the first step is slow on rank 0, others on 1.

    The least: on a busy machine a rank may wait for a processor in any step.
    """
    model = nn.Linear(4, 4)
    parallelizer: nn.Module = fully_shard(model) if is_sharded else DistributedDataParallel(model)
    clock = OwnTime(torch.device("cpu"), ranks.rank, ranks.world_size)
    clock.watch(parallelizer)
    least = [math.inf] * ranks.world_size
    for step in range(WINDOW):
        clock.begin()
        time.sleep(0.2 if ranks.rank == (step > 0) else 0.0)
        for _ in range(2 if is_sharded else 1):  # a sharded model's second forward comes after a wait
            parallelizer(torch.ones(2, 4)).sum().backward()
        clock.close()
        shares = ranks.maximum(*clock.share())
        medians = clock.median(shares)
        if step > 0:
            least = list(map(min, least, shares))
    return least, medians


@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fully_shard"])
def test_the_time_that_a_rank_waits_is_not_its_own(is_sharded: bool) -> None:
    (least, medians), (same, none) = run_ranks(train, 2, is_sharded)
    assert least == same and none is None and medians is not None
    assert least[0] < 0.2 <= least[1] and medians[0] < 0.2 <= medians[1]
