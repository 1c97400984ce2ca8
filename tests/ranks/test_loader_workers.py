"""Workers of a loader, however they are started, in a run that every process of it is told to stop."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
from harness.attempts import STOPPED, attempt, stop_after
from slurm_cluster import process_table
from torch.utils.data import TensorDataset

from jobkit.train.data import Loader

STEPS = 5
METHODS = ["fork", "forkserver", "spawn"]
DATA = TensorDataset(torch.arange(100))


def started_by(pid: int) -> set[int]:
    """What a process has started, and what that has started."""
    table = process_table()
    found: set[int] = set()
    while more := {one.pid for one in table.values() if one.parent in {pid, *found}} - found:
        found |= more
    return found


def tell_all_to_stop(until: threading.Event) -> None:
    """What Slurm does to a step's processes, to each that there is, again and again."""
    told: set[int] = set()
    while not (until.is_set() and told):
        for pid in started_by(os.getpid()) - told:
            os.kill(pid, signal.SIGTERM)
            told.add(pid)
        until.wait(0.02)


def train(ctx: Any, stop: bool) -> list[list[int]]:
    """A rank for each way to start a worker."""
    workers = {"num_workers": 1, "multiprocessing_context": METHODS[ctx.rank]} if stop else {}
    loader = ctx.loader(DATA, global_batch_size=6, **workers)
    ctx.track(loader=loader)
    loaded, batches = threading.Event(), []
    if stop:
        teller = threading.Thread(target=tell_all_to_stop, args=[loaded])
        teller.start()
    for step in ctx.steps(STEPS):
        (batch,) = next(loader)
        batches.append(batch.tolist())
        if stop and step == 2:
            loaded.set()
            teller.join()
            stop_after(ctx, 2)
    return batches


def test_workers_that_are_told_to_stop_work_on_until_the_checkpoint(tmp_path: Path) -> None:
    assert attempt(len(METHODS), tmp_path, train, True) == [STOPPED] * len(METHODS)
    rests = attempt(len(METHODS), tmp_path, train, False)
    whole = Loader(DATA, global_batch_size=6, name="0")
    expected = [batch[0].tolist() for batch in itertools.islice(whole, STEPS)][3:]
    assert [list(itertools.chain(*parts)) for parts in zip(*rests, strict=True)] == expected


def sleep_long(_: Any = None) -> None:
    time.sleep(600)


def children_of_ones_own(ctx: Any) -> list[bool]:
    """Whether each of some children ends when it is told to."""
    ctx.track(loader=ctx.loader(DATA, global_batch_size=6))
    ended = []
    for _ in ctx.steps(1):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map_async(sleep_long, [None])
        ended.append(True)
        process = multiprocessing.get_context("fork").Process(target=sleep_long)
        process.start()
        process.terminate()
        process.join(30)
        ended.append(process.exitcode is not None)
        with subprocess.Popen(["sleep", "600"], preexec_fn=os.setsid) as program:
            program.terminate()
            ended.append(program.wait(30) == -signal.SIGTERM)
    return ended


def test_children_of_the_users_own_end_when_they_are_told_to(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, children_of_ones_own) == [[True] * 3]
