"""Attempts of a run within forked ranks: `jobkit.init` as a script has it, without an interpreter of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobkit
from harness.ranks import Team, on_ranks
from jobkit.errors import JobkitError
from jobkit.worker.stop import Stopped, kill_children

STOPPED = "stopped"


def attempt(ranks: int, runs: Path, train: Callable[..., Any], *args: Any, config: str = "") -> list[Any]:
    """What `train(ctx, *args)` returned on each rank of an attempt of the run in `runs`.

    STOPPED where it was told to stop; the message where it raised JobkitError. `config` is a YAML's text.
    """
    return on_ranks(ranks, attempt_of_rank, runs, train, args, config)


def attempt_of_rank(team: Team, runs: Path, train: Callable[..., Any], args: tuple[Any, ...], config: str) -> Any:
    """`attempt`, on one of its ranks."""
    os.environ["JOBKIT_RUNS"] = str(runs)
    if config:
        file = runs / f"config_{team.rank}" / "run.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"name: run\ntask: {train.__module__}:{train.__qualname__}\n{config}")
        ctx = jobkit.init(file)
    else:
        ctx = jobkit.init(name="run", gpus=0)
    try:
        result = train(ctx, *args)
        ctx.finish()
    except Stopped:
        kill_children()
        ctx.ending.close()
        return STOPPED
    except JobkitError as error:
        return f"{type(error).__name__}: {error}"
    return result


def stop_after(ctx: Any, step: int) -> None:
    """On all ranks: what a preemption does to rank 0, in time for the stop to come at the end of this step."""
    if ctx.step == step:
        ctx._loop._timer.agree_at = 0  # ranks agree every so many seconds, and such steps take microseconds
        if ctx.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
