"""A rank of tests about scheduling: no torch, only what a training run shows to the outside.

It reports progress, leaves names of checkpoints, obeys a stop, and fails at the step that its params name, or later:
once rank 0 has done that step, while the others wait.
A test that interrupts it asks for more steps than it will see, and ends it with `Launch.end_training()`. A save lasts
until `Launch.end_save()` where the params have `save_waits`.

    params: {steps: 100, step_seconds: 0.02, every: 10, faults: [{kind: raise, rank: 1, step: 7, attempt: 1}]}
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jobkit.errors import Stopped
from jobkit.loop.rank import Rank
from jobkit.wire.pages import Phase


def train(rank: Rank) -> dict[str, Any]:
    params = rank.params
    steps, every = params["steps"], params.get("every", 10)
    first = rank.run.durable_step() or 0
    marks = rank.run.outputs / "ranks"
    marks.mkdir(parents=True, exist_ok=True)
    enough = rank.run.outputs / "enough"
    (marks / str(rank.rank)).write_text(f"{rank.attempt} {os.getpid()}")
    for step in range(first, steps):
        rank.page.beat(rank.attempt, Phase.STEPPING, step)
        for fault in params.get("faults", []):
            if rank.attempt == fault.get("attempt", 1) and step >= fault["step"]:
                if rank.rank == fault.get("rank", 0):
                    wait_while(rank, lambda fault=fault: is_main_behind(rank, fault["step"]))
                    fail(fault["kind"])
                if step > max(first, fault["step"]):  # as in a collective: no rank is far ahead of the one that fails
                    wait_while(rank, lambda: not rank.stop_asked)
        time.sleep(params.get("step_seconds", 0.02))
        if rank.rank == 0:
            note(rank, step)  # first: a step that others hear of is written down
            rank.report(step=step + 1, first_step=first, total_steps=steps, values={"train/loss": 1.0 / (step + 1)})
            if (step + 1) % every == 0:
                checkpoint(rank, step + 1)
        if rank.stop_asked and not params.get("ignores_stop"):
            rank.page.beat(rank.attempt, Phase.SAVING, step + 1)
            time.sleep(params.get("save_seconds", 0))
            while params.get("save_waits") and not (rank.run.outputs / "may_save").exists():
                time.sleep(0.05)
            write_slowly(rank, step + 1, params.get("write_seconds", 0))
            if rank.rank == 0:
                checkpoint(rank, step + 1)
            raise Stopped
        if enough.exists():
            break
    rank.page.beat(rank.attempt, Phase.ENDING, steps)
    return {"steps": steps, "first": first}


def is_main_behind(rank: Rank, step: int) -> bool:
    """Return whether rank 0 has yet to do a step: a rank that failed before would hide how the attempt began."""
    report = rank.run.progress() if rank.rank != 0 else None
    return rank.rank != 0 and (report is None or report.attempt != rank.attempt or (report.step or 0) <= step)


def wait_while(rank: Rank, look: Callable[[], bool]) -> None:
    while look():
        rank.beat_again()
        time.sleep(0.02)


def note(rank: Rank, step: int) -> None:
    """Write a step down that is done: a record that is not jobkit's. See Launch.assert_repeated."""
    with contextlib.suppress(OSError), (rank.run.outputs / "steps").open("a") as file:  # a disk may be full
        file.write(f"{rank.attempt} {step}\n")


def checkpoint(rank: Rank, step: int) -> None:
    """Leave the name of a complete checkpoint, if this attempt still owns the run."""
    rank.check_lease()
    folder = rank.run.checkpoints / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)


def write_slowly(rank: Rank, step: int, seconds: float) -> None:
    """Let the bytes of an unfinished checkpoint become more, for so long."""
    folder = rank.run.checkpoints / f".step_{step:08d}.{rank.attempt}"
    for _ in range(int(seconds / 0.2)):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank_{rank.rank}.safetensors").open("ab") as file:
            file.write(bytes(1000))
        time.sleep(0.2)


def fail(kind: str) -> NoReturn:
    if kind == "raise":
        raise ValueError("a fault of the script")
    if kind == "memory":
        raise MemoryError
    if kind == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(10_000)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(0)
    sys.exit(int(kind))
