"""Small agreements among the ranks of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]


def shared_store(world_size: int) -> Store:
    """A store that all ranks see, whoever made the process group."""
    if world_size == 1:
        return HashStore()
    return dist.distributed_c10d._get_default_store()


class Control:
    """Small agreements among the ranks, on the CPU and in a group of their own: they never wait for a GPU."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.group = dist.new_group(backend="gloo") if world_size > 1 else None

    def maximum(self, *values: float) -> list[float]:
        """The element-wise maximum over all ranks."""
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in tensor.tolist()]

    def anywhere(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        return bool(self.maximum(flag)[0])

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a CPU tensor over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: object) -> list[object]:
        """Every rank's value, by rank, on every rank."""
        found: list[object] = [value] * self.world_size
        if self.group is not None:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def from_main(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)
