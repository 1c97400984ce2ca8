"""What one checkpoint has of tracked objects, put into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from jobkit.checkpoint.reader import Contents, RestoredCheckpoint
from jobkit.checkpoint.state import is_raw, unescape
from jobkit.checkpoint.writer import Checkpointer
from jobkit.errors import CheckpointError
from jobkit.train.frozen import frozen_parameters
from jobkit.train.kept_attributes import Saved
from jobkit.train.names import module_state, named_parameters
from jobkit.train.optimizer_state import placed_like
from jobkit.train.parallel import Parallel, unwrapped
from jobkit.worker.beside import Beside, joined, on_its_device
from jobkit.worker.object_states import ObjectStates
from jobkit.worker.pending_gradients import set_gradients
from jobkit.worker.state_names import ATTRIBUTES, BESIDE, GRADIENTS, LOSS_SCALE, PART, VALUES, is_state


class Restoring:
    """Reads a checkpoint's parts for one rank. Every call is collective."""

    def __init__(
        self, loaded: RestoredCheckpoint, states: ObjectStates, checkpointer: Checkpointer, parallel: Parallel
    ) -> None:
        self.loaded = loaded
        self._states = states
        self._checkpointer = checkpointer
        self._world_size = parallel.layout.world_size
        self._device = parallel.device

    def names(self) -> set[str]:
        """The names of the objects that the checkpoint has something of."""
        return {name.split(PART)[0] for name in self.loaded.contents} | self._own_states().keys()

    def tensors_of(self, name: str) -> set[str]:
        """The names of the tensors that the checkpoint has of an object."""
        return {unescape(path) for key, of in self.loaded.contents.items() if is_state(key, name) for path in of}

    def has_own_state(self) -> bool:
        """Whether the checkpoint has what this rank wrote, on as many ranks."""
        return self.loaded.manifest.world_size == self._world_size and self.loaded.local is not None

    def lacks_loss_scale(self) -> bool:
        """Whether another run has computed in another precision."""
        return self.loaded.of_other_run and not any(is_state(key, LOSS_SCALE) for key in self.loaded.contents)

    def gradient_orders(self, name: str) -> list[Any]:
        """Those that an object's gradients were added up in on this rank, as far as they were known."""
        known: list[Any] = (self.loaded.local or {}).get("gradient_order", {}).get(name, [])
        return known

    def restore(self, name: str, value: Any) -> Beside:
        """Set an object to its state; returns what is beside that. Raises CheckpointError for a misfit."""
        state = self._read_state(name, value)
        beside = joined(self._read_all(name + BESIDE))
        with self._as_misfit(name):
            self._states.load(value, state, beside)
        return beside

    def restore_weights(self, name: str, value: nn.Module) -> None:
        """Set a module's weights and buffers, and nothing else."""
        state = self._read_state(name, value)
        beside = joined(self._read_all(name + BESIDE))
        with self._as_misfit(name):
            self._states.load(value, state, {"left_out": beside.get("left_out", ())})

    def attributes(self, name: str) -> Saved:
        """Those of a module that were written for another number of ranks."""
        found: Saved = {}
        for of_stage in self._read_all(name + ATTRIBUTES):
            found.update(of_stage.on(self._device))
        return found

    def restore_own(self, name: str, value: Any) -> None:
        """Set an object of which each rank has its own. Raises CheckpointError for a misfit."""
        before, now = self.loaded.manifest.world_size, self._world_size
        if before != now and name == VALUES:  # rank 0's, for all
            value.load_state_dict(self.loaded.manifest.extra["values"])
            return
        if before != now:
            raise CheckpointError(
                f"{self.loaded.name} was written by {before} rank(s), and {now} are here: "
                f"{name} has a state of its own on each rank, which no other rank can take; "
                f"continue with {before}, or {self.loaded.way_out}"
            )
        states = self._own_states()
        if name not in states:
            raise CheckpointError(
                f"{self.loaded.name} has no {name!r} of each rank (it has: {', '.join(states) or 'none'}); "
                f"the code tracks something the checkpoint was written without: undo that, or {self.loaded.way_out}"
            )
        assert self.loaded.local is not None
        with self._as_misfit(name):
            moved = self.loaded.local["on_device"].get(name, ())
            value.load_state_dict(on_its_device(states[name], moved, self._device))

    def restore_gradients(self, name: str, module: nn.Module) -> None:
        """Give a module's parameters the gradients that the checkpoint has of them."""
        if saved := [key for key in self.loaded.contents if key.startswith(name + GRADIENTS)]:
            with self._as_misfit(name):
                set_gradients(module, self._read_gradients(saved, module))

    def _read_gradients(self, saved: list[str], module: nn.Module) -> dict[str, Tensor]:
        parameters = named_parameters(module)
        templates = {key: _gradients_like(parameters, self.loaded.contents[key]) for key in saved}
        read = self._checkpointer.read(self.loaded, templates, lambda key, path: unescape(path) in parameters)
        return {name: one for tree in read.values() for name, one in tree.items() if name in parameters}

    def _read_state(self, name: str, value: Any) -> Any:
        """What a checkpoint has of an object, as far as this rank needs it."""
        saved = [key for key in self.loaded.contents if is_state(key, name)]
        if not saved:
            there = ", ".join(dict.fromkeys(key.split(PART)[0] for key in self.loaded.contents))
            raise CheckpointError(
                f"{self.loaded.name} has no {name!r} (it has: {there}); "
                f"the code tracks something the checkpoint was written without: undo that, or {self.loaded.way_out}"
            )
        if isinstance(value, nn.Module) and self._states.frozen is None:
            self._check_frozen(name, unwrapped(value))
        whole = saved == [name]
        templates = {key: self._states.template(value, self.loaded.contents[key]) for key in saved}
        wanted = self._states.paths(value)
        read = self._checkpointer.read(
            self.loaded, templates, lambda key, path: whole or wanted is None or path.startswith(wanted)
        )
        with self._as_misfit(name):
            return read[name] if whole else self._states.joined(value, list(read.values()))

    def _read_all(self, name: str) -> list[Any]:
        """What a checkpoint has of a name: several, where each stage of a pipeline has its own."""
        keys = [key for key in self.loaded.contents if key.startswith(name)]
        return list(
            self._checkpointer.read(self.loaded, {key: {} for key in keys}, lambda *_: True).values() if keys else ()
        )

    def _own_states(self) -> dict[str, Any]:
        """The states that this rank alone has, by the object's name; none where fewer ranks wrote the checkpoint."""
        states: dict[str, Any] = (self.loaded.local or {}).get("objects", {})
        return states

    def _check_frozen(self, name: str, module: nn.Module) -> None:
        kept, saved = module_state(module), self.tensors_of(name)  # a module may leave something out by itself
        frozen = frozen_parameters(module).items()
        missing = [key for key, one in frozen if key in kept and key not in saved and is_raw(one)]
        if missing:
            raise CheckpointError(
                f"{self.loaded.name} has no {missing[0]!r} of {name}, which requires no gradient: it was written with "
                f"checkpoint.weights: trainable, or by other code; set that again, or {self.loaded.way_out}"
            )

    @contextmanager
    def _as_misfit(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"{name} does not take its state from {self.loaded.name}: {error}; "
                f"the code or the params that build it changed: undo that, or {self.loaded.way_out}"
            ) from error


def _gradients_like(parameters: Mapping[str, nn.Parameter], contents: Contents) -> dict[str, Any]:
    """Empty tensors, spread as the parameters are, for those of the gradients that are to be spread."""
    names = {unescape(path): entry for path, entry in contents.items() if unescape(path) in parameters}
    placed = {name: placed_like(parameters[name], shape, dtype) for name, (shape, dtype) in names.items()}
    return {name: one for name, one in placed.items() if one is not None}
