"""What README and docs show runs as it is shown; tests/unit/test_docs.py says which test runs which command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.documents import README, TRAINING, Shell, block
from harness.project import status


def toy(shell: Shell) -> None:
    (shell.path / "toy.yaml").write_text(block(README, "task: mytask:train"))
    (shell.path / "mytask.py").write_text(block(README, "def train(ctx)"))


def only_run(shell: Shell) -> Path:
    (config,) = shell.path.glob("runs/*/config.yaml")
    return config.parent


def test_the_example_and_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "jobkit")
    toy(shell)
    shell.type("python -m jobkit.submit toy.yaml --local")
    run = only_run(shell)
    now = status(run)
    assert (now["state"], now["step"]) == ("finished", 400)
    assert 0 < now["result"]["loss"] < 2
    assert "already finished" in shell.type("python -m jobkit.submit toy.yaml --local")
    assert run.name in shell.type("python -m jobkit list")
    assert f"{run.name}: finished, step 400/400" in shell.type("python -m jobkit status toy")
    assert json.loads(shell.type("python -m jobkit status toy --json"))["step"] == 400
    shell.type("python -m jobkit logs toy --rank 0")
    assert "nothing to cancel" in shell.type("python -m jobkit cancel toy")


@pytest.mark.parametrize("override", ["precision=fp32", "parallel=pipeline"])
def test_the_example_of_the_training_side_runs(tmp_path: Path, override: str) -> None:
    shell = Shell(tmp_path / "jobkit")
    toy(shell)
    (shell.path / "mytask.py").write_text(block(TRAINING, "def mean_error"))
    shell.type(
        f"python -m jobkit.submit toy.yaml --local resources.nodes=1 'params={{steps: 20, lr: 1e-2}}' {override}"
    )
    now = status(only_run(shell))
    assert now["state"] == "finished"
    assert 0.2 < now["result"]["validation_loss"] < 0.3  # of 1


def test_the_example_of_a_script_runs(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "jobkit")
    (shell.path / "myscript.py").write_text(block(TRAINING, "jobkit.init(params="))
    shell.type("python myscript.py")
    now = status(only_run(shell))
    assert (now["state"], now["step"]) == ("finished", 20)
    assert 0 < now["result"]["loss"] < 2


def test_the_checks_of_this_machine_run(tmp_path: Path) -> None:
    printed = Shell(tmp_path / "jobkit").type("python -m jobkit doctor --local --no-probe")
    assert "locks work" in printed


def test_the_plan_of_the_soak_can_be_seen(tmp_path: Path) -> None:
    printed = Shell(tmp_path / "jobkit").type("tests/soak/chaos.py --soak --dry-run")
    assert "slurm, seed 5" in printed and "local, seed 5" in printed
