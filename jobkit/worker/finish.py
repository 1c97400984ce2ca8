"""The end of a run: weights, last checkpoint and result, durable even where the disk is full for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.errors import JobkitError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.run.disk_errors import disk_errno
from jobkit.run.files import fsync_dir
from jobkit.train.engine import Engine
from jobkit.train.parallel import unwrapped
from jobkit.train.pipeline import Pipeline
from jobkit.worker.lease import check_lease
from jobkit.worker.rank import Rank
from jobkit.worker.stop import StopSignals
from jobkit.worker.tracked_state import TrackedState

FULL_DISK_PAUSES: tuple[float, ...] = (1, 2, 4, 8, 15, 15, 15)
"""Seconds between two tries to end a run whose disk is full: a minute, in which somebody may make room."""


def retry_on_full_disk(group: RankGroup, signals: StopSignals, action: Callable[[], None]) -> None:
    """Do, on all ranks together, what the run cannot end without; a disk that refuses it is given a minute.

    After that, or when this process has been told to stop, it is the disk's error on all ranks, and for another
    attempt.
    """
    for pause in (*FULL_DISK_PAUSES, 0):
        error: Exception | None = None
        try:
            action()
        except Exception as raised:
            if not disk_errno(raised):
                raise
            error = raised
        # All ranks go on or try again together: the action has collectives in it.
        number, told = group.maximum(disk_errno(error), signals.pending)
        if not number:
            return
        if not pause or told:
            raise error or OSError(int(number), f"{os.strerror(int(number))} on another rank")
        if group.is_main:
            log.warning("cannot finish: %s. Waiting for the disk ...", error or os.strerror(int(number)))
        time.sleep(pause)


def export(rank: Rank, engine: Engine, tracked: TrackedState) -> None:
    """final/<name>.safetensors for each tracked module, complete or absent: the averaged weights where there are.

    All ranks take part, where each has a part of the weights; rank 0 writes.
    """
    modules = {name: value for name, value in tracked.objects.items() if isinstance(value, torch.nn.Module)}
    with ExitStack() as averages:
        for value in tracked.objects.values():
            if isinstance(value, torch.optim.Optimizer):
                averages.enter_context(engine.averaged(value))
        tracked.share_buffers()
        problem: Exception | None = None
        for name, module in modules.items():
            weights = whole_weights(module)
            if rank.is_main and problem is None:
                try:
                    check_lease(rank.run, rank.attempt)  # putting them together took its time
                    write_weights(rank.run.final, name, weights)
                except (OSError, JobkitError) as error:
                    problem = error  # raised later: the other ranks put the next module together with this one
        if problem is not None:
            raise problem


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the user's own module with every tensor whole, on the CPU of rank 0. Collective.

    Nothing on the other ranks, of which a node may have more than it has memory for such copies.
    """
    stages = module.group if isinstance(module, Pipeline) else None
    first = dist.get_global_rank(stages, 0) if stages is not None else 0
    rank = dist.get_rank() if dist.is_initialized() else 0
    wanted = first == 0 if stages is not None else rank == 0
    weights = {}
    for name, tensor in unwrapped(module).state_dict().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if wanted:
            weights[name] = whole.detach().cpu()
    if stages is None or not wanted:
        return weights
    parts: list[dict[str, Tensor] | None] | None = [None] * dist.get_world_size(stages) if rank == 0 else None
    dist.gather_object(weights, parts, dst=first, group=stages)
    return {name: tensor for part in parts or [] if part for name, tensor in part.items()}


def write_weights(folder: Path, name: str, weights: Mapping[str, Tensor]) -> None:
    """folder/<name>.safetensors, complete or absent. Of tied weights the first name alone is written."""
    from safetensors.torch import save_file  # not on the other ranks

    distinct: dict[int, str] = {}
    for key, tensor in weights.items():
        distinct.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), key)
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{name}.safetensors.tmp"
    temporary.touch()
    permissions = temporary.stat().st_mode & 0o777  # what the umask leaves
    save_file({key: weights[key].contiguous() for key in distinct.values()}, str(temporary))
    temporary.chmod(permissions)  # safetensors makes a file that nobody else can read
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / f"{name}.safetensors")
    fsync_dir(folder)
