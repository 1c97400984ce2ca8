"""What the function tracks, and what a checkpoint has of all of it together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.train.built import Built, Changes, built, settle, take_changes
from jobkit.train.frozen import FrozenParameters
from jobkit.train.gradient_order import GradientOrder, known_orders, orders_of, settle_all
from jobkit.train.gradients import LossScaler
from jobkit.train.hooks import uncompiled
from jobkit.train.kept_attributes import Saved
from jobkit.train.kept_workers import KeptWorkers
from jobkit.train.local_sgd import averaged_copy
from jobkit.train.modes import Modes, Now
from jobkit.train.names import named_parameters, plain_name
from jobkit.train.parallel import Parallel, unwrapped
from jobkit.worker.beside import Beside, OnDevices, on_device, with_training
from jobkit.worker.marks import Mark
from jobkit.worker.object_states import ObjectStates
from jobkit.worker.pending_gradients import PendingGradients, checksums, set_gradients
from jobkit.worker.restoring import Restoring
from jobkit.worker.shared_buffers import SharedBuffers
from jobkit.worker.state_names import ATTRIBUTES, BESIDE, EPOCHS, GRADIENTS, LOSS_SCALE, PART, VALUES

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
        frozen = FrozenParameters() if weights == "trainable" else None
        self.states = ObjectStates(parallel, group, frozen)
        self._restoring = self._restorer(loaded)
        self._only_weights = self._restorer(only_weights)
        """Of another run's checkpoint, of which modules take their weights, and nothing else is taken."""
        self._built: dict[str, Built] = {}
        """What the function has given optimizers and schedules."""
        self._changed: dict[str, Changes] = {}
        """What it gives them otherwise than that of the run started from."""
        self._modes: dict[str, Modes] = {}
        self._beside: dict[str, Beside] = {}
        """What the checkpoint has beside the states of objects."""
        self._attributes: dict[str, Saved] = {}
        """What it has of modules' attributes, for ranks that have none of their own in it."""
        self.modes_of_save: dict[str, Now] | None = None
        """The modes that the next save takes, where they are not those of the moment it is made."""
        self._marks: dict[str, Mark] = {}
        self._orders: dict[str, list[GradientOrder]] = {}

    def add_module(self, module: nn.Module) -> None:
        self.states.modules.append(module)

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
            self.states.add_optimizer(name, value)
        self._note_built(name, value)
        if self._only_weights is not None and isinstance(value, nn.Module) and not per_rank:
            self._only_weights.restore_weights(name, value)
        if (restoring := self._restoring) is not None and not (name == LOSS_SCALE and restoring.lacks_loss_scale()):
            self._restore(restoring, name, value, per_rank=per_rank)
            self._take_changes(restoring.loaded, name, value)
            settle_all(self._orders[name], restoring.gradient_orders(name))
        value = uncompiled(value) if isinstance(value, nn.Module) else value
        if isinstance(value, nn.Module) and not per_rank and self.states.frozen is not None:
            source = self._restoring or self._only_weights
            self.states.frozen.watch(unwrapped(value), source.tensors_of(name) if source is not None else set())
        (self.own_objects if per_rank else self.objects)[name] = value
        is_restored = self._restoring is not None or self._only_weights is not None
        self._marks[name] = Mark(name, unwrapped(value), is_restored=is_restored)
        if isinstance(value, torch.optim.Optimizer):
            self._pending.watch(value)

    def _note_built(self, name: str, value: Any) -> None:
        if (found := built(value, self.states.names)) is not None:
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
        changed = self._changed[name] = take_changes(value, self.states.names, before, self._built[name])
        if self._parallel.rank == 0:
            for key, (old, new) in changed.items():
                log.info("%s: %s %s -> %s", name, key, old, new)

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
        if (restoring := self._restoring) is None:
            return []
        saved = restoring.names() - ({LOSS_SCALE} if restoring.loaded.of_other_run else set())  # in another precision
        self._restoring = None
        return sorted(saved - self.objects.keys() - self.own_objects.keys())

    def begin_modes(self) -> None:
        """From here on changes of what is trainable and in training mode are state, and those of before are made."""
        for name, value in self._all().items():
            if isinstance(value, nn.Module):
                self._modes[name] = Modes(unwrapped(value), wrapper=value, saved=self.all_objects())
                self._modes[name].set(self._beside.get(name, {}))
        if self._restoring is None or not self._restoring.has_own_state():
            self.restore_attributes()

    def restore_attributes(self) -> None:
        """Set those of modules that the checkpoint has for another number of ranks."""
        for name, saved in self._attributes.items():
            if name in self._modes:
                self._modes[name].set_attributes(saved)

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
            dict.fromkeys([*self.states.modules, *(one for one in self.objects.values() if isinstance(one, nn.Module))])
        )

    # Saving

    def trees(self) -> tuple[dict[str, Any], dict[str, Sequence[int]], dict[str, Any]]:
        """This rank's part of the shared state by name, for what only some ranks have, which, and its own state."""
        shared: dict[str, Any] = {}
        held_by: dict[str, Sequence[int]] = {}
        buffers: dict[str, dict[str, Tensor]] = {}
        beside: dict[str, Beside] = {}
        for name, value in self.objects.items():
            tree = self.states.state(value)
            if isinstance(value, nn.Module):
                tree, buffers[name] = self.buffers.in_state(value, tree)
            averaged = self._parallel.drifts and isinstance(value, REPLICATED)
            self._put(shared, held_by, name, value, averaged_copy(tree) if averaged else tree)
            beside[name] = self._found_beside(name, value, tree)
        own: dict[str, Any] = {"objects": {name: value.state_dict() for name, value in self.own_objects.items()}}
        own["on_device"] = {name: found for name, state in own["objects"].items() if (found := on_device(state))}
        own["buffers"] = {name: found for name, found in buffers.items() if found}
        if self._parallel.drifts:
            own["replica"] = {n: self.states.state(v) for n, v in self.objects.items() if isinstance(v, REPLICATED)}
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
            [] if self.states.frozen is None else [one for one in named_parameters(unwrapped(value)) if one not in tree]
        )
        return {**modes, "left_out": left_out} if left_out else {**modes}

    def _put(self, shared: dict[str, Any], held_by: dict[str, Sequence[int]], name: str, value: Any, tree: Any) -> None:
        part, holders = self.states.part(value)
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
            self.states.load(self.objects[name], saved)
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

    # Restoring

    def _restorer(self, loaded: RestoredCheckpoint | None) -> Restoring | None:
        return None if loaded is None else Restoring(loaded, self.states, self._checkpointer, self._parallel)

    def _restore(self, restoring: Restoring, name: str, value: Any, *, per_rank: bool) -> None:
        if per_rank:
            restoring.restore_own(name, value)
            return
        self._beside[name] = restoring.restore(name, value)
        if attributes := restoring.attributes(name):
            self._attributes[name] = attributes

    def restore_again(self, loaded: RestoredCheckpoint) -> None:
        """Set every object to its state in the checkpoint that the attempt began with."""
        self._restoring = restoring = self._restorer(loaded)
        assert restoring is not None
        for name, value in self.objects.items():
            self._restore(restoring, name, value, per_rank=False)
        for name, value in self.own_objects.items():
            self._restore(restoring, name, value, per_rank=True)
        self.restore_gradients()
        self._restoring = None

    def restore_gradients(self) -> None:
        """Give parameters the gradients that the checkpoint has of them. Before the checkpoint is forgotten."""
        if (restoring := self._restoring) is not None:
            for name, value in self.objects.items():
                restoring.restore_gradients(name, unwrapped(value))
