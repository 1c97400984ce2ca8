"""A model cut into stages on different ranks, and the 1F1B schedule that trains it (arXiv:1806.03377)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from jobkit.errors import JobkitError
from jobkit.train.accumulation import Loss
from jobkit.train.nested import batch_size, cut
from jobkit.train.seeds import derive_seed, preserved_generators, seed_generators


def cut_stages(sizes: Sequence[int], stages: int) -> list[int]:
    """Where each stage ends, in blocks, so that the largest stage is as small as can be; every stage has a block.

    `sizes` are the blocks' sizes, as in parameters. ValueError where there are fewer blocks than stages.
    """
    if len(sizes) < stages:
        raise ValueError(f"{len(sizes)} block(s) cannot be cut into {stages} stages")
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _greedy(sizes, stages, middle) is None:
            low = middle + 1
        else:
            high = middle
    found = _greedy(sizes, stages, high)
    assert found is not None
    return found


def _greedy(sizes: Sequence[int], stages: int, limit: int) -> list[int] | None:
    """Ends of stages none of which is above `limit`, or None where that takes too many."""
    ends: list[int] = []
    load = 0
    for index, size in enumerate(sizes):
        stages_after = stages - len(ends) - 1
        must_end = len(sizes) - index == stages_after  # each stage to come needs a block
        if index and load and (load + size > limit or must_end) and stages_after:
            ends.append(index)
            load = 0
        load += size
        if load > limit:
            return None
    return ends + [len(sizes)] if len(ends) + 1 == stages else None


def stage_of(model: nn.Module, index: int, stages: int) -> nn.Sequential:
    """The part of an nn.Sequential that one stage computes; its parameters keep their names.

    Raises ValueError for a model that is no nn.Sequential, or one whose stages would share a parameter.
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"a pipeline cuts an nn.Sequential between its children, and {type(model).__name__} is none: make it one, "
            "or use another `parallel:`"
        )
    children = list(model.named_children())
    ends = cut_stages([max(1, sum(p.numel() for p in child.parameters())) for _, child in children], stages)
    where: dict[nn.Parameter, tuple[int, str]] = {}
    for number, end in enumerate(ends):
        for name, child in children[ends[number - 1] if number else 0 : end]:
            for key, parameter in child.named_parameters(prefix=name):
                first, first_key = where.setdefault(parameter, (number, key))
                if first != number:
                    raise ValueError(f"{first_key} and {key} are one parameter, and would be on two stages: untie them")
    return nn.Sequential(OrderedDict(children[ends[index - 1] if index else 0 : ends[index]]))


class Pipeline(nn.Module):
    """This rank's stage of a model, and its place in the pipeline.

    Called without gradients it is the whole model: the input goes through the stages one after the other, and every
    rank gets the output. Training goes through `backward`. `stage` is this rank's part, wrapped by whatever spreads it
    over the data-parallel ranks; `group` are the ranks that have the stages of one copy of the model, in that order;
    `microbatches` is how many parts of a share are under way at a time, None for up to four a stage.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup, device: torch.device, microbatches: int | None):
        super().__init__()
        self.stage = stage
        self.group = group
        self.device = device
        self.microbatches = microbatches
        self.stages = dist.get_world_size(group)
        self.index = dist.get_rank(group)
        self._schedules: dict[int, tuple[Schedule1F1B, _Losses]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """The whole model's output, on every rank of the pipeline; JobkitError where gradients are on."""
        if torch.is_grad_enabled():
            raise JobkitError(
                "parallel.pipeline: no gradients come out of model(x): train by ctx.backward(model, ...), "
                "and look at outputs within torch.no_grad()"
            )
        for number in range(self.stages):
            if number == self.index:
                x = self.stage(x)
            described = [(x.shape, x.dtype) if number == self.index else None]
            source = dist.get_global_rank(self.group, number)
            dist.broadcast_object_list(described, source, group=self.group)
            assert described[0] is not None
            if number != self.index:
                x = torch.empty(described[0][0], dtype=described[0][1], device=self.device)
            x = x.contiguous()
            dist.broadcast(x, source, group=self.group)
        return x

    def backward(
        self,
        inputs: Tensor,
        loss: Loss,
        target: Any,
        *,
        weight: float,
        micro_batch_size: int | None = None,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Add the gradients of `weight` times the loss's mean over `inputs` [n, ...]; returns that mean.

        All ranks of the pipeline give the same inputs and target.
        """
        size = batch_size(inputs)
        count = self._count(size, micro_batch_size)
        # Stages draw different numbers (dropout): each from a stream of its own, so that the common one, from which
        # the training function draws the noise that all stages must agree on, stays common.
        stream = derive_seed(int(torch.randint(2**62, ())), self.index)

        def run(schedule: Schedule1F1B, losses: _Losses) -> Tensor:
            losses.of, losses.target, losses.weight = loss, target, weight / count
            found: list[Tensor] = []
            given = (inputs,) if self.index == 0 else ()
            is_last = self.index == self.stages - 1
            ids = torch.arange(size, device=self.device) if is_last else None
            with preserved_generators(self.device), autocast():
                seed_generators(stream)
                schedule.step(*given, target=ids, losses=found if is_last else None, return_outputs=False)
            losses.of = losses.target = None
            return torch.stack(found).sum().detach() / weight if found else torch.zeros((), device=self.device)

        if count not in self._schedules:
            losses = _Losses()
            stage = PipelineStage(self.stage, self.index, self.stages, self.device, group=self.group)
            self._schedules[count] = Schedule1F1B(stage, count, losses, scale_grads=False), losses
            with unchanged(self.stage):
                run(*self._schedules[count])
        total = run(*self._schedules[count])
        dist.broadcast(total, dist.get_global_rank(self.group, self.stages - 1), group=self.group)
        return total

    def _count(self, size: int, micro_batch_size: int | None) -> int:
        """How many micro-batches a share of `size` samples is cut into: of one size, and at least one a stage."""
        if self.microbatches is not None:
            least = most = max(self.microbatches, self.stages)
        elif micro_batch_size is not None:
            least, most = max(math.ceil(size / micro_batch_size), self.stages), size
        else:
            least, most = self.stages, size
        counts = [count for count in range(least, most + 1) if size % count == 0]
        if not counts:
            raise JobkitError(
                f"a pipeline of {self.stages} stages cannot cut a share of {size} sample(s) into "
                f"{least} or more micro-batches of one size: choose the global batch, or parallel.microbatches, to fit"
            )
        if micro_batch_size is not None:
            return counts[0]
        return max((count for count in counts if count <= 4 * self.stages), default=counts[0])


@contextmanager
def unchanged(stage: nn.Module) -> Iterator[None]:
    """Put gradients and buffers back afterwards: for a schedule's first step, in which it asks for the shapes.

    With DDP that step adds its gradients up in another order than those after it, so that a resumed run, which has a
    first step of its own, would differ in the last bit. It is taken twice instead.
    """
    gradients = [parameter.grad for parameter in stage.parameters()]
    buffers = [buffer.clone() for buffer in stage.buffers()]
    stage.zero_grad(set_to_none=True)
    yield
    for parameter, gradient in zip(stage.parameters(), gradients, strict=True):
        parameter.grad = gradient
    with torch.no_grad():
        for buffer, before in zip(stage.buffers(), buffers, strict=True):
            buffer.copy_(before)


class _Losses:
    """The loss of one micro-batch, given the numbers of its samples: a schedule can only cut a single tensor."""

    of: Loss | None = None
    target: Any = None
    weight: float = 1.0

    def __call__(self, output: Tensor, ids: Tensor) -> Tensor:
        assert self.of is not None
        start = int(ids[0])
        return self.of(output, cut(self.target, start, start + len(ids))) * self.weight
