"""The state of a run: what the training function tracks, and what jobkit adds of its own.

    ctx.track(model=..., optimizer=...) --> Entry each --> Checkpointer.restore, at once
    loop's begin --> jobkit.generators, jobkit.gradients, jobkit.scaler ... --> restored last

State is what is declared. Three exact guards stay: what ctx made must be tracked, an optimizer that stepped tracked
parameters must be tracked, and what is called replicated is equal on all ranks at the first save after a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.leaves import Entry, plain_module
from jobkit.checkpoint.replicas import check_replicas
from jobkit.checkpoint.staging import check_kind
from jobkit.checkpoint.tree import flatten
from jobkit.data.loader import Loader
from jobkit.data.seeds import derive_seed, generator_state, load_generator_state, seed_generators, seeds_since
from jobkit.errors import CheckpointError, UsageError
from jobkit.log import log
from jobkit.loop.code_options import CodeOptions
from jobkit.loop.rank import Rank
from jobkit.loop.values import Values
from jobkit.run import records
from jobkit.run.records import Seeds
from jobkit.wire.group import RankGroup

OWN = "jobkit."
"""The names of jobkit's own entries begin with this."""


class Tracked:
    """The entries of one rank.

    tracked = Tracked(checkpointer, weights="all")
    tracked.add({"model": model, "optimizer": optimizer}, {})
    tracked.entries
    """

    def __init__(self, checkpointer: Checkpointer, weights: str = "all", *, is_local_sgd: bool = False) -> None:
        self.entries: list[Entry] = []
        self.objects: dict[str, Any] = {}
        """The user's objects by name, in the order of tracking."""
        self.checkpointer = checkpointer
        self._weights, self._is_local_sgd = weights, is_local_sgd
        self.stepped: dict[int, torch.optim.Optimizer] = {}
        """Optimizers that stepped in the step under way."""
        self.reshard: Callable[[], None] = lambda: None
        """Puts the state where it is saved from, and restored to."""
        self.check_frozen: Callable[[], None] = lambda: None
        """Raises UsageError for a state that no longer fits together."""
        self.on_step: Callable[[torch.optim.Optimizer], None] | None = None
        self.has_begun = False
        """True from the first step of this attempt on."""
        self._accepted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Optimizers that have stepped, and may."""
        self.has_files = False
        """True where a framework writes its own files into checkpoints."""
        self.code_options = CodeOptions()
        self._is_checked = False
        self.is_weighted = False
        """True if ctx.backward has weighted the parts of a global batch in the step under way."""
        self._uneven: dict[Loader, int] = {}
        """Tracked loaders with uneven parts, and the samples that they had handed out when the step began."""
        self._hook = register_optimizer_step_post_hook(self._note_step)

    def _note_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(getattr(other, "local_optimizer", None) is optimizer for other in self.optimizers):
            return  # zero1's own, which steps within it
        self.stepped[id(optimizer)] = optimizer
        if self.on_step is not None:
            self.on_step(optimizer)

    def add(self, shared: Mapping[str, Any], per_rank: Mapping[str, Any]) -> None:
        """Track objects, and restore them. Raises UsageError for objects that cannot be tracked."""
        entries = []
        for name, value in [*shared.items(), *per_rank.items()]:
            self._check(name, value)
            if name in self.objects:  # a second call with the same object
                continue
            self.objects[name] = value
            self.code_options.note(name, value)
            entries.append(self._entry(name, value, per_rank=name in per_rank))
        if self.checkpointer.reads:
            self.check_ranks()
        before = list(self.entries)
        is_first = not any(entry.live is self.code_options for entry in before)
        if is_first and any(self.code_options.is_about(value) for value in self.objects.values()):
            entries.append(Entry(name=f"{OWN}given", live=self.code_options, scope="rank", optional=True))
        self._restore(entries)
        if before and entries and not isinstance(entries[0].live, Values):
            # An object that was made since the call before may have changed what that restored, as a scheduler does
            # with its optimizer's learning rate.
            self.restore_again()
        elif self.code_options.is_start:
            self.code_options.apply({entry.name: entry.live for entry in entries})

    def restore_again(self) -> None:
        """Read everything once more: lines that ran since may have changed it."""
        self.reshard()
        self.checkpointer.restore_again()
        if self.code_options.is_start:
            self.code_options.apply(self.objects)

    def small_state(self) -> dict[str, dict[str, Any]]:
        """Return the states of tracked generators, and the numbers and texts of ctx.values."""
        small = (bool, int, float, str, bytes, type(None))
        return {
            entry.name: {key: value for key, value in entry.live.state_dict().items() if isinstance(value, small)}
            for entry in self.entries
            if isinstance(entry.live, (_TorchGenerator, Values))
        }

    def set_small_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Set what `small_state` returned, of the entries that are still tracked."""
        for entry in self.entries:
            if entry.name in state:
                entry.live.load_state_dict(state[entry.name])

    def add_own(self, name: str, live: Any) -> None:
        """Track an object of jobkit's own. A checkpoint of a run that had none may lack it."""
        self._restore([Entry(name=OWN + name, live=live, scope="rank", optional=True)])

    def _restore(self, entries: list[Entry]) -> None:
        self.entries += entries
        self.reshard()
        self.checkpointer.restore(entries)

    def _entry(self, name: str, value: Any, *, per_rank: bool) -> Entry:
        module = plain_module(value)
        if isinstance(value, torch.Generator):
            return Entry(name=name, live=_TorchGenerator(value), scope="rank")
        # With local SGD replicas differ between two averages.
        per_rank = per_rank or (self._is_local_sgd and isinstance(module, (nn.Module, torch.optim.Optimizer)))
        if not isinstance(module, nn.Module):
            per_rank = per_rank or (isinstance(value, Loader) and value.stream is not None)
            return Entry(name=name, live=value, scope="rank" if per_rank else "shared")
        # Each rank's buffers are its own: BatchNorm's averages differ between ranks at a boundary, also under DDP,
        # which broadcasts rank 0's before the next forward.
        buffers = {f"{prefix}.{key}".lstrip(".") for prefix, part in module.named_modules() for key in part._buffers}
        several = self.checkpointer.position.world_size > 1
        frozen: set[str] = set()
        if self._weights == "trainable" and any(parameter.requires_grad for parameter in module.parameters()):
            frozen = {key for key, parameter in module.named_parameters() if not parameter.requires_grad}
        return Entry(
            name=name,
            live=value,
            scope="rank" if per_rank else "shared",
            rank_keys=buffers if several else (),
            frozen=frozen,
        )

    def _check(self, name: str, value: Any) -> None:
        if name.startswith(OWN) or "/" in name or ":" in name:
            raise UsageError(
                f"ctx.track: the name {name!r} cannot be used: no '/', ':' and no {OWN!r} at its beginning"
            )
        if name in self.objects and self.objects[name] is not value:
            raise UsageError(f"ctx.track: there is another object with the name {name!r} already")
        if isinstance(value, torch.Generator):
            return
        module = plain_module(value)
        tensors = chain(module.named_parameters(), module.named_buffers()) if isinstance(module, nn.Module) else ()
        empty = next((key for key, tensor in tensors if is_lazy(tensor) or tensor.is_meta), None)
        if empty is not None:
            raise UsageError(
                f"ctx.track: {name}.{empty} has no values yet: a forward gives them to lazy modules, and "
                "ctx.parallelize to modules on the meta device"
            )
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            hint = "give it both methods"
            if isinstance(value, (int, float, str, bool, list, dict, torch.Tensor)):
                hint = f"ctx.values({name}=...) keeps plain values and tensors"
            elif isinstance(value, DataLoader):
                hint = (
                    "ctx.loader(dataset, ...) makes one with a state; ctx.batches(loader) keeps the place of this one"
                )
            raise UsageError(
                f"ctx.track: {name} is a {type(value).__name__}, which has no state_dict and load_state_dict; {hint}"
            )

    @property
    def named_modules(self) -> dict[str, nn.Module]:
        return {name: value for name, value in self.objects.items() if isinstance(value, nn.Module)}

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.named_modules.values())

    @property
    def shared_modules(self) -> list[nn.Module]:
        """The modules that all ranks have alike."""
        shared = [entry.live for entry in self.entries if entry.scope == "shared"]
        return [value for value in shared if isinstance(value, nn.Module)]

    # The guards

    def check_ranks(self) -> None:
        """Raise UsageError, on all ranks, for a name that some ranks alone track. All ranks call it: before the first
        step, and before a restore, for which a rank would wait alone."""
        values = "calls ctx.values"
        calls = [values if isinstance(value, Values) else f"tracks {name}" for name, value in self.objects.items()]
        everyones = self.checkpointer.ranks.gather(calls)
        for words in dict.fromkeys(chain(*everyones)):
            does = [words in theirs for theirs in everyones]
            if all(does):
                continue
            rank, name = does.index(True), words.removeprefix("tracks ")
            alone = f"per_rank={{{name!r}: {name} if ctx.rank == {rank} else torch.nn.Identity()}}"
            way = f"call ctx.track on every rank; what rank {rank} alone needs is ctx.track({alone})"
            if words == values:
                way = "call it on every rank, each has values of its own"
            raise UsageError(f"rank {rank} {words}, rank {does.index(False)} does not: {way}")

    def check_made(self, made: list[tuple[str, Any]]) -> None:
        """Raise UsageError for an object of ctx's making that is not tracked. `made` are pairs of (words, object)."""
        tracked = {id(plain_module(value)) for value in self.objects.values()}
        for words, value in made:
            if id(plain_module(value)) not in tracked:
                raise UsageError(
                    f"{words} is not tracked, so a run that is interrupted would lose it: call ctx.track(model=..., "
                    "optimizer=..., loader=...) before the loop"
                )

    def check_names(self) -> None:
        """Raise CheckpointError where the checkpoint has an object that the code does not track any more."""
        self.checkpointer.check_weights()
        restored = self.checkpointer.restored
        names = [name for name in self.checkpointer.end_restore() if not name.startswith(OWN)]
        if names and restored is not None:
            raise CheckpointError(
                f"the checkpoint of step {restored.step} has {', '.join(names)}, which the code no longer tracks: "
                "call ctx.track with it before the loop, or start a new run with --fresh"
            )

    def check_optimizers(self) -> None:
        """Raise UsageError for an optimizer that stepped and is not tracked, although what it changes is; or where
        nothing is tracked at all."""
        if self.stepped and not self.is_weighted:
            self._check_parts()
        unknown = [optimizer for optimizer in self.stepped.values() if optimizer not in self._accepted]
        if not unknown:
            return
        named = self.named_modules.items()
        names = {id(item): name for name, module in named for item in module.parameters()}
        for optimizer in unknown:
            name, word = type(optimizer).__name__, "inner" if "optimizer" in self.objects else "optimizer"
            ours = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
            if ours and not any(_has_state_of(value, optimizer) for value in self.objects.values()):
                raise UsageError(
                    f"an optimizer ({name}) changes the tracked {ours[0]} and is not tracked: its state would be lost; "
                    f"call ctx.track({word}=...) with it before the loop"
                )
            if not self.objects and not self.has_files:
                raise UsageError(
                    f"an optimizer ({name}) steps and nothing is tracked: an interrupted run would go on with new "
                    "weights; call ctx.track(model=..., optimizer=...) before the loop, or ctx.values() where no step "
                    "needs the one before"
                )
            self._accepted.add(optimizer)

    def check_plain_state(self) -> None:
        """Before the first step: raise UsageError for a value that no checkpoint can hold."""
        try:
            self.reshard()
            for entry, finder in self.checkpointer.stager.finders(self.entries):
                for path, leaf in finder.find().tensors.items():
                    check_kind(f"{entry.name}/{path}", leaf)
        except CheckpointError as error:
            raise UsageError(f"{error}: no checkpoint could hold it") from error

    def _check_parts(self) -> None:
        """Raise UsageError for a step whose loader handed out uneven parts, and whose gradients nobody weighted."""
        for loader, done in self._uneven.items():
            if loader.done > done:
                raise UsageError(
                    f"ctx.loader: the ranks have uneven parts of a global batch of {loader.global_batch_size}, and "
                    "loss.backward() counts the mean of each alike: use ctx.backward, which weights them, or a "
                    "global_batch_size that the number of ranks divides"
                )

    def check_state(self) -> None:
        """Before a save: the optimizers; at the first save after a step, that replicas are equal on all ranks."""
        self.reshard()
        self.check_optimizers()
        self.check_frozen()
        if self.has_begun and not self._is_checked:
            self._is_checked = True
            check_replicas(self.entries, self.checkpointer.stager, self.checkpointer.ranks)

    # Boundaries

    def begin_step(self) -> None:
        """A step begins: note which optimizers step in it. Raises UsageError as check_optimizers."""
        if self.stepped:
            self.check_optimizers()
            self.stepped.clear()
        if not self.has_begun and not self._is_local_sgd:
            self._uneven = {item: 0 for item in self.objects.values() if isinstance(item, Loader) and item.is_uneven}
        for loader in self._uneven:
            self._uneven[loader] = loader.done
        self.has_begun, self.is_weighted = True, False

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [value for value in self.objects.values() if isinstance(value, torch.optim.Optimizer)]

    def close(self) -> None:
        """Let other runs of this process alone."""
        self._hook.remove()


def _has_state_of(value: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an object that is tracked saves an optimizer's state: the optimizer, or a wrapper, as
    accelerate's. SAM's has the groups of the optimizer within it, and a state_dict without its momentum."""
    if value is optimizer or getattr(value, "state", None) is optimizer.state:
        return True
    if getattr(value, "param_groups", None) is not optimizer.param_groups:
        return False
    saved = {_local(leaf).data_ptr() for leaf in flatten(value.state_dict()).leaves.values()}
    state = flatten(list(optimizer.state.values())).leaves.values()
    return all(_local(leaf).data_ptr() in saved for leaf in state)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def first_gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return the gradient of the first parameter that has a gradient."""
    items = (item for group in optimizer.param_groups for item in group["params"])
    return next((item.grad for item in items if item.grad is not None), None)


class PendingGradients:
    """Gradients that were added up and not used yet: state, where accumulation goes over several steps.

    Of those that an optimizer has used it is only known that they are there, and they come back as zeros: the next step
    makes them zero or deletes them before it adds to them. Of several optimizers some may step more rarely.
    """

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._used: set[int] = set()
        """Ids of parameters whose gradient was used, and not added to since."""
        self._watched: set[int] = set()
        """Ids of parameters that say when something is added to their gradient."""
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int] | None] = {}
        """A gradient of each optimizer at its last step, and how often it had been changed."""
        tracked.on_step = self._note_step
        if len(tracked.optimizers) > 1:
            for _, _, parameter in self._parameters():
                if parameter.requires_grad:
                    self._watched.add(id(parameter))
                    register: Any = parameter.register_post_accumulate_grad_hook
                    register(lambda item: self._used.discard(id(item)))

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._watched:
            self._used |= self._watched.intersection(map(id, parameters_of(optimizer)))
        gradient = first_gradient(optimizer)
        self._seen[id(optimizer)] = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def _is_used(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
        if id(parameter) in self._watched:
            return id(parameter) in self._used
        if id(optimizer) in self._tracked.stepped:
            return not self._is_added_to(optimizer)
        return id(parameter) in self._used and not self._tracked.has_begun

    def _is_added_to(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a backward came after the last step of an optimizer, as in a loop that begins with it."""
        gradient, before = first_gradient(optimizer), self._seen.get(id(optimizer))
        if gradient is None or before is None:
            return gradient is not None
        return before[0]() is not gradient or before[1] != gradient._version

    def _parameters(self) -> list[tuple[str, torch.optim.Optimizer, torch.Tensor]]:
        return [
            (f"{number} {index}", optimizer, parameter)
            for number, optimizer in enumerate(self._tracked.optimizers)
            for index, parameter in enumerate(parameters_of(optimizer))
        ]

    def state_dict(self) -> dict[str, Any]:
        added, used, parameters = {}, [], self._parameters()
        for name, optimizer, parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not self._is_used(optimizer, parameter):
                added[name] = _saved(gradient)
            elif gradient is not None and not gradient.is_sparse:
                used.append(name)
        return {"added": added, "used": "all" if len(used) == len(parameters) else used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        added, used, lost = state["added"], state["used"], 0
        names = None if used == "all" else set(used)
        for name, _, parameter in self._parameters():
            in_bucket = parameter.grad if parameter.grad is not None and parameter.grad._is_view() else None  # of DDP
            parameter.grad = None
            if name in added and isinstance(added[name], dict):
                sparse = torch.sparse_coo_tensor(**added[name], device=parameter.device, check_invariants=False)
                parameter.grad = sparse
            elif name in added:
                parameter.grad = torch.empty_like(parameter) if in_bucket is None else in_bucket
                with torch.no_grad():
                    if _local(parameter.grad).shape != added[name].shape:  # a shard of another number of ranks
                        parameter.grad = None
                        lost += 1
                        continue
                    _local(parameter.grad).copy_(added[name])
            elif names is None or name in names:
                parameter.grad = torch.zeros_like(parameter) if in_bucket is None else in_bucket.zero_()
                self._used.add(id(parameter))
        if lost:
            log.warning("gradients that were added up on another number of ranks are lost: the next update lacks them")


def _saved(gradient: torch.Tensor) -> torch.Tensor | dict[str, Any]:
    """Return a gradient as a checkpoint has it: a sparse one, as an embedding's, in parts, and its rows not added up
    yet, so that their sum keeps its order."""
    if not gradient.is_sparse:
        return _local(gradient)
    parts = {"indices": gradient._indices(), "values": gradient._values(), "size": gradient.shape}
    return {**parts, "is_coalesced": gradient.is_coalesced()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Generators:
    """The states of Python's, NumPy's and torch's generators on this rank.

    On another number of ranks they are seeded anew, by the seed, the step and the rank. `rank` counts shares of the
    data: ranks that compute one share together draw alike.
    """

    def __init__(self, seed: int | None, rank: int, world_size: int, devices: Sequence[torch.device]) -> None:
        self._seed, self._rank, self._world_size, self._devices = seed, rank, world_size, devices

    def begin(self, ranks: RankGroup, rank: Rank) -> None:
        """Seed the generators for the loop of a new run: from here on the ranks draw different numbers.

        They follow from what the program has seeded itself as well, on rank 0, in the run's first attempt.
        """
        if self._seed is None:
            return
        seeds = ranks.on_main(lambda: _own_seeds(rank, derive_seed(self._seed, "init")))
        seed_generators(derive_seed(self._seed, "rank", self._rank, *seeds.items()), *self._devices)

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self._world_size, "states": generator_state(*self._devices)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["world_size"] == self._world_size:
            load_generator_state(state["states"], *self._devices)
        else:
            seed = derive_seed(self._seed, "continued", state["states"]["torch"], self._rank)
            seed_generators(seed, *self._devices)


def _own_seeds(rank: Rank, seed: int) -> dict[str, int]:
    """Return what the program has seeded since jobkit did, with `seed`; of an attempt that got no further, what that
    one had."""
    kept = records.read(Seeds, rank.run.seeds_file)
    seeds = seeds_since(seed) if kept is None else kept.seeds
    if seeds and kept is None:
        rank.check_lease()
        records.write(rank.run.seeds_file, Seeds(seeds=seeds))
    if seeds:
        words = ", ".join(f"torch ({number})" if name == "torch" else name for name, number in seeds.items())
        log.info("the program seeds %s itself: the random numbers of the loop follow from that", words)
    return seeds


class _TorchGenerator:
    """A torch.Generator of the user's, as an object with a state_dict."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state().numpy().tobytes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(torch.frombuffer(bytearray(state["state"]), dtype=torch.uint8))
