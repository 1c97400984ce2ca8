"""The values of a dataset's samples, as far as they are known, on one rank or on all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class SampleScores:
    """What is known of the values of a dataset's samples: those of whole batches, which are cut the same way always."""

    def __init__(self, length: int, batch_size: int) -> None:
        if length < 1:
            raise ValueError("the dataset is empty: there is nothing to evaluate")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, and must be at least 1")
        self.length = length
        self.batch_size = batch_size
        self.known = torch.zeros(math.ceil(length / batch_size), dtype=torch.bool)
        """Whether batch number `i` has its values."""
        self.values: dict[str, Tensor] = {}
        """float64 [length] for each name; a function that returns no dict has its values under the empty name."""

    @property
    def done(self) -> int:
        return int(self._of_samples(self.known).sum())

    def missing(self) -> list[int]:
        """Numbers of the batches whose values are not known."""
        return torch.nonzero(~self.known).flatten().tolist()

    def ids(self, number: int) -> Tensor:
        """The samples of a batch, int64 [n]."""
        return torch.arange(number * self.batch_size, min(self.length, (number + 1) * self.batch_size))

    def add(self, number: int, result: Tensor | Mapping[str, Tensor]) -> None:
        """Take down what the function returned for a batch; ValueError where that is not one value a sample."""
        ids = self.ids(number)
        named = dict(sorted(result.items())) if isinstance(result, Mapping) else {"": result}
        if not named:
            raise ValueError("function returned an empty dict, expected a tensor for each name in it")
        if self.values and named.keys() != self.values.keys():
            raise ValueError(f"function returned {_names(named)}, and {_names(self.values)} for another batch")
        for name, values in named.items():
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            if found != f"shape {tuple(ids.shape)}":
                where = f" as {name!r}" if name else ""
                raise ValueError(f"function returned {found}{where}, expected one value for each of {len(ids)} samples")
            whole = self.values.setdefault(name, torch.zeros(self.length, dtype=torch.float64))
            whole[ids] = values.detach().cpu().to(torch.float64)
        self.known[number] = True

    def gathered(self, group: dist.ProcessGroup | None = None) -> SampleScores:
        """What all ranks know together, on each of them; where several have computed a batch, the last one's values."""
        rank, world_size = place(group)
        if world_size == 1:
            return self
        everyones: list[list[str]] = [[]] * world_size
        dist.all_gather_object(everyones, list(self.values), group=group)
        names = next((names for names in everyones if names), [])  # a rank without a batch knows of none
        if not names:
            return self
        if strange := next((other for other in everyones if other not in ([], names)), None):
            raise ValueError(f"function returned {_names(names)} on one rank, and {_names(strange)} on another")

        owner = torch.where(self.known, rank, -1)
        dist.all_reduce(owner, dist.ReduceOp.MAX, group=group)
        mine = self._of_samples(owner == rank)
        nothing = torch.zeros(self.length, dtype=torch.float64)
        own = torch.stack([torch.where(mine, self.values.get(name, nothing), nothing) for name in names])
        bits = own.view(torch.int64)  # each is non-zero on one rank alone, so that the sum is exact, of any float
        dist.all_reduce(bits, group=group)

        together = SampleScores(self.length, self.batch_size)
        together.known = owner >= 0
        together.values = dict(zip(names, bits.view(torch.float64), strict=True))
        return together

    def update(self, other: SampleScores) -> None:
        """Take over what another one knows."""
        samples = self._of_samples(other.known)
        for name, values in other.values.items():
            whole = self.values.setdefault(name, torch.zeros(self.length, dtype=torch.float64))
            whole[samples] = values[samples]
        self.known |= other.known

    def result(self) -> Tensor | dict[str, Tensor]:
        """The values by sample number, float64 [length], or such by name: as the function returned them."""
        return self.values.get("", self.values)

    def _of_samples(self, batches: Tensor) -> Tensor:
        """A bool for each sample from one for each batch."""
        return batches.repeat_interleave(self.batch_size)[: self.length]


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, world size) in a group, or of a process that is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return "a tensor" if listed == [""] else f"a dict of {', '.join(listed)}"
