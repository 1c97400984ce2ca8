"""The parts of a training step: autocast, gradients of a global batch, an update, averaged weights.

    batch --backward()--> gradients, mean loss --update()--> unscale, clip, optimizer.step(), gradients to None

context.py calls this. A training function may do all of it by hand instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobkit.config.schema import Config
from jobkit.data.batch import batch_size
from jobkit.data.loader import Loader
from jobkit.data.order import sample_range
from jobkit.data.seeds import preserved_generators
from jobkit.errors import UsageError
from jobkit.parallel.accumulation import Loss, backward
from jobkit.parallel.devices import AUTOCAST
from jobkit.parallel.gradients import LossScaler, clip_gradients, scale_gradients
from jobkit.parallel.parallelizer import Parallelizer


class GradientStep:
    """Computes steps in the YAML's `precision`."""

    def __init__(self, config: Config, parallelizer: Parallelizer) -> None:
        self.parallelizer = parallelizer
        self.loaders: list[Loader] = []
        """The loaders of ctx.loader: the only one tells the size of the global batch."""
        self.scaler = LossScaler() if config.precision == "fp16" else None
        """A part of the state of the run, with fp16."""
        self._precision = config.precision

    def autocast(self) -> AbstractContextManager[Any]:
        """Return torch.autocast for the YAML's `precision`; a context of no effect for fp32."""
        if self._precision == "fp32":
            return nullcontext()
        return torch.autocast(self.parallelizer.device.type, dtype=AUTOCAST[self._precision])

    def backward(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        *,
        micro_batch_size: int | None = None,
        global_batch_size: int | None = None,
    ) -> Tensor:
        """Add the gradients over the global batch; returns its mean loss, the same on all ranks."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise UsageError(
                f"ctx.backward takes a batch of (inputs, target), and was given a {type(batch).__name__}: for other "
                "batches give ((inputs, ...), target)"
            )
        if not callable(loss):
            raise UsageError(
                f"ctx.backward computes loss(output, target), and was given a {type(loss).__name__} as loss"
            )
        inputs, target = batch
        if micro_batch_size is not None and micro_batch_size < 1:
            raise UsageError(f"ctx.backward: micro_batch_size is {micro_batch_size}, and must be at least 1, or None")
        if global_batch_size is None:
            global_batch_size = self._loaders_batch_size(batch_size(inputs))
        scale = self.scaler.begin(lambda: _has_gradients(model)) if self.scaler is not None else 1.0
        if self.parallelizer.stage_group is not None and hasattr(model, "stage"):
            return self._pipelined(model, inputs, loss, target, micro_batch_size, global_batch_size, scale)
        adds_up = self.parallelizer.data_size > 1 and not self.parallelizer.is_local_sgd
        group = self.parallelizer.data_group
        return backward(
            model,
            inputs,
            loss,
            target,
            global_batch_size=global_batch_size,
            data_ranks=self.parallelizer.data_size,
            micro_batch_size=micro_batch_size,
            autocast=self.autocast,
            unsynchronised=lambda: self.parallelizer.unsynchronised(model),
            scale=scale,
            add_up=(lambda tensor: dist.all_reduce(tensor, group=group, async_op=True)) if adds_up else None,
        )

    def _pipelined(
        self, model: Any, inputs: Any, loss: Loss, target: Any, micro: int | None, total: int, scale: float
    ) -> Tensor:
        size, ranks = batch_size(inputs), self.parallelizer.data_size
        if size * ranks != total:
            raise UsageError(
                f"parallel.pipeline: a share of {size} of a global batch of {total} on {ranks} data-parallel rank(s): "
                "their schedules need equal shares; choose a global_batch_size that they divide"
            )
        options = {"weight": scale, "micro_batch_size": micro, "autocast": self.autocast}
        mean: Tensor = model.backward(inputs, loss, target, **options)
        if ranks > 1:
            dist.all_reduce(mean, group=self.parallelizer.data_group)
        return mean / ranks

    def _loaders_batch_size(self, samples: int) -> int:
        """Return the loader's global batch size, of which `given` samples must be this rank's share."""
        if len(self.loaders) != 1:
            raise UsageError(
                f"ctx.backward takes the size of the global batch from the loader, and there are {len(self.loaders)}: "
                "pass global_batch_size, the samples on all ranks together"
            )
        size = self.loaders[0].global_batch_size
        part = sample_range(size, self.parallelizer.data_rank, self.parallelizer.data_size)
        if samples != part.stop - part.start:
            raise UsageError(
                f"ctx.backward was given {samples} sample(s), and this rank's share of the loader's {size} is "
                f"{part.stop - part.start}: pass global_batch_size, the samples on all ranks together"
            )
        return size

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> Tensor | None:
        """Use the gradients, and set them to None; returns their norm before clipping, None where nobody needs it."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm: Tensor | None = None
        accepted = True
        if self.scaler is not None:
            norm = self.parallelizer.norm(parameters) / self.scaler.used
            accepted = self.scaler.accepts(norm)
            scale_gradients(parameters, 1 / self.scaler.used)
        elif max_norm is not None:
            norm = self.parallelizer.norm(parameters)
        if accepted:
            if norm is not None and max_norm is not None:
                clip_gradients(parameters, max_norm, norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def averaged(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Within it, the parameters are their moving averages, where the optimizer keeps any; with local SGD those of
        all replicas."""
        swap: Callable[[], AbstractContextManager[None]] | None = getattr(optimizer, "averaged", None)
        mean = self.parallelizer.mean_replicas(optimizer) if self.parallelizer.is_local_sgd else nullcontext()
        self.parallelizer.reshard()
        with mean, swap() if swap is not None else nullcontext():
            torch.clear_autocast_cache()  # within autocast it holds the weights in another type
            yield
            self.parallelizer.reshard()
        torch.clear_autocast_cache()


@contextmanager
def evaluating(
    model: nn.Module,
    averaged: AbstractContextManager[None],
    devices: Sequence[torch.device],
) -> Iterator[None]:
    """Within it, the model is in evaluation mode and has its averaged weights, where there are any.

    At the end each submodule's own mode, the weights and the random generators are as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    with preserved_generators(*devices), averaged:
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())
