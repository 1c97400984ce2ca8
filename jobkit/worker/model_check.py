"""What `--check-model` runs: the training function up to its first step, in a process that pretends to be a rank.

The group of ranks is torch's fake one, which sends nothing, and tensors are on the meta device, where they have a shape
and no values; on the CPU where the function does not get as far as a model without values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from jobkit.errors import InputError, UsageError
from jobkit.run.config import Config
from jobkit.run.device_kinds import none_visible
from jobkit.run.layout import factor
from jobkit.run.own_outputs import place_outputs
from jobkit.run.records import CheckedModel, ModelCheck
from jobkit.run.rundir import RunDir
from jobkit.run.strict import build
from jobkit.train.data import Loader
from jobkit.train.engine import Engine
from jobkit.train.seeds import derive_seed, seed_generators
from jobkit.worker.context import Context
from jobkit.worker.results import literal
from jobkit.worker.task import load_task

MakeOptimizer = Callable[[nn.Parameter], torch.optim.Optimizer]
"""Makes an optimizer for one parameter like the one that the function has made."""


class Enough(BaseException):
    """The function has come to something that only a run can do."""


class PretendedContext:
    """What a training function is given instead of a Context: the same names, up to the first step.

    It is a rank that writes nothing (`is_main` is false). What is no part of it ends the check.
    """

    def __init__(self, config: Config, rank: int, device: torch.device, run_dir: Path) -> None:
        resources = config.resources
        self.params: DictConfig = OmegaConf.create(literal(place_outputs(config, RunDir(run_dir)).params))
        OmegaConf.set_readonly(self.params, True)
        self.seed, self.rank, self.world_size = config.seed or 0, rank, resources.world_size
        self.local_rank = rank % resources.ranks_per_node
        self.is_main, self.attempt, self.step = False, 1, 0
        self.device, self.run_dir = device, run_dir
        self.models: list[tuple[str, int, nn.Module]] = []
        """Class, parameters as a whole, and what this rank has, of each model."""
        self.state_bytes: dict[int, float | None] = {}
        """What an optimizer keeps for an element, by the id of each of its parameters."""
        self._engine = Engine(config, device, rank, resources.world_size, resources.ranks_per_node)
        self._tracked: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Context, name):
            raise AttributeError(f"jobkit.Context has no {name!r}")
        raise Enough(f"ctx.{name}")

    def parallelize(self, module: nn.Module, **options: bool) -> nn.Module:
        parameters = sum(parameter.numel() for parameter in module.parameters())
        name = type(module).__name__
        module = self._engine.parallelize(module, only_divides=True, **options)
        self.models.append((name, parameters, module))
        return module

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer(model, make, **options)
        self._note_state([*model.parameters()], lambda probe: make([probe], **options))
        return optimizer

    def loader(self, dataset: Dataset[Any], *, global_batch_size: int, **options: Any) -> Loader:
        return self._engine.loader(dataset, global_batch_size=global_batch_size, **options)

    def track(self, **objects: Any) -> None:
        per_rank = objects.pop("per_rank", None)
        objects |= per_rank if isinstance(per_rank, Mapping) else {}
        self._tracked += objects.values()
        for one in objects.values():
            if isinstance(one, torch.optim.Optimizer):
                parameters = [parameter for group in one.param_groups for parameter in group["params"]]
                kind, defaults = type(one), one.defaults
                self._note_state(parameters, lambda probe, kind=kind, defaults=defaults: kind([probe], **defaults))  # type: ignore[misc]

    def steps(self, total: int) -> Iterable[int]:
        self._engine.check_tracked(self._tracked)
        raise Enough("ctx.steps")

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def averaged(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        return nullcontext()

    def barrier(self) -> None: ...

    def log(self, values: Mapping[str, Any]) -> None: ...

    def log_image(self, tag: str, image: Tensor) -> None: ...

    def log_video(self, tag: str, video: Tensor) -> None: ...

    def log_text(self, tag: str, text: str) -> None: ...

    def _note_state(self, parameters: list[nn.Parameter], make: MakeOptimizer) -> None:
        new = [parameter for parameter in parameters if id(parameter) not in self.state_bytes]
        each = _state_bytes(make) if new else None
        self.state_bytes.update((id(parameter), each) for parameter in new)


def _state_bytes(make: MakeOptimizer) -> float | None:
    """What an optimizer keeps for each element of a parameter, in bytes; None where it cannot be tried alone."""
    with contextlib.suppress(Exception), torch.device("cpu"):
        probe = nn.Parameter(torch.zeros(64, 64))
        probe.grad = torch.zeros_like(probe)
        optimizer = make(probe)
        optimizer.step()
        state = [one for one in optimizer.state[probe].values() if isinstance(one, Tensor)]
        return sum(one.numel() * one.itemsize for one in state if one.numel() > 1) / probe.numel()
    return None


def check(config: Config, function: Callable[[Any], Any], rank: int, device: torch.device) -> ModelCheck:
    """Run `function` as rank `rank` of the config's world, which is formed and left here."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # here: only a check needs it

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.resources.world_size)
    context: PretendedContext | None = None
    refused = problem = None
    reached: str | None = "the end of the function"
    try:
        with tempfile.TemporaryDirectory() as folder:
            context = PretendedContext(config, rank, device, Path(folder))
            seed_generators(derive_seed(config.seed or 0, "init"))
            with device:
                function(context)
    except Enough as enough:
        reached = str(enough)
    except (UsageError, InputError) as error:
        refused, reached = str(error), None
    except Exception as error:
        problem, reached = _in_a_line(error), None
    finally:
        dist.destroy_process_group()
    models = [] if context is None else [_described(*one, context.state_bytes) for one in context.models]
    return ModelCheck(rank=rank, models=models, refused=refused, problem=problem, reached=reached)


def _in_a_line(error: Exception) -> str:
    """An error of the user's function and where it was raised: in code of the user's, if it came through any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())]
    where = f" ({(own or frames)[-1].filename}:{(own or frames)[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}".strip() + where


def _described(name: str, parameters: int, module: nn.Module, state_bytes: Mapping[int, float | None]) -> CheckedModel:
    own = {
        parameter: parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in module.parameters()
    }
    states = [
        None if (each := state_bytes.get(id(parameter))) is None else each * tensor.numel()
        for parameter, tensor in own.items()
        if parameter.requires_grad
    ]
    return CheckedModel(
        name=name,
        parameters=parameters,
        own=sum(tensor.numel() for tensor in own.values()),
        weights=sum(tensor.numel() * tensor.itemsize for tensor in own.values()),
        gradients=sum(tensor.numel() * tensor.itemsize for key, tensor in own.items() if key.requires_grad),
        optimizer=None if None in states else round(sum(one for one in states if one is not None)),
    )


def ranks_to_check(config: Config) -> list[int]:
    """The last rank of each stage, since stages are different; of many the first and the last."""
    layout = factor(config.parallel, config.resources.world_size, config.resources.ranks_per_node)
    each = layout.world_size // layout.pipeline
    ranks = [each * (stage + 1) - 1 for stage in range(layout.pipeline)]
    return ranks if len(ranks) <= 8 else [ranks[0], ranks[-1]]


def main(arguments: list[str]) -> int:
    """Check the config on standard input, whose task is imported from the folder `arguments[0]`; the records, as JSON,
    go to the file `arguments[1]`, tensors to the device `arguments[2]`."""
    source, report, device = arguments
    config = build(Config, json.load(sys.stdin))
    sys.path[:] = [source, *filter(None, sys.path)]
    os.environ.update(none_visible())  # a login node's devices are not the run's
    try:
        function = load_task(config.task)
    except Exception as error:
        found = [ModelCheck(rank=0, models=[], problem=_in_a_line(error))]
    else:
        found = []
        for rank in ranks_to_check(config):
            found.append(check(config, function, rank, torch.device(device)))
            if found[-1].reached is None:
                break
    Path(report).write_text(json.dumps([dataclasses.asdict(one) for one in found]), encoding="utf-8")
    return 0
