"""What a training step is built from: a spread model, its optimizer, a loader, gradients and updates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from jobkit.errors import UsageError
from jobkit.log import log
from jobkit.run.config import Config
from jobkit.run.layout import factor
from jobkit.train.accumulation import SUM, BatchSize, Loss, backward
from jobkit.train.data import Loader
from jobkit.train.devices import AUTOCAST
from jobkit.train.gradients import LossScaler, clip_gradients, scale_gradients
from jobkit.train.hooks import uncompiled
from jobkit.train.left_out_batches import LeftOutBatches
from jobkit.train.local_sgd import average_replicas
from jobkit.train.nested import batch_size
from jobkit.train.optimizer_state import Sharded, is_torchs_sharded, parameters_of
from jobkit.train.order import share_of
from jobkit.train.parallel import Parallel, unwrapped
from jobkit.train.sharding import reshard
from jobkit.train.tracked_generator import TrackedGenerator
from jobkit.train.verification import computes_alike


class Engine:
    """Spreads models over the ranks as a config's `parallel:` says, and computes steps in its `precision:`.

    Where there are several ranks their process group stands. Raises UsageError where the world does not divide as
    `parallel:` asks.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        tasks_per_node: int = 1,
        skipped: Sequence[int] = (),
    ) -> None:
        try:
            layout = factor(config.parallel, world_size, tasks_per_node)
        except ValueError as error:
            raise UsageError(f"parallel: {error}") from None
        self.parallel = Parallel(
            layout, config.parallel, config.comm, device, rank, precision=config.precision, seed=config.seed or 0
        )
        self.scaler = LossScaler() if config.precision == "fp16" else None
        """Part of the state of the run, where there is one."""
        self.modules: list[nn.Module] = []
        """What `parallelize` made, in that order, without torch.compile's wrapper."""
        self.loaders: list[Loader] = []
        self._replaced: list[tuple[weakref.ref[nn.Parameter], str]] = []
        """The parameters that `parallelize` has put shards in the place of, and their names."""
        self._optimizers: list[torch.optim.Optimizer] = []
        """Those that are tracked."""
        self._left_alone: dict[nn.Parameter, str] = {}
        """The names of the parameters that `parallelize` was given frozen: the ranks do not add up their gradients."""
        self._skipped = skipped
        """Ids of samples that the loader leaves out."""
        self._config = config
        self._device = device
        self._skips = LeftOutBatches(config.comm) if config.on_nan == "skip" else None
        self._backwards, self._updates = 0, 0
        self._shares_checked = False
        self._swapped: list[ExitStack] = []
        """Of each `averaged` that the caller is inside of: what ends it."""

    def parallelize(self, module: nn.Module, *, only_divides: bool = False, **options: bool) -> nn.Module:
        """`module` on the device and over the ranks. Raises UsageError for one that cannot be spread that way.

        With `only_divides` it is this rank's part of it, for a look at it: no rank sends another one anything.
        """
        before = dict(module.named_parameters())
        if only_divides:
            self.parallel.check(module, options)
            module = self.parallel.divided(uncompiled(module).to(self._device))
        else:
            module = self.parallel.spread(module, **options)
        now = {id(parameter) for parameter in module.parameters()}
        self._replaced += [(weakref.ref(one), name) for name, one in before.items() if id(one) not in now]
        self.modules.append(uncompiled(module))
        if self.parallel.layout.data > 1 and not self.parallel.drifts and not isinstance(unwrapped(module), FSDPModule):
            frozen = {one: name for name, one in unwrapped(module).named_parameters() if not one.requires_grad}
            self._left_alone.update(frozen)
        for parameter in unwrapped(module).parameters():
            if parameter.requires_grad:  # another module that has it adds its gradients up
                self._left_alone.pop(parameter, None)
        return module

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """`make(parameters, **options)` for the model's trainable parameters; with zero1 each rank keeps a part."""
        reshard(model)  # a forward may have put whole parameters in the place of shards
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self.parallel.optimizer(trainable, make, options)

    def loader(self, dataset: Any, *, name: str | None = None, **options: Any) -> Loader:
        """The Loader of this rank's shares: ranks that compute the same samples together get the same share.

        Its name, by default its number, is a part of its seed: two loaders of a run draw different orders.
        """
        own = str(len(self.loaders)) if name is None else name
        if any(loader.name == own for loader in self.loaders):
            raise UsageError(f"ctx.loader has been given the name {own!r} twice: each loader needs one of its own")
        place: dict[str, Any] = {"rank": self.parallel.data_rank, "world_size": self.parallel.layout.data}
        place |= {"device": self._device, "seed": self._config.seed or 0}
        loader = Loader(dataset, name=own, skipped=self._skipped, **{**place, **options})
        self.loaders.append(loader)
        return loader

    def check_tracked(self, tracked: Iterable[Any]) -> None:
        """Raise UsageError where an interrupted run would lose a part of what was made here, or one trains nothing."""
        for module in self.modules:
            reshard(module)  # a forward may have put whole parameters in the place of shards
        own = [unwrapped(value) for value in tracked]
        trainable = [model for model in self.modules if any(one.requires_grad for one in model.parameters())]
        made = [("the model of ctx.parallelize", model) for model in trainable]
        for what, value in [*made, *(("the loader of ctx.loader", loader) for loader in self.loaders)]:
            if not any(unwrapped(value) is one for one in own):
                raise UsageError(
                    f"{what} is not tracked, so a run that is interrupted would lose it: "
                    "call ctx.track(model=..., optimizer=..., loader=...) before the loop, with each itself and not "
                    "a module that holds it"
                )
        if self._skipped and len(self.loaders) != 1:
            raise UsageError(
                f"samples are to be left out (jobkit rewind --skip-samples), and there are {len(self.loaders)} loaders "
                "of ctx.loader: that is for a run with one"
            )
        sharing = self._config.parallel.data == "zero1" and self.parallel.layout.data > 1
        optimizers = [value for value in own if isinstance(value, torch.optim.Optimizer)]
        if sharing and optimizers and not any(isinstance(one, Sharded) for one in optimizers):
            raise UsageError("parallel: zero1 shards the optimizer's state: make it by ctx.optimizer(model, ...)")
        if any(map(is_torchs_sharded, optimizers)):
            raise UsageError(
                "a ZeroRedundancyOptimizer of your own would be saved in part: set parallel: zero1 and make it by "
                "ctx.optimizer(model, ...)"
            )
        self._check_trained(own, optimizers)

    def _check_trained(self, tracked: list[Any], optimizers: list[torch.optim.Optimizer]) -> None:
        """Raise UsageError for an optimizer of a parameter that no tracked object has: it would train nothing."""
        held = {id(parameter) for holder in tracked for parameter in _parameters_in(holder)}
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                is_placeholder = not isinstance(parameter, nn.Parameter) and not parameter.requires_grad
                if id(parameter) in held or is_placeholder:
                    continue
                replaced = next((name for ref, name in self._replaced if ref() is parameter), None)
                kind = type(optimizer).__name__
                if replaced is not None:
                    raise UsageError(
                        f"the {kind} would train {replaced} as it was before ctx.parallelize put shards in its place, "
                        "and the model would stay as it is: make the optimizer of what ctx.parallelize returns"
                    )
                raise UsageError(
                    f"the {kind} trains a parameter of shape {list(parameter.shape)} that is in no tracked module, "
                    "so a run that is interrupted would lose it: call ctx.track with a module that has it"
                )

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UsageError at a step by a gradient that ranks have not added up: of what was unfrozen too late."""

        def check(*_: Any) -> None:
            for parameter in parameters_of(optimizer) if self._left_alone else ():
                if parameter.grad is not None and (name := self._left_alone.get(parameter)) is not None:
                    raise UsageError(
                        f"{name} was frozen when ctx.parallelize was called, so each rank would train it by its own "
                        "samples alone: freeze what is to be trained later after ctx.parallelize(model, "
                        "find_unused_parameters=True), or use zero3"
                    )

        optimizer.register_step_pre_hook(check)
        self._optimizers.append(optimizer)

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
        global_batch_size: BatchSize | None = None,
        see: Callable[[torch.Tensor], None] = lambda loss: None,
    ) -> torch.Tensor:
        """Gradients over the global batch; returns its mean loss. See Context.backward; `see` is told this rank's."""
        if global_batch_size is None:
            global_batch_size = self._loaders_batch_size(batch_size(inputs))
        self._backwards += 1
        scale = self.scaler.begin(self._has_gradients) if self.scaler is not None else 1.0
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        if self._skips is not None:
            self._skips.before_forward(model)
        options: dict[str, Any] = {**sizes, "autocast": self.autocast, "scale": scale, "see": see}
        found = self.parallel.backward(model, inputs, loss, target, **options)
        if self._skips is not None:
            self._skips.see(found)
        return found

    def computes_alike(
        self,
        model: nn.Module,
        inputs: Any,
        loss: Loss,
        target: Any,
        *,
        micro_batch_size: int | None,
        devices: Sequence[torch.device],
        generators: Sequence[TrackedGenerator],
    ) -> bool:
        """Whether this rank's part of `backward` has the same bits twice; nothing is changed. Raises UsageError."""
        scale = self.scaler.used if self.scaler is not None else 1.0
        options: dict[str, Any] = {"micro_batch_size": micro_batch_size, "autocast": self.autocast, "scale": scale}
        return computes_alike(model, lambda: backward(model, inputs, loss, target, **options), devices, generators)

    def _loaders_batch_size(self, given: int) -> int:
        """The loader's global batch, of which `given` samples must be this rank's share.

        One rank cannot know what the shares of the others add up to where its own is another one.
        """
        ways = f"pass global_batch_size, the samples on all ranks together, or {SUM!r} to have them added up"
        if len(self.loaders) != 1:
            raise UsageError(
                f"ctx.backward takes the global batch's size from the loader, and there are {len(self.loaders)}: {ways}"
            )
        size = self.loaders[0].global_batch_size
        part = share_of(size, self.parallel.data_rank, self.parallel.layout.data)
        share = part.stop - part.start
        if given != share:
            raise UsageError(
                f"ctx.backward was given {given} sample(s), and this rank's share of the loader's {size} is {share}: "
                f"{ways}"
            )
        return size

    def _has_gradients(self) -> bool:
        """Whether an optimizer's next step may use gradients that are there; those of others nobody sets to None."""
        used = [one for optimizer in self._optimizers for one in parameters_of(optimizer)]
        used = used or [one for module in self.modules for one in module.parameters()]
        return any(one.grad is not None for one in used)

    def update(self, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None) -> torch.Tensor | None:
        """Unscale, clip, step and set the gradients to None; the norm before clipping. See Context.update."""
        parameters = parameters_of(optimizer)
        if self._skips is not None and self._skips.is_left_out():
            optimizer.zero_grad(set_to_none=True)
            self._updates += 1
            return None if max_norm is None else torch.full((), torch.nan)
        norm: torch.Tensor | None = None
        accepted = True
        if self.scaler is not None:
            norm = self.parallel.norm(parameters) / self.scaler.used
            accepted = self.scaler.accepts(norm)
            scale_gradients(parameters, 1 / self.scaler.used)
        elif max_norm is not None:
            norm = self.parallel.norm(parameters)
        if accepted:
            if norm is not None and max_norm is not None:
                clip_gradients(parameters, max_norm, norm)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._updates += 1
        return norm

    def takes_skipped(self) -> bool:
        """Whether an update of the step that ends was left out, the same on all ranks; asked once a step."""
        return self._skips is not None and self._skips.end_step()

    @property
    def skipped_in_a_row(self) -> int:
        """How many steps in a row have left an update out."""
        return 0 if self._skips is None else self._skips.in_a_row

    def check_updated(self, *, is_continued: bool) -> None:
        """Raise UsageError where a loop steps its optimizers itself and the config asks for what `update` does.

        `is_continued`: the attempt began with a checkpoint.
        """
        self._check_shares(is_continued)
        if self._updates:
            return
        if self.scaler is not None:
            raise UsageError(
                "precision: fp16 needs a loss scale: use ctx.backward(model, ...) and ctx.update(optimizer)"
            )
        if self._skips is not None:
            raise UsageError(
                "on_nan: skip leaves out what ctx.backward(model, ...) and ctx.update(optimizer) compute: use them, or "
                "set on_nan: stop"
            )
        if self.parallel.drifts:
            raise UsageError("comm.local_sgd: take the optimizer's step by ctx.update(optimizer)")

    def _check_shares(self, is_continued: bool) -> None:
        """Whether a loop that does not weight its gradients has equal shares: the ranks' means are averaged as equals.

        A run that has lost a node goes on with fewer ranks all the same, and says so.
        """
        ranks = self.parallel.layout.data
        if self._backwards or self._shares_checked or self.parallel.drifts:
            return
        self._shares_checked = True
        for size in sorted({loader.global_batch_size for loader in self.loaders if loader.is_trained_on}):
            if size % ranks == 0:
                continue
            problem = (
                f"shares of {size} samples on {ranks} ranks are unequal, and loss.backward() counts the mean of each "
                "rank as much as any other's"
            )
            ways = f"choose a global_batch_size that {ranks} divides, or ctx.backward, which weights the shares"
            if not is_continued:
                raise UsageError(f"{problem}: {ways}")
            if self.parallel.rank == 0:
                least = size // ranks
                off = 100 * max(size / ranks / least - 1, 1 - size / ranks / (least + 1))
                log.warning("%s: a sample's weight is off by up to %.2g %% here. To be exact, %s", problem, off, ways)

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
            torch.clear_autocast_cache()  # inside autocast: it has the weights in another type

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


def _parameters_in(holder: Any) -> list[Any]:
    """The parameters of a module, or of anything that lists them as one does."""
    try:
        return list(holder.parameters())
    except (AttributeError, TypeError):
        return []
