"""The ranks that make or read one checkpoint: what one of them finds or fails at, all of them learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from jobkit.errors import CheckpointError
from jobkit.run.disk import disk_errno

T = TypeVar("T")


class Team:
    """`world_size` ranks talking over a gloo group of their own; one rank alone needs no group."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        if world_size > 1 and group is None:
            raise ValueError(f"{world_size} ranks need a process group to save a checkpoint together")
        self.rank = rank
        self.world_size = world_size
        self.group = group if world_size > 1 else None

    def lead(self, action: Callable[[], T]) -> T:
        """The value that `action` returns on rank 0, on all ranks; CheckpointError on all where it raises."""
        outcome: tuple[T | None, CheckpointError | None] = (None, None)
        if self.rank == 0:
            outcome = _attempt(action)
        if self.group is not None:
            box = [outcome]
            dist.broadcast_object_list(box, src=dist.get_global_rank(self.group, 0), group=self.group)
            outcome = box[0]
        value, problem = outcome
        if problem is not None:
            raise problem
        return cast(T, value)

    def gather(self, action: Callable[[], T]) -> list[T]:
        """What `action` returns on each rank, on all ranks; CheckpointError on all where it raises on any."""
        outcomes: list[Any] = [_attempt(action)]
        if self.group is not None:
            mine, outcomes = outcomes[0], [None] * self.world_size
            dist.all_gather_object(outcomes, mine, group=self.group)
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                raise problem if self.world_size == 1 else checkpoint_error(f"rank {rank}: {problem}", problem)
        return [value for value, _ in outcomes]


def _attempt(action: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    try:
        return action(), None
    except Exception as error:  # as text: not every exception can be sent
        return None, checkpoint_error(describe(error), error)


def checkpoint_error(message: str, cause: BaseException) -> CheckpointError:
    """A CheckpointError that still tells whether the disk is to blame."""
    error = CheckpointError(message)
    error.errno = disk_errno(cause) or None
    return error


def describe(error: BaseException) -> str:
    """An error in a line."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
