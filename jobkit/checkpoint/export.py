"""final/: the whole weights, the config and the result of a finished run; and jobkit.open_run, which reads them.

    ctx.finish (loop/context.py) --write_final--> final/model.safetensors    one file a tracked module
                                                    final/result.json  final/config.yaml
    jobkit.open_run(path) --> OpenedRun: config, weights, result

Names in a file are those of the module's state_dict. If a tracked optimizer keeps averaged weights, those are written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.leaves import plain_module
from jobkit.disk import is_full
from jobkit.errors import InputError
from jobkit.run.files import as_plain, json_text, sync_file, sync_folder, write_atomic
from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.wire.group import RankGroup

TIED = "tied"
"""The key of safetensors' metadata for names of tied weights: a file holds each tensor once."""


def write_final(
    run: RunDir,
    modules: Mapping[str, nn.Module],
    result: Any,
    ranks: RankGroup,
    check_lease: Callable[[], None],
    make_room: Callable[[], int | None] = lambda: None,
) -> None:
    """Write final/, whole or not at all. All ranks call it; rank 0 writes.

    On a full disk `make_room` deletes an older checkpoint; it returns None if there is none to give.
    """
    weights = {name: whole_weights(module, ranks) for name, module in modules.items()}

    def write() -> None:
        check_lease()
        folder = run.final.with_name(f".{run.final.name}.tmp")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            for name, (tensors, tied) in weights.items():
                save_file(tensors, folder / f"{name}.safetensors", {"format": "pt", TIED: json.dumps(tied)})
        except Exception as error:
            if not is_full(error) or make_room() is None:
                raise
            write()
            return
        write_atomic(folder / "result.json", json_text(as_plain(result)))
        if run.config_file.exists():
            shutil.copyfile(run.config_file, folder / run.config_file.name)
        for file in folder.iterdir():  # safetensors and shutil leave their bytes to the kernel
            sync_file(file)
        sync_folder(folder)
        shutil.rmtree(run.final, ignore_errors=True)
        folder.rename(run.final)
        sync_folder(run.path)

    ranks.on_main(write)


def whole_weights(module: nn.Module, ranks: RankGroup) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a module's parameters and buffers, unsharded, on the CPU; and of tied weights {other name: first name}.

    All ranks call it; those of other stages of a pipeline come to rank 0 alone.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, value in plain_module(module).state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            continue
        if (first := names.setdefault(id(value), name)) != name:
            tied[name] = first
            continue
        tensor = value.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        tensors[name] = whole.cpu().contiguous().clone()
    forms = ranks.gather({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    received = set(forms[0])
    for source, other in enumerate(forms):
        for name in sorted(other.keys() - received):
            received.add(name)
            if ranks.rank == source:
                ranks.send(tensors[name], to=0)
            elif ranks.is_main:
                shape, dtype = other[name]
                ranks.receive(tensors.setdefault(name, torch.empty(shape, dtype=dtype)), source)
    return tensors, tied


@dataclass(frozen=True)
class OpenedRun:
    """A run that is read from outside, as for sampling.

    run = jobkit.open_run("runs/toy-11f5f19c")
    model.load_state_dict(run.weights())
    run.params["lr"], run.result
    """

    run: RunDir

    @property
    def config(self) -> Any:
        """The run's config."""
        return self.run.config()

    @property
    def params(self) -> dict[str, Any]:
        """The YAML's `params` of the run."""
        params: dict[str, Any] = self.run.config().params
        return params

    @property
    def result(self) -> Any:
        """The result of the training function; None for a run that has not finished."""
        file = self.run.final / "result.json"
        if not file.exists():  # without a loop there is nothing for final/
            return read_status(self.run).result
        return json.loads(file.read_text(encoding="utf-8"))

    def weights(self, name: str = "model") -> dict[str, Tensor]:
        """Return the final weights of the module that was tracked by this name. Raises InputError if there are none."""
        file = self.run.final / f"{name}.safetensors"
        if not file.exists():
            names = ", ".join(sorted(other.stem for other in self.run.final.glob("*.safetensors")))
            raise InputError(
                f"{self.run.name} has no final weights of {name!r}", allowed=names or "none: the run has not finished"
            )
        with safe_open(file, "pt") as opened:
            tied = json.loads((opened.metadata() or {}).get(TIED, "{}"))
        tensors = load_file(file)
        return tensors | {other: tensors[first] for other, first in tied.items()}


def open_run(path: str | Path) -> OpenedRun:
    """Return a run by its directory. Raises InputError if there is none."""
    run = RunDir(path)
    if not run.exists():
        raise InputError("no such run", found=str(path))
    return OpenedRun(run)
