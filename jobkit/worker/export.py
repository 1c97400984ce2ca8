"""The weights of a run that has ended: final/<name>.safetensors for each tracked module."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from jobkit.checkpoint.whole import Whole, gather_whole
from jobkit.errors import JobkitError
from jobkit.train.engine import Engine
from jobkit.train.exported import save_weights
from jobkit.worker.lease import check_lease
from jobkit.worker.rank import Rank
from jobkit.worker.tracked_state import TrackedState


def export(rank: Rank, engine: Engine, tracked: TrackedState) -> None:
    """Write the weights of each tracked module, complete or absent: the averaged ones where there are.

    All ranks take part, where each has a part of the weights; rank 0 writes.
    """
    modules = {name: value for name, value in tracked.objects.items() if isinstance(value, torch.nn.Module)}
    with ExitStack() as averages:
        for value in tracked.objects.values():
            if isinstance(value, torch.optim.Optimizer):
                averages.enter_context(engine.averaged(value))
        tracked.buffers.share(tracked.replicas())
        problem: Exception | None = None
        for name, module in modules.items():
            whole = gather_whole(rank.group, tracked.states.module_state(module))
            left_out = {key for keys in rank.group.gather(tracked.states.left_out(module)) for key in keys}
            if rank.is_main and problem is None:
                try:
                    check_lease(rank.run, rank.attempt)  # putting them together took its time
                    _write(rank, name, whole, left_out)
                except (OSError, JobkitError) as error:
                    problem = error  # raised later: the other ranks put the next module together with this one
        if problem is not None:
            raise problem


def _write(rank: Rank, name: str, whole: Whole, left_out: set[str]) -> None:
    save_weights(rank.run.final, name, whole.tensors, whole.tied, whole.others, sorted(left_out))
