"""What the function tracks: from live objects to a checkpoint's trees and back, however they are spread over ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from jobkit.checkpoint.reader import Contents, RestoredCheckpoint
from jobkit.checkpoint.state import escape, is_raw, unescape
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import CheckpointError, UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.train.built import Built, Changes, built, settle, take_changes
from jobkit.train.frozen import FrozenParameters, frozen_parameters
from jobkit.train.gradient_order import GradientOrder, known_orders, orders_of, settle_all
from jobkit.train.gradients import LossScaler
from jobkit.train.hooks import uncompiled
from jobkit.train.kept_attributes import Saved
from jobkit.train.kept_workers import KeptWorkers
from jobkit.train.local_sgd import averaged_copy
from jobkit.train.modes import Modes, Now
from jobkit.train.names import load_module_state, module_state, named_parameters, plain_name
from jobkit.train.optimizer_state import (
    Names,
    Sharded,
    has_torchs_state,
    lay_out_state,
    load_optimizer_state,
    optimizer_state,
    parameter_names,
    parameters_of,
    placed_like,
    tracked_names,
)
from jobkit.train.parallel import Parallel, unwrapped
from jobkit.train.pipeline import Pipeline
from jobkit.train.sharding import reshard
from jobkit.worker.beside import Beside, OnDevices, joined, on_device, on_its_device, with_training
from jobkit.worker.marks import Mark
from jobkit.worker.pending_gradients import PendingGradients, checksums, set_gradients
from jobkit.worker.shared_buffers import SharedBuffers

PART = "#"
"""Between a tracked object's name and the number of a part: of a pipeline's stage, or of zero1's rank."""

VALUES = "#values"
"""The name of ctx.values."""

EPOCHS = "epochs"
"""Of the position of a loop over epochs in a checkpoint: each rank's own, and in the manifest that of rank 0."""

LOSS_SCALE = "loss_scale"
"""The name of fp16's, which jobkit tracks itself."""

GRADIENTS = "#gradients"
"""After the name of a module: the gradients that the next step adds to."""

BESIDE = "#beside"
"""After the name of an object: what is no part of its state, and is needed to restore it."""

ATTRIBUTES = "#attributes"
"""After the name of a module: what its first rank's have as attributes, for another number of ranks."""


REPLICATED = (nn.Module, torch.optim.Optimizer, LossScaler)
"""What local SGD lets drift apart from rank to rank."""


class Position(Protocol):
    """Where a loop stands, beside its step."""

    def state(self) -> dict[str, Any]:
        """Each rank's own."""

    def entry(self) -> dict[str, Any]:
        """Rank 0's, as JSON, for another number of ranks."""


class TrackedState:
    """The tracked objects of one rank. Saving and restoring are collective."""

    def __init__(
        self,
        parallel: Parallel,
        checkpointer: Checkpointer,
        group: RankGroup,
        loaded: RestoredCheckpoint | None,
        *,
        weights: str = "all",
        only_weights: RestoredCheckpoint | None = None,
    ) -> None:
        self.objects: dict[str, Any] = {}
        """What all ranks have in common: equal on each, or a part of a whole."""
        self.own_objects: dict[str, Any] = {}
        """Those of which each rank has one with a state of its own."""
        self.modules: list[nn.Module] = []
        """What ctx.parallelize made, in that order: where the names of an optimizer's parameters come from."""
        self.buffers = SharedBuffers(parallel)
        self.position: Position | None = None
        """Where a loop over epochs stands."""
        self.first_generators: dict[str, Any] | None = None
        """The random numbers that the script began with, where it has its own."""
        self.kept_workers = KeptWorkers()
        self._parallel = parallel
        self._checkpointer = checkpointer
        self._group = group
        self._pending = PendingGradients()
        self._loaded = loaded
        self._only_weights = only_weights
        """Another run's checkpoint of which modules take their weights, and nothing else is taken."""
        self._built: dict[str, Built] = {}
        """What the function has given optimizers and schedules."""
        self._changed: dict[str, Changes] = {}
        """What it gives them otherwise than that of the run started from."""
        self._names: Names = {}
        self._named: set[torch.optim.Optimizer] = set()
        """Those whose state is saved by the names of their parameters."""
        self._modes: dict[str, Modes] = {}
        self._beside: dict[str, Beside] = {}
        """What the checkpoint has beside the states of objects."""
        self._attributes: dict[str, Saved] = {}
        """What it has of modules' attributes, for ranks that have none of their own in it."""
        self.modes_of_save: dict[str, Now] | None = None
        """The modes that the next save takes, where they are not those of the moment it is made."""
        self._marks: dict[str, Mark] = {}
        self._orders: dict[str, list[GradientOrder]] = {}
        self._frozen = FrozenParameters() if weights == "trainable" else None

    def add_module(self, module: nn.Module) -> None:
        self.modules.append(module)

    def name_parameters(self, objects: Mapping[str, Any]) -> None:
        """Know the parameters of ctx.parallelize's modules, and of these, as they are now: before optimizers are added.

        A head may have been replaced since ctx.parallelize.
        """
        for module in self.modules:
            reshard(module)  # a forward may have put whole parameters in the place of shards
        modules = {name: unwrapped(value) for name, value in objects.items() if isinstance(value, nn.Module)}
        names = parameter_names(unwrapped(one) for one in self.modules)
        self._names = {**tracked_names(modules), **self._names, **names}

    def check_name(self, name: str, value: Any) -> None:
        """Raise UsageError for a name that an object cannot be tracked by."""
        known = self._all().get(name)
        own = uncompiled(value) if isinstance(value, nn.Module) else value
        if known is not None and known is not own:
            raise UsageError(f"ctx.track({name}=...): another object has that name; give each one a name of its own")
        if PART in name or name == LOSS_SCALE:
            raise UsageError(f"ctx.track: {name!r} cannot be a name: jobkit keeps something of its own by it")

    def add(self, name: str, value: Any, *, per_rank: bool = False) -> None:
        """Track an object; where the run is being continued it is restored. Raises CheckpointError for a misfit."""
        per_rank = per_rank or getattr(value, "state_is_per_rank", False)
        self._orders[name] = orders_of(value)
        if isinstance(value, torch.optim.Optimizer):
            if self._can_be_named(value):
                self._named.add(value)
            elif has_torchs_state(value) and any(isinstance(one.data, DTensor) for one in parameters_of(value)):
                raise UsageError(
                    f"ctx.track({name}=...): the {type(value).__name__} has parameters that ranks share out and others "
                    "that are in no tracked module yet: track the modules of all before it, or together with it"
                )
        self._note_built(name, value)
        if self._only_weights is not None and isinstance(value, nn.Module) and not per_rank:
            self._restore_weights(self._only_weights, name, value)
        if self._loaded is not None and not (name == LOSS_SCALE and self._has_no_scale(self._loaded)):
            (self._restore_own if per_rank else self._restore)(self._loaded, name, value)
            self._take_changes(self._loaded, name, value)
            known = (self._loaded.local or {}).get("gradient_order", {}).get(name, [])
            settle_all(self._orders[name], known)
        value = uncompiled(value) if isinstance(value, nn.Module) else value
        if isinstance(value, nn.Module) and not per_rank and self._frozen is not None:
            self._frozen.watch(unwrapped(value), self._saved_tensors(name))
        (self.own_objects if per_rank else self.objects)[name] = value
        is_restored = self._loaded is not None or self._only_weights is not None
        self._marks[name] = Mark(name, unwrapped(value), is_restored=is_restored)
        if isinstance(value, torch.optim.Optimizer):
            self._pending.watch(value)

    def _note_built(self, name: str, value: Any) -> None:
        if (found := built(value, self._names)) is not None:
            self._built[name] = found

    def _take_changes(self, loaded: RestoredCheckpoint, name: str, value: Any) -> None:
        """Where the run starts from another's checkpoint: what its own function gives otherwise."""
        if not loaded.of_other_run or name not in self._built:
            return
        before = self._beside.get(name, {}).get("built")
        if before is None:
            if self._parallel.rank == 0:
                log.info("%s: an older jobkit wrote %s, so all its options are as they are in there", name, loaded.name)
            return
        changed = self._changed[name] = take_changes(value, self._names, before, self._built[name])
        if self._parallel.rank == 0:
            for key, (old, new) in changed.items():
                log.info("%s: %s %s -> %s", name, key, old, new)

    def _has_no_scale(self, loaded: RestoredCheckpoint) -> bool:
        """Whether another run has computed in another precision."""
        return loaded.of_other_run and not any(_is_state(key, LOSS_SCALE) for key in loaded.contents)

    def settle_schedules(self) -> None:
        """Where the run starts from another's checkpoint: the rates of this step. All is tracked."""
        for name, changed in self._changed.items():
            if isinstance(value := self._all()[name], LRScheduler):
                settle(value, changed)

    def check_unchanged(self) -> None:
        """Raise UsageError for an object that was changed since it was tracked, as each resume would do again."""
        for mark in self._marks.values():
            mark.check()

    def forget_checkpoint(self) -> list[str]:
        """Nothing is restored from here on; returns the names in the checkpoint that nothing was tracked for.

        Raises UsageError where only weights were to be taken, and there was no module for them.
        """
        if self._only_weights is not None and not any(isinstance(one, nn.Module) for one in self.objects.values()):
            raise UsageError(
                "--weights-only: no module is tracked, so none has taken the weights of the run started from: "
                "ctx.track(model=...) comes before the loop"
            )
        self._only_weights = None
        if self._loaded is None:
            return []
        saved = {name.split(PART)[0] for name in self._loaded.contents} | _own_states(self._loaded).keys()
        saved -= {LOSS_SCALE} if self._loaded.of_other_run else set()  # it may compute in another precision
        self._loaded = None
        return sorted(saved - self.objects.keys() - self.own_objects.keys())

    def begin_modes(self) -> None:
        """From here on changes of what is trainable and in training mode are state, and those of before are made."""
        for name, value in self._all().items():
            if isinstance(value, nn.Module):
                self._modes[name] = Modes(unwrapped(value), wrapper=value, saved=self.all_objects())
                self._modes[name].set(self._beside.get(name, {}))
        if not self._has_own_state():
            self.restore_attributes()

    def restore_attributes(self) -> None:
        """Set those of modules that the checkpoint has for another number of ranks."""
        for name, saved in self._attributes.items():
            if name in self._modes:
                self._modes[name].set_attributes(saved)

    def _has_own_state(self) -> bool:
        """Whether the checkpoint has what this rank wrote, on as many ranks."""
        loaded = self._loaded
        same = loaded is not None and loaded.manifest.world_size == self._parallel.layout.world_size
        return same and loaded is not None and loaded.local is not None

    def modes(self) -> dict[str, Now]:
        """Those of this moment, for `modes_of_save`."""
        return {name: modes.now() for name, modes in self._modes.items()}

    def all_objects(self) -> list[Any]:
        """Every tracked object."""
        return list(self._all().values())

    def _all(self) -> dict[str, Any]:
        return {**self.objects, **self.own_objects}

    def replicas(self) -> list[nn.Module]:
        """The modules that all ranks have: what ctx.parallelize made, and what a user made and maybe put into DDP."""
        return list(
            dict.fromkeys([*self.modules, *(one for one in self.objects.values() if isinstance(one, nn.Module))])
        )

    # Saving

    def module_state(self, value: nn.Module) -> dict[str, Any]:
        """What is saved of a module, and exported: by the names of the user's own, whatever wraps it."""
        state = module_state(unwrapped(value))
        for key in self.left_out(value):
            state.pop(key, None)
        return state

    def left_out(self, value: nn.Module) -> list[str]:
        """The names of the module's parameters that are not saved, `checkpoint.weights: trainable`. Collective."""
        if self._frozen is None:
            return []
        module = unwrapped(value)
        untouched = self._frozen.untouched(module)
        touched = frozen_parameters(module).keys() - set(untouched)
        # Of a shared one the part of one rank may have changed, and another's be empty.
        anywhere = {name for of_one in self._group.gather(sorted(touched)) for name in of_one}
        return [name for name in untouched if name not in anywhere]

    def trees(self) -> tuple[dict[str, Any], dict[str, Sequence[int]], dict[str, Any]]:
        """This rank's part of the shared state by name, for what only some ranks have, which, and its own state."""
        shared: dict[str, Any] = {}
        held_by: dict[str, Sequence[int]] = {}
        buffers: dict[str, dict[str, Tensor]] = {}
        beside: dict[str, Beside] = {}
        for name, value in self.objects.items():
            tree = self._state(value)
            if isinstance(value, nn.Module):
                tree, buffers[name] = self.buffers.in_state(value, tree)
            averaged = self._parallel.drifts and isinstance(value, REPLICATED)
            self._put(shared, held_by, name, value, averaged_copy(tree) if averaged else tree)
            beside[name] = self._found_beside(name, value, tree)
        own: dict[str, Any] = {"objects": {name: value.state_dict() for name, value in self.own_objects.items()}}
        own["on_device"] = {name: found for name, state in own["objects"].items() if (found := on_device(state))}
        own["buffers"] = {name: found for name, found in buffers.items() if found}
        if self._parallel.drifts:
            own["replica"] = {n: self._state(v) for n, v in self.objects.items() if isinstance(v, REPLICATED)}
        if memory := [compression.state_dict() for compression in self._parallel.compressions]:
            own["compressions"] = memory
        if orders := {name: known_orders(found) for name, found in self._orders.items() if found}:
            own["gradient_order"] = orders
        modes = {name: changes for name in self._modes if (changes := self._changed_modes(name))}
        pending = self._pending_gradients()
        told = {name: (list(found), checksums(found)) for name, found in pending.items()}
        layout = self._parallel.layout
        stage = layout.stage(self._parallel.rank)
        training = {name: changes.get("training", {}) for name, changes in modes.items()}
        everyones = self._group.gather((told, training))
        alike = [told for rank, told in enumerate(everyones) if layout.stage(rank) == stage]
        self._add_gradients(shared, held_by, own, pending, [gradients for gradients, _ in alike])
        own["attributes"] = self._put_attributes(shared, held_by)
        for name, about in beside.items():
            if firsts := alike[0][1].get(name):
                about["training"] = firsts
                modes[name] = with_training(modes.get(name, {}), firsts)
            if about:
                self._put(shared, held_by, name + BESIDE, self.objects[name], about)
        own["modes"] = modes
        if self.first_generators is not None:
            own["first_generators"] = self.first_generators
        own["kept_workers"] = self.kept_workers.state()
        if self.position is not None:
            own[EPOCHS] = self.position.state()
        return shared, held_by, own

    def _put_attributes(self, shared: dict[str, Any], held_by: dict[str, Sequence[int]]) -> dict[str, OnDevices]:
        """Each rank's own; those of the first rank of a stage are for another number of ranks, too."""
        found = {name: changed for name, modes in self._modes.items() if (changed := modes.attributes())}
        own = {name: OnDevices.of(attributes) for name, attributes in found.items()}
        layout, rank = self._parallel.layout, self._parallel.rank
        stage = layout.stage(rank)
        if rank == next(one for one in range(layout.world_size) if layout.stage(one) == stage):
            for name in own.keys() & self.objects.keys():
                key = f"{name}{ATTRIBUTES}{PART}{stage:05d}"
                shared[key], held_by[key] = own[name], [rank]
        return own

    def manifest_entries(self) -> dict[str, Any]:
        """What a checkpoint says of the state in its manifest, on rank 0, as JSON."""
        values = self.own_objects.get(VALUES)
        return {
            "tracked": [name for name in self._all() if name not in (VALUES, LOSS_SCALE)],
            "modules": [name for name, value in self.objects.items() if isinstance(value, nn.Module)],
            **({EPOCHS: self.position.entry()} if self.position is not None else {}),
            **({"values": values.state_dict()} if values is not None else {}),
        }

    def _pending_gradients(self) -> dict[str, dict[str, Tensor]]:
        modules = {name: unwrapped(value) for name, value in self._all().items() if isinstance(value, nn.Module)}
        return {name: found for name, module in modules.items() if (found := self._pending.of(module))}

    def _changed_modes(self, name: str) -> dict[str, dict[str, bool]]:
        return self._modes[name].changes((self.modes_of_save or {}).get(name))

    def _found_beside(self, name: str, value: Any, tree: Any) -> Beside:
        beside: Beside = {"built": self._built[name]} if name in self._built else {}
        if isinstance(value, torch.optim.Optimizer):  # which puts its state where its parameters are
            return beside
        if not isinstance(value, nn.Module):
            return {**beside, "on_device": found} if (found := on_device(tree)) else beside
        modes = self._changed_modes(name) if name in self._modes else {}
        modes.pop("training", None)  # in which a rank may differ, as after a validation that it alone has made
        left_out = (
            [] if self._frozen is None else [one for one in named_parameters(unwrapped(value)) if one not in tree]
        )
        return {**modes, "left_out": left_out} if left_out else {**modes}

    def _put(self, shared: dict[str, Any], held_by: dict[str, Sequence[int]], name: str, value: Any, tree: Any) -> None:
        part, holders = self._part(value)
        key = name if part is None else f"{name}{PART}{part:05d}"
        shared[key] = tree
        if part is not None:
            held_by[key] = holders

    def _add_gradients(
        self,
        shared: dict[str, Any],
        held_by: dict[str, Sequence[int]],
        own: dict[str, Any],
        pending: Mapping[str, Mapping[str, Tensor]],
        alike: Sequence[Mapping[str, Any]],
    ) -> None:
        """Those that ranks have added up are one for all; others are each rank's own, and their mean is for all.

        `alike`: what each rank of this stage has, names and checksums.
        """
        for name in dict.fromkeys(name for found in alike for name in found):
            found = pending.get(name, {})
            if name in self.own_objects or any(other.get(name) != alike[0].get(name) for other in alike):
                own.setdefault("gradients", {})[name] = {n: g for n, g in found.items() if not isinstance(g, DTensor)}
            if name in self.objects:
                names = {one for other in alike if name in other for one in other[name][0]}
                mean = (
                    found
                    if name not in own.get("gradients", {})
                    else self._mean(unwrapped(self.objects[name]), found, names)
                )
                self._put(shared, held_by, name + GRADIENTS, self.objects[name], mean)

    def _mean(self, module: nn.Module, found: Mapping[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
        parameters = {name: parameter for name, parameter in named_parameters(module).items() if name in names}
        whole = {name: found[name] if name in found else torch.zeros_like(p) for name, p in parameters.items()}
        sharded = {name: gradient for name, gradient in whole.items() if isinstance(gradient, DTensor)}
        plain = {name: gradient for name, gradient in whole.items() if name not in sharded}
        return {**averaged_copy(plain, self._parallel.data_group), **sharded}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        for compression, saved in zip(self._parallel.compressions, state.get("compressions", []), strict=False):
            compression.load_state_dict(saved)
        for name, saved in state.get("replica", {}).items():
            self._load(self.objects[name], saved)
        for name, saved in state.get("buffers", {}).items():
            live = dict(unwrapped(self.objects[name]).named_buffers(remove_duplicate=False))
            for key, buffer in live.items():
                if plain_name(key) in saved:
                    buffer.copy_(saved[plain_name(key)])
        for name, changes in state.get("modes", {}).items():
            if name in self._modes:
                self._modes[name].set(changes)
        for name, values in state.get("attributes", {}).items():
            if name in self._modes:
                self._modes[name].set_attributes(values.on(self._parallel.device))
        for name, saved in state.get("gradients", {}).items():
            set_gradients(unwrapped(self._all()[name]), saved)
        self.kept_workers.continue_from(state.get("kept_workers", ()))

    def _can_be_named(self, optimizer: torch.optim.Optimizer) -> bool:
        return has_torchs_state(optimizer) and all(one in self._names for one in parameters_of(optimizer))

    def _is_named(self, value: Any) -> bool:
        return isinstance(value, torch.optim.Optimizer) and value in self._named

    def _state(self, value: Any) -> Any:
        if self._is_named(value):
            unnamed = next((one for one in parameters_of(value) if one not in self._names), None)
            if unnamed is not None:
                raise UsageError(
                    f"the {type(value).__name__} was given a parameter of shape {list(unnamed.shape)} after ctx.track, "
                    "which no attempt that continues the run would have: make its groups before ctx.track"
                )
            return optimizer_state(value, self._names)
        return self.module_state(value) if isinstance(value, nn.Module) else value.state_dict()

    def _part(self, value: Any) -> tuple[int | None, Sequence[int]]:
        """Which part of an object this rank has, and the ranks that have it too; None for the whole."""
        layout, rank = self._parallel.layout, self._parallel.rank
        if isinstance(value, Sharded):
            return rank, [rank]
        if isinstance(value, Pipeline) or (layout.pipeline > 1 and self._is_named(value)):
            stage = layout.stage(rank)
            return stage, [one for one in range(layout.world_size) if layout.stage(one) == stage]
        return None, ()

    # Restoring

    def _saved_tensors(self, name: str) -> set[str]:
        """The names of the tensors that the checkpoint has of an object."""
        loaded = self._loaded or self._only_weights
        contents = {} if loaded is None else loaded.contents
        return {unescape(path) for key, of in contents.items() if _is_state(key, name) for path in of}

    def _restore_own(self, loaded: RestoredCheckpoint, name: str, value: Any) -> None:
        before, now = loaded.manifest.world_size, self._parallel.layout.world_size
        if before != now and name == VALUES:  # rank 0's, for all
            value.load_state_dict(loaded.manifest.extra["values"])
            return
        if before != now:
            raise CheckpointError(
                f"{loaded.name} was written by {before} rank(s), and {now} are here: {name} has a state of its own on "
                f"each rank, which no other rank can take; continue with {before}, or {loaded.way_out}"
            )
        states = _own_states(loaded)
        if name not in states:
            raise CheckpointError(
                f"{loaded.name} has no {name!r} of each rank (it has: {', '.join(states) or 'none'}); "
                f"the code tracks something the checkpoint was written without: undo that, or {loaded.way_out}"
            )
        assert loaded.local is not None
        with _as_misfit(loaded, name):
            moved = loaded.local["on_device"].get(name, ())
            value.load_state_dict(on_its_device(states[name], moved, self._parallel.device))

    def restore_again(self, loaded: RestoredCheckpoint) -> None:
        """Set every object to its state in the checkpoint that the attempt began with."""
        self._loaded = loaded
        for name, value in self.objects.items():
            self._restore(loaded, name, value)
        for name, value in self.own_objects.items():
            self._restore_own(loaded, name, value)
        self.restore_gradients()
        self._loaded = None

    def restore_gradients(self) -> None:
        """Give parameters the gradients that the checkpoint has of them. Before the checkpoint is forgotten."""
        for name, value in self.objects.items() if self._loaded is not None else ():
            assert self._loaded is not None
            if saved := [key for key in self._loaded.contents if key.startswith(name + GRADIENTS)]:
                with _as_misfit(self._loaded, name):
                    set_gradients(unwrapped(value), self._read_gradients(self._loaded, saved, unwrapped(value)))

    def _read_gradients(self, loaded: RestoredCheckpoint, saved: list[str], module: nn.Module) -> dict[str, Tensor]:
        parameters = named_parameters(module)
        templates = {key: _gradients_like(parameters, loaded.contents[key]) for key in saved}
        read = self._checkpointer.read(loaded, templates, lambda key, path: unescape(path) in parameters)
        return {name: one for tree in read.values() for name, one in tree.items() if name in parameters}

    def _restore(self, loaded: RestoredCheckpoint, name: str, value: Any) -> None:
        state = self._read_state(loaded, name, value)
        self._beside[name] = beside = joined(self._read_all(loaded, name + BESIDE))
        for of_stage in self._read_all(loaded, name + ATTRIBUTES):
            self._attributes.setdefault(name, {}).update(of_stage.on(self._parallel.device))
        with _as_misfit(loaded, name):
            self._load(value, state, beside)

    def _restore_weights(self, loaded: RestoredCheckpoint, name: str, value: nn.Module) -> None:
        state = self._read_state(loaded, name, value)
        beside = joined(self._read_all(loaded, name + BESIDE))
        with _as_misfit(loaded, name):
            self._load(value, state, {"left_out": beside.get("left_out", ())})

    def _read_state(self, loaded: RestoredCheckpoint, name: str, value: Any) -> Any:
        """What a checkpoint has of an object, as far as this rank needs it."""
        saved = [key for key in loaded.contents if _is_state(key, name)]
        if not saved:
            there = ", ".join(dict.fromkeys(key.split(PART)[0] for key in loaded.contents))
            raise CheckpointError(
                f"{loaded.name} has no {name!r} (it has: {there}); "
                f"the code tracks something the checkpoint was written without: undo that, or {loaded.way_out}"
            )
        if isinstance(value, nn.Module) and self._frozen is None:
            _check_frozen(loaded, name, unwrapped(value), self._saved_tensors(name))
        whole = saved == [name]
        templates = {key: self._template(value, loaded.contents[key]) for key in saved}
        wanted = self._paths(value)
        read = self._checkpointer.read(
            loaded, templates, lambda key, path: whole or wanted is None or path.startswith(wanted)
        )
        with _as_misfit(loaded, name):
            return read[name] if whole else self._joined(value, list(read.values()))

    def _read_all(self, loaded: RestoredCheckpoint, name: str) -> list[Any]:
        """What a checkpoint has of a name: several, where each stage of a pipeline has its own."""
        keys = [key for key in loaded.contents if key.startswith(name)]
        return list(
            self._checkpointer.read(loaded, {key: {} for key in keys}, lambda *_: True).values() if keys else ()
        )

    def _load(self, value: Any, state: Any, beside: Beside | None = None) -> None:
        beside = beside or {}
        if self._is_named(value):
            load_optimizer_state(value, self._names, state)
        elif isinstance(value, nn.Module):
            module = unwrapped(value)
            if self._frozen is not None:
                self._frozen.complete(module, state, beside.get("left_out", ()))
            load_module_state(module, state)
        elif isinstance(value, torch.optim.Optimizer):
            value.load_state_dict(state)
        else:
            value.load_state_dict(on_its_device(state, beside.get("on_device", ()), self._parallel.device))
        if isinstance(value, torch.optim.Optimizer):
            lay_out_state(value)

    def _template(self, value: Any, contents: Contents) -> Any:
        """Live tensors, or tensors spread as live ones are, for what a checkpoint has of an object."""
        if not self._is_named(value):
            return module_state(unwrapped(value)) if isinstance(value, nn.Module) else {}
        parameters = {self._names[parameter]: parameter for parameter in parameters_of(value)}
        state: dict[str, dict[str, Any]] = {}
        for path, (shape, dtype) in contents.items():
            parts = [unescape(part) for part in path.split("/")]
            if len(parts) == 3 and parts[0] == "state" and parts[1] in parameters:
                placed = placed_like(parameters[parts[1]], shape, dtype)
                if placed is not None:
                    state.setdefault(parts[1], {})[parts[2]] = placed
        return {"state": state}

    def _paths(self, value: Any) -> tuple[str, ...] | None:
        """What the paths of an object's tensors begin with, of those this rank needs; None for all."""
        if self._is_named(value):
            return tuple(f"state/{escape(self._names[parameter])}/" for parameter in parameters_of(value))
        if isinstance(value, nn.Module):
            return tuple(escape(key) for key in module_state(unwrapped(value)))
        return None

    def _joined(self, value: Any, parts: list[Any]) -> Any:
        if self._is_named(value):
            return {
                **parts[0],
                "state": {name: state for part in parts for name, state in part["state"].items()},
                "param_groups": [group for part in parts for group in part["param_groups"]],
            }
        own = module_state(unwrapped(value))
        return {key: tensor for part in parts for key, tensor in part.items() if key in own}


def _is_state(key: str, name: str) -> bool:
    """Whether a checkpoint has the state of an object, or a part of it, by a key."""
    beside = (GRADIENTS, BESIDE, ATTRIBUTES)
    return key.split(PART)[0] == name and not any(one in key for one in beside)


def _own_states(loaded: RestoredCheckpoint) -> dict[str, Any]:
    """The states that this rank alone has, by the object's name; none where fewer ranks wrote the checkpoint."""
    states: dict[str, Any] = (loaded.local or {}).get("objects", {})
    return states


def _check_frozen(loaded: RestoredCheckpoint, name: str, module: nn.Module, saved: Collection[str]) -> None:
    kept = module_state(module)  # a module may leave something out by itself
    frozen = frozen_parameters(module).items()
    missing = [key for key, one in frozen if key in kept and key not in saved and is_raw(one)]
    if missing:
        raise CheckpointError(
            f"{loaded.name} has no {missing[0]!r} of {name}, which requires no gradient: it was written with "
            f"checkpoint.weights: trainable, or by other code; set that again, or {loaded.way_out}"
        )


@contextmanager
def _as_misfit(loaded: RestoredCheckpoint, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{name} does not take its state from {loaded.name}: {error}; "
            f"the code or the params that build it changed: undo that, or {loaded.way_out}"
        ) from error


def _gradients_like(parameters: Mapping[str, nn.Parameter], contents: Contents) -> dict[str, Any]:
    """Empty tensors, spread as the parameters are, for those of the gradients that are to be spread."""
    names = {unescape(path): entry for path, entry in contents.items() if unescape(path) in parameters}
    placed = {name: placed_like(parameters[name], shape, dtype) for name, (shape, dtype) in names.items()}
    return {name: one for name, one in placed.items() if one is not None}
