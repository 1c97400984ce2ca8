"""The training function of tests about pauses: once it has failed it fails at each import, until the test removes that.

fault      the step at which all ranks fail; the snapshot of this step is complete by then. `20 cancel`: they wait for
           this request of a person first
fault.used they have failed there
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import jobkit
from jobkit.checkpoint.memory import Slot
from jobkit.wire.pages import slots_of

FAULT, USED = Path("fault").absolute(), Path("fault.used").absolute()

if USED.exists():
    raise RuntimeError("the data server is away")


def train(ctx: jobkit.Context) -> dict[str, Any]:
    ctx.track(model=ctx.parallelize(torch.nn.Linear(2, 1)))
    state = ctx.values(sum=0)
    loop_began = time.time()
    fault, *requests = FAULT.read_text().split()
    for step in ctx.steps(ctx.params.steps):
        if step == int(fault):
            if ctx.is_main:
                USED.touch()
            wait_for_snapshot(step)
            train_longer_than_the_start(ctx, loop_began)
            while not all((ctx.run_dir / "requests" / f"{request}.json").exists() for request in requests):
                time.sleep(0.01)
            raise RuntimeError("the data server is away")
        state.sum += step
        if ctx.is_main:
            with (ctx.run_dir / "outputs" / "steps").open("a") as file:  # as the scripted rank does
                file.write(f"{ctx.attempt} {step}\n")
        time.sleep(0.02)
    return {"sum": state.sum}


def wait_for_snapshot(step: int) -> None:
    """Wait until all ranks have the whole snapshot of this step: a thread completes it while the loop goes on."""
    slots = [Slot(number) for number in slots_of(os.environ) or ()]
    while all(record.step != step for slot in slots for record in slot.records()):
        time.sleep(0.05)
    torch.distributed.barrier()


def train_longer_than_the_start(ctx: jobkit.Context, loop_began: float) -> None:
    """Wait until this attempt counts as progress: on a busy machine its start takes longer than its steps."""
    events = [json.loads(line) for line in (ctx.run_dir / "events.jsonl").read_text().splitlines()]
    began: float = [event["time"] for event in events if event["event"] == "attempt began"][-1]
    time.sleep(max(0.0, 2 * loop_began - began + 0.5 - time.time()))
