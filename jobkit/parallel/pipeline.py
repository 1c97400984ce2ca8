"""A model cut into stages on different ranks, and the 1F1B schedule that trains it (arXiv:1806.03377).

    nn.Sequential --stage_of--> Stage --DDP or fully_shard--> Pipeline
    rank 0: blocks 0, 1 --activations--> rank 1: blocks 2, 3 --> loss
                        <--gradients----

parallelizer.py cuts, wraps and makes the Pipeline; step.py calls its `backward`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from jobkit.data.batch import batch_size, check_can_be_cut, cut
from jobkit.data.seeds import derive_seed, preserved_generators, seed_generators
from jobkit.errors import UsageError
from jobkit.parallel.accumulation import Loss, call

OLDEST_TORCH = "2.13"
"""Stages of torch before it break off where a block passes whole numbers on, or has nothing to train."""

MAX_SCHEDULES = 8
"""Schedules that are kept, one for each count and shape of micro-batches: each owns the memory that it receives in."""


class Blocks(nn.Sequential):
    """An nn.Sequential whose children may have several inputs: a tuple that a child returns is the next one's inputs.

    The inputs of the whole, by position or by name, are the first child's.

    model = jobkit.Blocks(Embed(), Block(), Block(), Head())    # Block.forward(x, mask) returns (x, mask)
    logits = model(ids, mask=mask)
    """

    def forward(self, *inputs: Any, **named: Any) -> Any:
        value: Any = inputs
        for block in self:
            value = block(*_tensors(value), **named)
            named = {}
        return value


class Stage(nn.Sequential):
    """Neighbouring blocks of a model. Their inputs are tensors; raises UsageError for an output of another type."""

    names: tuple[str, ...] = ()
    """Names of the last inputs, if the first block takes them by name."""

    def __init__(self, blocks: OrderedDict[str, nn.Module], spreads: bool) -> None:
        super().__init__(blocks)
        self.spreads = spreads  # a tuple is the next block's inputs, as in Blocks, or its only input

    def forward(self, *inputs: Tensor) -> Any:
        by_position = len(inputs) - len(self.names)
        named = dict(zip(self.names, inputs[by_position:], strict=True))
        value: Any = inputs[:by_position] if self.spreads or named or len(inputs) > 1 else inputs[0]
        for block in self:
            value = block(*value, **named) if isinstance(value, tuple) and (self.spreads or named) else block(value)
            named = {}
        parts = _checked(_tensors(value), f"block {list(self._modules)[-1]} returns")
        sent = tuple(part.contiguous() for part in parts)  # a view with gaps cannot be
        return sent if isinstance(value, tuple) else sent[0]


def cut_stages(sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """Return the end of each stage, as a number of blocks, so that the largest stage is as small as possible.

    Raises ValueError for fewer blocks than stages. cut_stages([5, 1, 1, 1, 1], 2) == (1, 5)
    """
    if len(sizes) < stages:
        raise ValueError(f"{len(sizes)} block(s) cannot be cut into {stages} stages")
    before = [0, *accumulate(sizes)]

    @cache  # the largest stage's size, and the ends, for `count` stages of the blocks from `begin` on
    def best(begin: int, count: int) -> tuple[int, tuple[int, ...]]:
        if count == 1:
            return before[-1] - before[begin], (len(sizes),)
        choices = ((end, best(end, count - 1)) for end in range(begin + 1, len(sizes) - count + 2))
        return min((max(before[end] - before[begin], size), (end, *ends)) for end, (size, ends) in choices)

    return best(0, stages)[1]


def stage_of(model: nn.Module, index: int, stages: int) -> Stage:
    """Return the part of an nn.Sequential that a stage computes; its parameters keep their names.

    Raises ValueError for an old torch, for a model that is no nn.Sequential or has a forward of its own, for fewer
    blocks than stages, and for a parameter that two stages would share.
    """
    if torch.__version__ < OLDEST_TORCH:
        raise ValueError(f"a pipeline needs torch {OLDEST_TORCH} or newer; here is {torch.__version__}")
    if not isinstance(model, nn.Sequential) or type(model).forward not in (nn.Sequential.forward, Blocks.forward):
        has = "has a forward of its own" if isinstance(model, nn.Sequential) else "is no nn.Sequential"
        raise ValueError(
            f"a pipeline calls the children of an nn.Sequential one after the other, and {type(model).__name__} {has}: "
            "make it one, jobkit.Blocks where they have several inputs, or use another `parallel:`"
        )
    blocks = list(zip(model._modules, model, strict=True))  # named_children leaves out a module that is there twice
    ends = cut_stages([max(1, sum(p.numel() for p in block.parameters())) for _, block in blocks], stages)
    parts = [Stage(OrderedDict(blocks[begin:end]), isinstance(model, Blocks)) for begin, end in pairwise((0, *ends))]
    places: dict[nn.Parameter, tuple[int, str]] = {}
    for number, part in enumerate(parts):
        for key, parameter in part.named_parameters():
            first, first_key = places.setdefault(parameter, (number, key))
            if first != number:
                raise ValueError(f"{first_key} and {key} are one parameter, and would be on two stages: untie them")
    return parts[index]


class Pipeline(nn.Module):
    """This rank's stage of a model, and its place in the pipeline.

    pipeline = Pipeline(DistributedDataParallel(stage), group, device, None)
    loss = pipeline.backward(x, nn.functional.mse_loss, y)
    with torch.no_grad():
        output = pipeline(x)        # the whole model's, on every rank

    `stage` is this rank's part, as it is spread over the data-parallel ranks; `group` has the stages of one copy of the
    model, in order; a share is cut into `microbatches` parts, None for up to four a stage.
    """

    def __init__(self, stage: nn.Module, group: dist.ProcessGroup, device: torch.device, microbatches: int | None):
        super().__init__()
        self.stage, self.group, self.device, self.microbatches = stage, group, device, microbatches
        self.stages, self.index = dist.get_world_size(group), dist.get_rank(group)
        self._names: tuple[str, ...] = ()
        self._schedules: dict[Any, Schedule1F1B] = {}
        if isinstance(stage, DistributedDataParallel):
            # The schedule's forwards are within no_sync, where DDP sends buffers before the attempt's first one alone:
            # a run that continues would send them once more.
            stage.broadcast_buffers = False

    @property
    def own_stage(self) -> Any:
        """The stage without DDP, whose forward would wait for a backward pass: the model, for a checkpoint."""
        return self.stage.module if isinstance(self.stage, DistributedDataParallel) else self.stage

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the whole model's output on every rank of the pipeline. Raises UsageError where gradients are on."""
        if torch.is_grad_enabled():
            raise UsageError("parallel.pipeline: model(x) gives no gradients: use ctx.backward, or torch.no_grad()")
        return self._through(self._input_tensors(*inputs, **named))[2]

    def _input_tensors(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        """Return the model's inputs as tensors; those that have names are the last."""
        if len(inputs) == 1 and isinstance(inputs[0], tuple):
            (inputs,) = inputs  # the only input of an nn.Sequential's first block
        self._names = tuple(named)
        self.own_stage.names = self._names if self.index == 0 else ()
        return _checked((*inputs, *named.values()), "an input is")

    def _through(self, value: Any) -> tuple[Any, Any, Any]:
        """Compute the model stage after stage; returns this stage's inputs and outputs, and the whole's output."""
        before, after = (), ()
        for number in range(self.stages):
            if number == self.index:
                before = _tensors(value)
                value = self.own_stage(*before)
                after = _tensors(value)
            parts: Sequence[Tensor] = _tensors(value)
            box: list[Any] = [isinstance(value, tuple), [(x.shape, x.dtype, x.requires_grad) for x in parts]]
            dist.broadcast_object_list(box, group=self.group, group_src=number)
            if number != self.index:
                parts = [torch.empty(form[0], dtype=form[1], device=self.device) for form in box[1]]
            for part, form in zip(parts, box[1], strict=True):
                dist.broadcast(part.detach(), group=self.group, group_src=number)
                part.requires_grad_(form[2])
            value = tuple(parts) if box[0] else parts[0]
        return before, after, value

    def backward(
        self,
        inputs: Any,
        loss: Loss,
        target: Any,
        *,
        weight: float = 1.0,
        micro_batch_size: int | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """Add the gradients of `weight` times the loss's mean over `inputs` [n, ...]; returns that mean, unweighted.

        `inputs` are a tensor, a tuple of them (the first block's arguments) or a dict (by name). All ranks of the
        pipeline give the same inputs and target. Raises UsageError for a share that micro-batches do not fit.
        """
        size = batch_size(inputs)
        count = self._count(size, micro_batch_size)
        check_can_be_cut((inputs, target), size, "the batch")
        tensors = call(self._input_tensors, inputs)
        # Each stage draws (dropout) from a stream of its own: the common stream, from which the training function draws
        # the noise that all stages must have alike, advances alike on all of them.
        stream = derive_seed(int(torch.randint(2**62, ())), self.index)
        form = (count, self._names, *((tensor.shape, tensor.dtype) for tensor in tensors))
        losses: list[Tensor] = []
        arguments = tensors if self.index == 0 else ()
        with preserved_generators(self.device), autocast():
            if form not in self._schedules:
                if len(self._schedules) == MAX_SCHEDULES:
                    del self._schedules[next(iter(self._schedules))]
                self._schedules[form] = self._schedule(count, cut(tensors, 0, size // count))
            self._loss = loss, target, weight / count
            seed_generators(stream, self.device)
            self._schedules[form].step(*arguments, target=torch.arange(size), losses=losses, return_outputs=False)
            del self._loss
        total = torch.stack(losses).float().sum().detach() if losses else torch.zeros((), device=self.device)
        dist.broadcast(total, group=self.group, group_src=self.stages - 1)
        return total / weight

    def _loss_of(self, output: Tensor, samples: Tensor) -> Tensor:
        """Return a micro-batch's part of the loss. `samples` are its numbers: a schedule cuts a tensor, and no dict."""
        loss, target, weight = self._loss
        return loss(output, cut(target, int(samples[0]), int(samples[-1]) + 1)) * weight

    def _schedule(self, count: int, first: Any) -> Schedule1F1B:
        """Return a schedule for `count` micro-batches like the `first` one, which goes through the stages here."""
        # torch would find the shapes with tensors that nobody has filled: ids of tokens would be out of range.
        buffers = [(buffer, buffer.clone()) for buffer in self.stage.buffers()]
        before, after, _ = self._through(first)
        for buffer, value in buffers:
            buffer.detach().copy_(value)
        after = tuple(part.detach().requires_grad_(part.requires_grad) for part in after)
        stage = PipelineStage(
            self.stage, self.index, self.stages, self.device, input_args=before, output_args=after, group=self.group
        )
        return Schedule1F1B(stage, count, self._loss_of, scale_grads=False)

    def _count(self, size: int, micro_batch_size: int | None) -> int:
        """Return the number of micro-batches for a share of `size` samples: of one size, and at least one a stage."""
        counts: Iterable[int] = (*range(4 * self.stages, self.stages - 1, -1), *range(4 * self.stages + 1, size + 1))
        if self.microbatches is not None:
            counts = [max(self.microbatches, self.stages)]
        elif micro_batch_size is not None:
            counts = range(max(math.ceil(size / micro_batch_size), self.stages), size + 1)
        if (count := next((count for count in counts if size and size % count == 0), None)) is None:
            raise UsageError(
                f"a pipeline of {self.stages} stages cannot cut a share of {size} sample(s) into "
                f"{self.microbatches or self.stages} or more micro-batches of one size: choose the global batch to fit"
            )
        return count


def _tensors(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _checked(values: tuple[Any, ...], what: str) -> tuple[Tensor, ...]:
    """Return values that are sent from stage to stage. Raises UsageError for one that is no tensor."""
    for value in values:
        if not isinstance(value, Tensor):
            raise UsageError(f"parallel.pipeline: {what} a {type(value).__name__}; expected tensors or tuples of them")
    return values
