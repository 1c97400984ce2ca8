"""What a training step is built from: a spread model, its optimizer, a loader, gradients and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from jobkit.errors import JobkitError
from jobkit.run.config import Config
from jobkit.run.layout import factor
from jobkit.train.accumulation import Loss
from jobkit.train.data import Loader
from jobkit.train.data_parallel import reshard
from jobkit.train.gradients import LossScaler, clip_gradients, scale_gradients
from jobkit.train.local_sgd import average_replicas
from jobkit.train.optimizer_state import Sharded, parameters_of
from jobkit.train.parallel import Parallel, unwrapped

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """Spreads models over the ranks as a config's `parallel:` says, and computes steps in its `precision:`.

    Where there are several ranks their process group stands. Raises JobkitError where the world does not divide as
    `parallel:` asks.
    """

    def __init__(
        self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1, tasks_per_node: int = 1
    ) -> None:
        try:
            layout = factor(config.parallel, world_size, tasks_per_node)
        except ValueError as error:
            raise JobkitError(f"parallel: {error}") from None
        self.parallel = Parallel(layout, config.parallel, config.comm, device, rank)
        self.scaler = LossScaler() if config.precision == "fp16" else None
        """Part of the state of the run, where there is one."""
        self.modules: list[nn.Module] = []
        """What `parallelize` made, in that order."""
        self.loaders: list[Loader] = []
        self._config = config
        self._device = device
        self._updates = 0
        self._scale_used = 1.0
        """The loss scale that the gradients have been computed with."""
        self._swapped: list[ExitStack] = []
        """Of each `averaged` that the caller is inside of: what ends it."""

    def parallelize(self, module: nn.Module) -> nn.Module:
        """`module` on the device and over the ranks. Raises JobkitError for one that cannot be spread that way."""
        module = self.parallel.spread(module)
        self.modules.append(module)
        return module

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """`make(parameters, **options)` for the model's trainable parameters; with zero1 each rank keeps a part."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self.parallel.optimizer(trainable, make, options)

    def loader(self, dataset: Any, *, name: str | None = None, **options: Any) -> Loader:
        """The Loader of this rank's shares: ranks that compute the same samples together get the same share.

        Its name, by default its number, is a part of its seed: two loaders of a run draw different orders.
        """
        own = str(len(self.loaders)) if name is None else name
        if any(loader.name == own for loader in self.loaders):
            raise JobkitError(f"ctx.loader has been given the name {own!r} twice: each loader needs one of its own")
        place: dict[str, Any] = {"rank": self.parallel.data_rank, "world_size": self.parallel.layout.data}
        place |= {"device": self._device, "seed": self._config.seed}
        loader = Loader(dataset, name=own, **{**place, **options})
        self.loaders.append(loader)
        return loader

    def check_tracked(self, tracked: Iterable[Any]) -> None:
        """Raise JobkitError where a run that is interrupted would lose a part of what was made here."""
        own = [unwrapped(value) for value in tracked]
        trainable = [model for model in self.modules if any(one.requires_grad for one in model.parameters())]
        made = [("the model of ctx.parallelize", model) for model in trainable]
        for what, value in [*made, *(("the loader of ctx.loader", loader) for loader in self.loaders)]:
            if not any(unwrapped(value) is one for one in own):
                raise JobkitError(
                    f"{what} is not tracked, so a run that is interrupted would lose it: "
                    "call ctx.track(model=..., optimizer=..., loader=...) before ctx.steps"
                )
        sharing = self._config.parallel.data == "zero1" and self.parallel.layout.data > 1
        optimizers = [value for value in own if isinstance(value, torch.optim.Optimizer)]
        if sharing and optimizers and not any(isinstance(one, Sharded) for one in optimizers):
            raise JobkitError("parallel: zero1 shards the optimizer's state: make it by ctx.optimizer(model, ...)")
        if any(_is_torchs_sharded(one) and not isinstance(one, Sharded) for one in optimizers):
            raise JobkitError(
                "a ZeroRedundancyOptimizer of your own would be saved in part: set parallel: zero1 and make it by "
                "ctx.optimizer(model, ...)"
            )

    @property
    def made_something(self) -> bool:
        """Whether there is anything that a checkpoint would have to hold."""
        return bool(self.loaders) or any(one.requires_grad for model in self.modules for one in model.parameters())

    # A step

    def autocast(self) -> AbstractContextManager[Any]:
        """The config's `precision` for the code inside: nothing for fp32, else torch.autocast."""
        precision = self._config.precision
        if precision == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=AUTOCAST[precision])

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
        """Gradients over the global batch; returns the loss of this rank's share. See Context.backward."""
        if global_batch_size is None:
            if len(self.loaders) != 1:
                raise JobkitError(
                    f"ctx.backward takes the global batch's size from the loader, and there are {len(self.loaders)}: "
                    "pass global_batch_size"
                )
            global_batch_size = self.loaders[0].global_batch_size
        self._scale_used = self.scaler.scale if self.scaler is not None else 1.0
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        options: dict[str, Any] = {**sizes, "autocast": self.autocast, "scale": self._scale_used}
        return self.parallel.backward(model, inputs, loss, target, **options)

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> torch.Tensor | None:
        """Unscale, clip, step and set the gradients to None; the norm before clipping. See Context.update."""
        parameters = parameters_of(optimizer)
        norm: torch.Tensor | None = None
        accepted = True
        if self.scaler is not None:
            norm = self.parallel.norm(parameters) / self._scale_used
            accepted = self.scaler.accepts(norm)
            scale_gradients(parameters, 1 / self._scale_used)
        elif max_norm is not None:
            norm = self.parallel.norm(parameters)
        if accepted:
            if norm is not None and max_norm is not None:
                clip_gradients(parameters, max_norm, norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        return norm

    def check_updated(self) -> None:
        """Raise JobkitError where a loop steps its optimizers itself and the config asks for what `update` does."""
        if self._updates:
            return
        if self.scaler is not None:
            raise JobkitError(
                "precision: fp16 needs a loss scale: use ctx.backward(model, ...) and ctx.update(optimizer)"
            )
        if self.parallel.drifts:
            raise JobkitError("comm.local_sgd: take the optimizer's step by ctx.update(optimizer)")

    def average_replicas(self, step: int, optimizers: Iterable[torch.optim.Optimizer], *, is_last: bool) -> None:
        """Local SGD: every `comm.local_sgd` steps, and after the last, the replicas become their mean. Collective."""
        if self.parallel.drifts and (is_last or step % self._config.comm.local_sgd == 0):
            average_replicas(self.modules, list(optimizers), self.parallel.data_group)

    # Averaged weights

    @contextmanager
    def averaged(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """While inside, the parameters are their moving averages, where the optimizer keeps any. Collective."""

        def reshard_all() -> None:
            for module in self.modules:
                reshard(module)

        with ExitStack() as swapped:
            swapped.callback(reshard_all)
            swapped.enter_context(getattr(optimizer, "averaged", nullcontext)())
            reshard_all()
            self._swapped.append(swapped)
            try:
                yield
            finally:
                self._swapped.remove(swapped)

    def end_averaged(self) -> None:
        """Put the parameters themselves back: a stop within `averaged` is about to save them."""
        for swapped in reversed(self._swapped):
            swapped.close()


def _is_torchs_sharded(optimizer: torch.optim.Optimizer) -> bool:
    return any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__)
