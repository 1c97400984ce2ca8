"""What a training function builds its step from: a spread model, its optimizer, a loader, gradients and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from jobkit.errors import JobkitError
from jobkit.run.layout import factor
from jobkit.train.accumulation import Loss
from jobkit.train.data import Loader
from jobkit.train.data_parallel import reshard
from jobkit.train.gradients import LossScaler, clip_gradients, scale_gradients
from jobkit.train.local_sgd import average_replicas
from jobkit.train.optimizer_state import parameters_of
from jobkit.train.parallel import Parallel, unwrapped
from jobkit.worker.session import Session
from jobkit.worker.stragglers import Stragglers
from jobkit.worker.tracked_state import TrackedState

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """The part of a Context that knows how the YAML spreads a model, and in which precision it computes."""

    step: int
    seed: int
    _tracking: TrackedState
    _stragglers: Stragglers

    def __init__(self, session: Session) -> None:
        self._session = session
        config, topology = session.config, session.topology
        try:
            layout = factor(config.parallel, topology.world_size, topology.local_world_size)
        except ValueError as error:
            raise JobkitError(f"parallel: {error}") from None
        self._parallel = Parallel(layout, config.parallel, config.comm, session.device, topology.rank)
        self._scaler = LossScaler() if config.precision == "fp16" else None
        self._made: list[tuple[str, Any]] = []
        """What ctx.parallelize and ctx.loader made: a checkpoint without it would be worthless."""
        self._updates = 0
        self._scale_used = 1.0
        """The loss scale that the gradients have been computed with."""
        self._swapped: list[ExitStack] = []
        """Of each `averaged` that the training function is inside of: what ends it."""

    def parallelize(self, module: nn.Module) -> nn.Module:
        """`module` on this rank's device and over the ranks as the YAML's `parallel:` says: DDP where it is silent.

        Raises JobkitError for a module that cannot be spread that way.
        """
        module = self._parallel.spread(module)
        self._tracking.add_module(module)
        if any(parameter.requires_grad for parameter in module.parameters()):
            self._made.append(("the model of ctx.parallelize", module))
        self._stragglers.watch(module, self._parallel.forward_is_collective)
        unwrapped(module).register_forward_hook(self._show_life)
        return module

    def _show_life(self, *_: Any) -> None:
        """After each forward pass: many of them without a step in between, as in sampling, are no hang."""
        if not torch.is_grad_enabled():
            self._session.pulse.beat()

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """`make(parameters, **options)` for the model's trainable parameters: torch.optim.AdamW, fused_ema_adam ...

        With `parallel: zero1` each rank keeps the state of a part of them.
        """
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self._parallel.optimizer(trainable, make, options)

    def loader(self, dataset: Dataset[Any], *, global_batch_size: int, **options: Any) -> Loader:
        """An endless iterator over this rank's shares of global batches; see jobkit.train.data.Loader.

        Ranks that compute the same samples together, as those of a pipeline, get the same share.
        """
        place: dict[str, Any] = {"rank": self._parallel.data_rank, "world_size": self._parallel.layout.data}
        place |= {"device": self._session.device, "seed": self.seed}
        loader = Loader(dataset, global_batch_size=global_batch_size, **{**place, **options})
        self._made.append(("the loader of ctx.loader", loader))
        return loader

    def autocast(self) -> AbstractContextManager[Any]:
        """The YAML's `precision` for the code inside: nothing for fp32, else torch.autocast."""
        precision = self._session.config.precision
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self._session.device.type, dtype=AUTOCAST[precision])

    def backward(
        self,
        model: nn.Module,
        inputs: Any,
        loss: Loss,
        target: Any,
        *,
        micro_batch_size: int | None = None,
        global_batch_size: int | None = None,
    ) -> torch.Tensor:
        """Gradients of `loss(model(inputs), target)` over the global batch; returns the loss of this rank's share.

        `inputs` and `target` are this rank's share of a global batch: tensors [n, ...], or tuples of them (positional
        arguments) or dicts (by name). The share goes through in micro-batches of at most `micro_batch_size` samples,
        under `precision`'s autocast; the gradients are those of the whole global batch, exactly, which is of
        `global_batch_size` samples or of the loader's. `loss` returns the mean over the samples it is given.
        """
        self._stragglers.own.forward_begins()
        self._scale_used = self._scaler.scale if self._scaler is not None else 1.0
        return self._parallel.backward(
            model,
            inputs,
            loss,
            target,
            global_batch_size=global_batch_size or self._global_batch_size(),
            micro_batch_size=micro_batch_size,
            autocast=self.autocast,
            scale=self._scale_used,
        )

    def _global_batch_size(self) -> int:
        loaders = [value for _, value in self._made if isinstance(value, Loader)]
        if len(loaders) != 1:
            raise JobkitError(
                f"ctx.backward takes the global batch's size from the loader, and there are {len(loaders)}: "
                "pass global_batch_size"
            )
        return loaders[0].global_batch_size

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> torch.Tensor | None:
        """Use the gradients of ctx.backward: unscale, clip to a global norm of `max_norm`, step, set them to None.

        Returns the norm before clipping; None without `max_norm`, unless fp16 needs it. Gradients that overflowed in
        fp16 are not used.
        """
        parameters = parameters_of(optimizer)
        norm: torch.Tensor | None = None
        accepted = True
        if self._scaler is not None:
            norm = self._parallel.norm(parameters) / self._scale_used
            accepted = self._scaler.accepts(norm)
            scale_gradients(parameters, 1 / self._scale_used)
        elif max_norm is not None:
            norm = self._parallel.norm(parameters)
        if accepted:
            if norm is not None and max_norm is not None:
                clip_gradients(parameters, max_norm, norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        return norm

    def _insist_on_update(self, optimizer_steps: int) -> None:
        """Raise JobkitError for a loop of the user's own where the YAML asks for what it does not do."""
        if self._updates or not optimizer_steps:
            return
        if self._scaler is not None:
            raise JobkitError(
                "precision: fp16 needs a loss scale: use ctx.backward(model, ...) and ctx.update(optimizer)"
            )
        if self._parallel.drifts:
            raise JobkitError("comm.local_sgd: take the optimizer's step by ctx.update(optimizer)")

    def _average_replicas(self, total: int) -> None:
        """Local SGD: after every so many steps, and after the last, the replicas become their mean."""
        if not self._parallel.drifts:
            return
        if self.step % self._session.config.comm.local_sgd == 0 or self.step == total:
            tracked = self._tracking.objects.values()
            optimizers = [value for value in tracked if isinstance(value, torch.optim.Optimizer)]
            average_replicas(self._tracking.modules, optimizers, self._parallel.data_group)

    @contextmanager
    def averaged(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """While inside, the parameters are their moving averages, where the optimizer keeps any. Collective."""
        with ExitStack() as swapped:
            swapped.callback(self._reshard)
            swapped.enter_context(getattr(optimizer, "averaged", nullcontext)())
            self._reshard()
            self._swapped.append(swapped)
            try:
                yield
            finally:
                self._swapped.remove(swapped)

    def _reshard(self) -> None:
        for module in self._tracking.modules:
            reshard(module)

    def _end_averaged(self) -> None:
        """Put the parameters themselves back: a stop within `averaged` is about to save them."""
        for swapped in reversed(self._swapped):
            swapped.close()
