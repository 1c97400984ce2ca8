"""One tracked object as a tree of plain values and tensors, and back, however it is spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.reader import Contents
from jobkit.checkpoint.state import escape, unescape
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.train.frozen import FrozenParameters, frozen_parameters
from jobkit.train.names import load_module_state, module_state
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
from jobkit.worker.beside import Beside, on_its_device


class ObjectStates:
    """What tracked objects save and take, for one rank; knows parameters by their names."""

    def __init__(self, parallel: Parallel, group: RankGroup, frozen: FrozenParameters | None) -> None:
        self.modules: list[nn.Module] = []
        """What ctx.parallelize made, in that order: where the names of an optimizer's parameters come from."""
        self.names: Names = {}
        self.frozen = frozen
        """Which frozen parameters are left out, `checkpoint.weights: trainable`; None where all are saved."""
        self._parallel = parallel
        self._group = group
        self._named: set[torch.optim.Optimizer] = set()
        """Those whose state is saved by the names of their parameters."""

    def name_parameters(self, objects: Mapping[str, Any]) -> None:
        """Know the parameters of ctx.parallelize's modules, and of these, as they are now: before optimizers are added.

        A head may have been replaced since ctx.parallelize.
        """
        for module in self.modules:
            reshard(module)  # a forward may have put whole parameters in the place of shards
        modules = {name: unwrapped(value) for name, value in objects.items() if isinstance(value, nn.Module)}
        names = parameter_names(unwrapped(one) for one in self.modules)
        self.names = {**tracked_names(modules), **self.names, **names}

    def add_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """From here on its state goes by the names of its parameters, where all have one. Raises UsageError."""
        if self._can_be_named(optimizer):
            self._named.add(optimizer)
        elif has_torchs_state(optimizer) and any(isinstance(one.data, DTensor) for one in parameters_of(optimizer)):
            raise UsageError(
                f"ctx.track({name}=...): the {type(optimizer).__name__} has parameters that ranks share out and others "
                "that are in no tracked module yet: track the modules of all before it, or together with it"
            )

    def _can_be_named(self, optimizer: torch.optim.Optimizer) -> bool:
        return has_torchs_state(optimizer) and all(one in self.names for one in parameters_of(optimizer))

    def is_named(self, value: Any) -> bool:
        """Whether it is an optimizer whose state is saved by the names of its parameters."""
        return isinstance(value, torch.optim.Optimizer) and value in self._named

    # From objects to trees

    def state(self, value: Any) -> Any:
        """What is saved of an object. Raises UsageError."""
        if self.is_named(value):
            unnamed = next((one for one in parameters_of(value) if one not in self.names), None)
            if unnamed is not None:
                raise UsageError(
                    f"the {type(value).__name__} was given a parameter of shape {list(unnamed.shape)} after ctx.track, "
                    "which no attempt that continues the run would have: make its groups before ctx.track"
                )
            return optimizer_state(value, self.names)
        return self.module_state(value) if isinstance(value, nn.Module) else value.state_dict()

    def module_state(self, value: nn.Module) -> dict[str, Any]:
        """What is saved of a module, and exported: by the names of the user's own, whatever wraps it."""
        state = module_state(unwrapped(value))
        for key in self.left_out(value):
            state.pop(key, None)
        return state

    def left_out(self, value: nn.Module) -> list[str]:
        """The names of the module's parameters that are not saved, `checkpoint.weights: trainable`. Collective."""
        if self.frozen is None:
            return []
        module = unwrapped(value)
        untouched = self.frozen.untouched(module)
        touched = frozen_parameters(module).keys() - set(untouched)
        # Of a shared one the part of one rank may have changed, and another's be empty.
        anywhere = {name for of_one in self._group.gather(sorted(touched)) for name in of_one}
        return [name for name in untouched if name not in anywhere]

    def part(self, value: Any) -> tuple[int | None, Sequence[int]]:
        """Which part of an object this rank has, and the ranks that have it too; None for the whole."""
        layout, rank = self._parallel.layout, self._parallel.rank
        if isinstance(value, Sharded):
            return rank, [rank]
        if isinstance(value, Pipeline) or (layout.pipeline > 1 and self.is_named(value)):
            stage = layout.stage(rank)
            return stage, [one for one in range(layout.world_size) if layout.stage(one) == stage]
        return None, ()

    # From trees to objects

    def load(self, value: Any, state: Any, beside: Beside | None = None) -> None:
        """Set an object to what `state` has saved of it, with what was kept beside that."""
        beside = beside or {}
        if self.is_named(value):
            load_optimizer_state(value, self.names, state)
        elif isinstance(value, nn.Module):
            module = unwrapped(value)
            if self.frozen is not None:
                self.frozen.complete(module, state, beside.get("left_out", ()))
            load_module_state(module, state)
        elif isinstance(value, torch.optim.Optimizer):
            value.load_state_dict(state)
        else:
            value.load_state_dict(on_its_device(state, beside.get("on_device", ()), self._parallel.device))
        if isinstance(value, torch.optim.Optimizer):
            lay_out_state(value)

    def template(self, value: Any, contents: Contents) -> Any:
        """Live tensors, or tensors spread as live ones are, for what a checkpoint has of an object."""
        if not self.is_named(value):
            return module_state(unwrapped(value)) if isinstance(value, nn.Module) else {}
        parameters = {self.names[parameter]: parameter for parameter in parameters_of(value)}
        state: dict[str, dict[str, Any]] = {}
        for path, (shape, dtype) in contents.items():
            parts = [unescape(part) for part in path.split("/")]
            if len(parts) == 3 and parts[0] == "state" and parts[1] in parameters:
                placed = placed_like(parameters[parts[1]], shape, dtype)
                if placed is not None:
                    state.setdefault(parts[1], {})[parts[2]] = placed
        return {"state": state}

    def paths(self, value: Any) -> tuple[str, ...] | None:
        """What the paths of an object's tensors begin with, of those this rank needs; None for all."""
        if self.is_named(value):
            return tuple(f"state/{escape(self.names[parameter])}/" for parameter in parameters_of(value))
        if isinstance(value, nn.Module):
            return tuple(escape(key) for key in module_state(unwrapped(value)))
        return None

    def joined(self, value: Any, parts: list[Any]) -> Any:
        """The whole of the parts of an object, as far as this rank needs it."""
        if self.is_named(value):
            return {
                **parts[0],
                "state": {name: state for part in parts for name, state in part["state"].items()},
                "param_groups": [group for part in parts for group in part["param_groups"]],
            }
        own = module_state(unwrapped(value))
        return {key: tensor for part in parts for key, tensor in part.items() if key in own}
