"""The README says what there is: its keys, commands and options exist, its example runs."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project import Project, status

from jobkit.cli.main import VERBS
from jobkit.run.config import CheckpointConfig, CommConfig, Config, ParallelConfig, Resources, RetryConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TRAINING = (ROOT / "docs/training.md").read_text()


def block(begins: str, page: str = README) -> str:
    """The code block that has this text in it."""
    return next(text for text in re.findall(r"```\w*\n(.*?)```", page, re.DOTALL) if begins in text)


@pytest.mark.parametrize(
    ("cls", "prefix"),
    [
        (Config, ""),
        (Resources, "resources."),
        (CheckpointConfig, "checkpoint."),
        (RetryConfig, "retry."),
        (ParallelConfig, "parallel."),
        (CommConfig, "comm."),
    ],
)
def test_every_key_of_the_yaml_is_in_the_table(cls: type, prefix: str) -> None:
    table = "\n".join(line for line in README.splitlines() if line.startswith("| `"))
    for field in dataclasses.fields(cls):
        if not dataclasses.is_dataclass(field.type) and field.name not in ("resources", "checkpoint", "retry", "comm"):
            assert f"`{prefix}{field.name}`" in table


def test_every_option_and_verb_in_the_readme_exists(tmp_path: Path) -> None:
    project = Project(tmp_path)
    known = project.jobkit("submit", "--help").stdout + "--wrap --partition --nodes --exclusive --res --logdir"
    known += "".join(project.jobkit(verb, "--help").stdout for verb in VERBS if verb != "submit")
    chaos = [sys.executable, str(ROOT / "tests/soak/chaos.py"), "--help"]
    known += subprocess.run(chaos, capture_output=True, text=True, check=True).stdout
    for option in set(re.findall(r"--[a-z][a-z-]+", README)):
        assert option in known, option
    for verb in re.findall(r"-m jobkit (\w+)", README):
        assert verb in VERBS
    for file in re.findall(r"(?<!config/)(?:tools|experiments|docs|tests|jobkit)/[\w./]+\.\w+", README + TRAINING):
        assert (ROOT / file).exists(), file


def test_every_test_that_the_docs_name_exists() -> None:
    tests = "".join(file.read_text() for file in (ROOT / "tests").glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", TRAINING)
    assert len(named) > 30
    for name in named:
        assert f"def {name}(" in tests, name


@pytest.mark.parametrize("override", ["precision=fp32", "parallel=zero3", "parallel=pipeline", "comm.local_sgd=4"])
def test_the_example_of_the_training_side_runs(tmp_path: Path, override: str) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(block("fused_ema_adam", TRAINING))
    project.submit("--local", "resources.nodes=1", "params={steps: 20, lr: 1e-2}", override)
    (run,) = project.runs
    assert status(run)["state"] == "finished"
    assert 0.2 < status(run)["result"]["validation_loss"] < 0.3  # of 1


def test_the_example_runs(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "toy.yaml").write_text(block("task: mytask:train"))
    (project.path / "mytask.py").write_text(block("def train(ctx)"))
    project.submit("--local")
    (run,) = project.runs
    assert (status(run)["state"], status(run)["step"]) == ("finished", 400)
    assert 0 < status(run)["result"]["loss"] < 2
