"""The three small recipes on the device, interrupted and resumed."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.gpu import overrides
from harness.project import Project, causes, describe, logged_steps, status, step, wait_for

ROOT = Path(__file__).parents[2]
STEPS = 20
VARIABLES = ("IMAGENET_DIR", "MINIMIND_DATA", "COGVIDEO_DATA")

TASK = """
import time

from {module} import train as recipe


def train(ctx):
    steps = ctx.steps

    def slowly(total):
        for step in steps(total):
            time.sleep({pause} if ctx.attempt == 1 else 0)
            yield step

    ctx.steps = slowly
    return recipe(ctx)
"""
"""On a GPU the whole run would be over before it can be interrupted."""

pytestmark = pytest.mark.long


@pytest.mark.parametrize("experiment", ["imagenet64", "minimind", "cogvideo"])
def test_the_small_recipe_survives_an_interruption(device: torch.device, tmp_path: Path, experiment: str) -> None:
    results = [trained(device, tmp_path / str(again), experiment, interrupted=bool(again)) for again in (0, 1)]
    for name, value in results[0].items():
        # Kernels of the GPU may add in another order from run to run: test_resume.py has the exact ones.
        expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-9 if device.type == "cpu" else 0.02)
        assert results[1][name] == expected
    print(f"{experiment} on {device}: {results}")


def trained(device: torch.device, folder: Path, experiment: str, *, interrupted: bool) -> dict[str, Any]:
    project = Project(folder)
    for variable in VARIABLES:
        project.env.pop(variable, None)
    shutil.copytree(ROOT / "experiments", folder / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    (module,) = re.findall(r"^task: (.+):train$", (ROOT / f"experiments/{experiment}.yaml").read_text(), re.MULTILINE)
    (folder / "slow.py").write_text(TASK.format(module=module, pause=0.4 if interrupted else 0.0))
    schedule = ["task=slow:train", f"params.steps={STEPS}", "params.validate_every=10", "deterministic=warn"]
    arguments = ["submit", f"experiments/{experiment}.yaml", *overrides(device), *schedule]
    if interrupted:
        process = project.start(*arguments)
        wait_for("a run directory", lambda: project.runs)
        (run,) = project.runs
        wait_for("some steps", lambda: step(run) >= 3 or process.poll() is not None, run)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
        assert 0 < status(run)["step"] < STEPS, describe(run)
    project.jobkit(*arguments, timeout=600)
    (run,) = project.runs
    assert causes(run) == (["user", "finished"] if interrupted else ["finished"])
    assert logged_steps(run) == list(range(STEPS))
    found = status(run)["result"]
    return dict(found) if isinstance(found, dict) else {"result": found}
