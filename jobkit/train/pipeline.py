"""A model cut into stages on different ranks, and the 1F1B schedule that trains it (arXiv:1806.03377)."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from jobkit.errors import UsageError
from jobkit.train.accumulation import Loss
from jobkit.train.collectives import contiguous
from jobkit.train.nested import batch_size, check_can_be_cut, cut
from jobkit.train.seeds import derive_seed, preserved_generators, seed_generators
from jobkit.train.sharding import reshard

MAX_SCHEDULES = 8
"""Schedules that are kept, of one number and shape of micro-batches each: they own the memory that tensors come in."""


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


class Blocks(nn.Sequential):
    """An nn.Sequential whose children may have several inputs: a tuple that one gives is the arguments of the next.

    What is given to the whole goes to the first child, by position or by name.
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        value: Any = inputs
        for number, block in enumerate(self):
            given = value if isinstance(value, tuple) else (value,)
            value = block(*given, **(named if number == 0 else {}))
        return value


class Stage(nn.Sequential):
    """Some of a model's blocks in a row; takes what the block before them gives as arguments: tensors.

    `spreads` is whether a tuple is the arguments of the next block, as in Blocks, or its one argument. Gives a tensor
    or a tuple of tensors; raises UsageError where a block gives something else.
    """

    def __init__(self, blocks: OrderedDict[str, nn.Module], spreads: bool) -> None:
        super().__init__(blocks)
        self.spreads = spreads
        self.names: tuple[str, ...] = ()
        """Of the last inputs, those that go to the first block by name."""

    def forward(self, *inputs: Tensor) -> Any:
        value: Any = inputs if len(inputs) > 1 else inputs[0]
        for number, block in enumerate(self):
            if number == 0 and self.names:
                by_position = len(inputs) - len(self.names)
                named = dict(zip(self.names, inputs[by_position:], strict=True))
                value = block(*inputs[:by_position], **named)
            else:
                value = block(*value) if self.spreads and isinstance(value, tuple) else block(value)
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if not isinstance(part, Tensor):
                raise UsageError(
                    f"parallel.pipeline: block {list(self._modules)[-1]} gives a {type(part).__name__}; what goes from "
                    "one stage to the next is a tensor or a tuple of tensors"
                )
        # Sent as they lie in memory.
        return tuple(part.contiguous() for part in parts) if isinstance(value, tuple) else value.contiguous()


def stage_of(model: nn.Module, index: int, stages: int) -> Stage:
    """The part of an nn.Sequential that one stage computes; its parameters keep their names.

    Raises ValueError for a model that is no nn.Sequential, or does more than call its children one after the other, or
    whose stages would share a parameter.
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"a pipeline cuts an nn.Sequential between its children, and {type(model).__name__} is none: make it one, "
            "or use another `parallel:`"
        )
    if type(model).forward not in (nn.Sequential.forward, Blocks.forward):
        raise ValueError(
            f"{type(model).__name__} has a forward of its own, which no stage would run: leave it to nn.Sequential, or "
            "to jobkit.train.pipeline.Blocks where blocks have several inputs"
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
    own = children[ends[index - 1] if index else 0 : ends[index]]
    return Stage(OrderedDict(own), isinstance(model, Blocks))


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
        self._schedules: dict[Any, tuple[Schedule1F1B, _Losses]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        copied = Pipeline(copy.deepcopy(self.stage, memo), self.group, self.device, self.microbatches)
        return copied.train(self.training)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError(
            "parallel.pipeline: a rank has one stage of the model, and its group of ranks, which cannot be pickled: "
            "save model.stage.state_dict() on each rank, or take the weights in final/"
        )

    @property
    def _own(self) -> Any:
        """The stage without DDP, whose forward would wait for a backward pass."""
        return self.stage.module if isinstance(self.stage, DistributedDataParallel) else self.stage

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The whole model's output, on every rank of the pipeline; UsageError where gradients are on."""
        if torch.is_grad_enabled():
            raise UsageError(
                "parallel.pipeline: no gradients come out of model(x): train by ctx.backward(model, ...), "
                "and look at outputs within torch.no_grad()"
            )
        self._name_inputs(tuple(named))
        value: Any = (*_flat(inputs), *named.values())
        for number in range(self.stages):
            value = self._shared(self._own(*_tensors(value)) if number == self.index else None, number)
        return value

    def _name_inputs(self, names: tuple[str, ...]) -> None:
        if self.index == 0:
            self._own.names = names

    def _shared(self, value: Any, number: int) -> Any:
        """What stage `number` has, a tensor or a tuple of tensors, on every rank of the pipeline."""
        parts = _tensors(value) if number == self.index else ()
        described: list[Any] = [(isinstance(value, tuple), [(x.shape, x.dtype, x.requires_grad) for x in parts])]
        source = dist.get_global_rank(self.group, number)
        dist.broadcast_object_list(described, source, group=self.group)
        is_tuple, kinds = described[0]
        if number != self.index:
            parts = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype, _ in kinds)
        for part, (_, _, requires_grad) in zip(parts, kinds, strict=True):
            with contiguous(part.detach()) as sent:
                dist.broadcast(sent, source, group=self.group)
            if number != self.index:
                part.requires_grad_(requires_grad)
        return parts if is_tuple else parts[0]

    def backward(
        self,
        inputs: Any,
        loss: Loss,
        target: Any,
        *,
        weight: float,
        micro_batch_size: int | None = None,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> Tensor:
        """Add the gradients of `weight` times the loss's mean over `inputs` [n, ...]; returns that mean.

        `inputs` are a tensor, a tuple of them (the first block's arguments) or a dict (by name). All ranks of the
        pipeline give the same inputs and target.
        """
        size = batch_size(inputs)
        count = self._count(size, micro_batch_size)
        given, names = _arguments(inputs)
        # Stages draw different numbers (dropout): each from a stream of its own, so that the common one, from which
        # the training function draws the noise that all stages must agree on, stays common.
        check_can_be_cut(inputs, size, "the input")
        check_can_be_cut(target, size, "the target")
        stream = derive_seed(int(torch.randint(2**62, ())), self.index)
        kind = (count, names, *((x.shape, x.dtype) for x in given))
        if kind not in self._schedules:
            while len(self._schedules) >= MAX_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            with preserved_generators(self.device), autocast(), torch.enable_grad(), unchanged_buffers(self.stage):
                self._schedules[kind] = self._schedule(count, cut(given, 0, size // count), names)
        self._name_inputs(names)
        schedule, losses = self._schedules[kind]
        losses.of, losses.target, losses.weight = loss, target, weight / count
        found: list[Tensor] = []
        is_last = self.index == self.stages - 1
        ids = torch.arange(size, device=self.device) if is_last else None
        with preserved_generators(self.device), autocast():
            seed_generators(stream, self.device)
            schedule.step(
                *(given if self.index == 0 else ()),
                target=ids,
                losses=found if is_last else None,
                return_outputs=False,
            )
        losses.of = losses.target = None
        total = torch.stack(found).sum().detach() / weight if found else torch.zeros((), device=self.device)
        dist.broadcast(total, dist.get_global_rank(self.group, self.stages - 1), group=self.group)
        return total

    def _schedule(self, count: int, first: Any, names: tuple[str, ...]) -> tuple[Schedule1F1B, _Losses]:
        """A schedule for `count` micro-batches like the `first` one, of which each stage computes its part here.

        torch could find out the shapes by itself, but from tensors with nothing in them: numbers of tokens would be
        none. With DDP its first step would also add gradients up in another order than those after it.
        """
        self._name_inputs(names)
        value: Any = first
        before: tuple[Tensor, ...] = ()
        after: tuple[Tensor, ...] = ()
        for number in range(self.stages):
            if number == self.index:
                before = _tensors(value)
                value = self._own(*before)
                after = tuple(x.detach().requires_grad_(x.requires_grad) for x in _tensors(value))
            if number + 1 < self.stages:
                value = self._shared(value, number)
        reshard(self.stage)
        losses = _Losses()
        stage = PipelineStage(
            self.stage, self.index, self.stages, self.device, input_args=before, output_args=after, group=self.group
        )
        return Schedule1F1B(stage, count, losses, scale_grads=False), losses

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
            raise UsageError(
                f"a pipeline of {self.stages} stages cannot cut a share of {size} sample(s) into "
                f"{least} or more micro-batches of one size: choose the global batch, or parallel.microbatches, to fit"
            )
        if micro_batch_size is not None:
            return counts[0]
        return max((count for count in counts if count <= 4 * self.stages), default=counts[0])


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _flat(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a first stage: a tuple that is the only one is written out."""
    return inputs[0] if len(inputs) == 1 and isinstance(inputs[0], tuple) else inputs


def _arguments(inputs: Any) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """What ctx.backward is given, and its names where it has any; UsageError for what cannot be cut and sent."""
    names = tuple(inputs) if isinstance(inputs, Mapping) else ()
    values = tuple(inputs.values()) if names else _flat(tuple(inputs) if isinstance(inputs, list) else _tensors(inputs))
    for value in values:
        if not isinstance(value, Tensor):
            raise UsageError(
                f"parallel.pipeline: found a {type(value).__name__} among the inputs; they are a tensor [n, ...], a "
                "tuple of them or a dict"
            )
    return values, names


@contextmanager
def unchanged_buffers(stage: nn.Module) -> Iterator[None]:
    """Put buffers back afterwards: for the forward pass in which a schedule's shapes are found."""
    buffers = [buffer.clone() for buffer in stage.buffers()]
    yield
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
