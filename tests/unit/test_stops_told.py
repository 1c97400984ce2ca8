"""What commands tell of a stop, and how they name what can be typed: nothing that jobkit does not know."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from jobkit import slurm
from jobkit.run.command_line import to_type
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.silent import how_it_continues, stopping

TASK = Config(name="toy", task="mytask:train")
COMMAND = Config(name="toy", command=["python", "train.py"])


def run_of(folder: Path, config: Config, *events: tuple[Event, dict[str, object]]) -> RunDir:
    run = RunDir(folder / "toy")
    run.path.mkdir()
    run.write_config(config)
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.record(Event.STARTED, attempt=1, job_id="1", host="here")
    for event, fields in events:
        run.record(event, attempt=1, **fields)
    return run


RESUMED = (Event.RESUMED, {"step": 0, "total_steps": 9, "checkpoint": None})
SAVED = (Event.CHECKPOINT, {"step": 5})
FAILED = (Event.FAILED, {"cause": "crashed", "error": "no", "failure": {"error": "no", "step": 7, "traceback": "..."}})


@pytest.mark.parametrize(
    ("config", "events", "at_stop", "at_end"),
    [
        (COMMAND, [], "your program got SIGTERM; jobkit has no checkpoint of it", "the same command starts it again"),
        (
            COMMAND,
            [RESUMED],
            "writing a checkpoint",
            "no checkpoint yet; the same command begins the run again",
        ),
        (TASK, [], "the loop has not begun", "no checkpoint yet; the same command begins the run again"),
        (TASK, [RESUMED], "writing a checkpoint", "There is no checkpoint yet"),
        (
            TASK,
            [RESUMED, SAVED],
            "writing a checkpoint",
            "The checkpoint of step 5 is safe; the same command",
        ),
    ],
    ids=["silent", "with init", "before the loop", "in the loop", "with a checkpoint"],
)
def test_a_stop_is_told_as_far_as_it_is_known(
    tmp_path: Path, config: Config, events: list[tuple[Event, dict[str, object]]], at_stop: str, at_end: str
) -> None:
    run = run_of(tmp_path, config, *events)
    assert at_stop in stopping(run, run.status())
    assert at_end in how_it_continues(run, run.status())


@pytest.mark.parametrize(
    ("config", "events", "told"),
    [
        (TASK, [], "Correct what the traceback names first. There is no checkpoint yet; then the same command begins"),
        (TASK, [RESUMED, SAVED], "traceback names first. The checkpoint of step 5 is safe; then the same command cont"),
        (COMMAND, [], "names first. jobkit has no checkpoint of it; then the same command starts it again"),
    ],
)
def test_what_would_fail_again_is_to_be_corrected_first(
    tmp_path: Path, config: Config, events: list[tuple[Event, dict[str, object]]], told: str
) -> None:
    run = run_of(tmp_path, config, *events, FAILED)
    assert told in how_it_continues(run, run.status())


def test_a_failure_is_told_of_the_step_that_failed_and_not_of_the_one_that_is_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path, TASK, RESUMED, SAVED, FAILED)
    assert run.status().at_steps == " at step 7/9"


def test_a_command_to_type_names_the_python_that_runs_where_no_environment_is_active(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/python")
    assert to_type("logs", "-f", "toy") == ".venv/bin/python -m jobkit logs -f toy"
    monkeypatch.setattr(shutil, "which", lambda name: str(own))
    assert to_type("submit", "toy.yaml") == "python -m jobkit.submit toy.yaml"


def test_slurm_conf_is_named_only_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Unable to contact slurm controller (connect failure)"
    monkeypatch.delenv("SLURM_CONF", raising=False)
    assert "SLURM_CONF" not in slurm.explain("sbatch", said) + slurm.explain("sbatch", "No configuration source")
    monkeypatch.setenv("SLURM_CONF", "/gone/slurm.conf")
    assert "SLURM_CONF points elsewhere" in slurm.explain("sbatch", said)
    assert "SLURM_CONF=/gone/slurm.conf" in slurm.explain("sbatch", "No configuration source")
