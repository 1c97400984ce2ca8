"""`--dry-run --check-model`: whether the model can be spread as the YAML says, found without a queue and without data.

The training function runs in a process of its own (jobkit/worker/model_check.py): nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobkit.errors import InputError, InvalidValue
from jobkit.run import records
from jobkit.run.config import Config
from jobkit.run.records import CheckedModel, ModelCheck
from jobkit.start import words

PATIENCE_SECONDS = 600.0
"""After which a function that has not come to its first step is left: it may wait for something that only a run has."""


def check_model(config: Config, source: Path) -> list[ModelCheck]:
    """How far the training function comes on a rank of each stage, `source` being where it is imported from.

    Raises InvalidValue where the model cannot be spread that way, InputError too where that cannot be found out.
    """
    if config.command:
        raise InvalidValue(
            "command", "--check-model is for a `task`: what a command trains is not known before it runs"
        )
    found = _run(config, source, "meta")
    if found[-1].problem is not None and not found[-1].models:
        # Before there was a model: it may have asked for a value that nothing on the meta device has.
        found = _run(config, source, "cpu")
    last = found[-1]
    if last.refused is not None:
        if re.match(r"parallel(\.\w+)?: ", last.refused):
            raise InvalidValue("parallel", last.refused.removeprefix("parallel: ").removeprefix("parallel."))
        raise InvalidValue("task", f"{config.task}: {last.refused}")
    if last.problem is not None and not last.models:
        raise InvalidValue(
            "task",
            f"{config.task}: cannot be checked, since it failed before it called ctx.parallelize, which should come "
            f"before any data are read: {last.problem}",
        )
    return found


def _run(config: Config, source: Path, device: str) -> list[ModelCheck]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            done = subprocess.run(
                words("jobkit.worker.model_check", str(source), str(report), device),
                input=json.dumps(dataclasses.asdict(config)),
                cwd=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=PATIENCE_SECONDS,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            where = f"it has not come to ctx.steps within {PATIENCE_SECONDS:g} s"
            raise InvalidValue("task", f"{config.task}: cannot be checked: {where}") from None
        if not report.exists():
            said = " / ".join(done.stdout.strip().splitlines()[-3:])
            raise InputError(f"--check-model: the process of {config.task} ended with {done.returncode}: {said}")
        found = [records.of(ModelCheck, one) for one in json.loads(report.read_text(encoding="utf-8"))]
    return [
        dataclasses.replace(one, models=[records.of(CheckedModel, model) for model in one.models])  # type: ignore[arg-type]
        for one in found
    ]


def describe(found: Sequence[ModelCheck], config: Config) -> Iterator[str]:
    """Lines about a check that has found nothing wrong."""
    world_size, where = config.resources.world_size, ", in host memory" if config.parallel.offload else ""
    for one in found:
        for model in one.models:
            state = (
                "an optimizer that is not known" if model.optimizer is None else f"{_size(model.optimizer)} optimizer"
            )
            yield (
                f"{model.name}: {model.parameters:,} parameters; rank {one.rank} of {world_size} has {model.own:,}: "
                f"{_size(model.weights)} weights, {_size(model.gradients)} gradients, {state}{where}"
            )
    if any(one.models for one in found):
        yield "(without activations, and without what is gathered of other ranks for a moment)"
    else:
        yield "no model was given to ctx.parallelize"
    last = found[-1]
    if last.problem is None:
        yield f"checked up to {last.reached}"
    else:
        yield f"not checked any further, for lack of data here or by a mistake: {last.problem}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"
