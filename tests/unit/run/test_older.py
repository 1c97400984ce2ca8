"""Runs of the jobkit before this edition are shown, and neither continued nor overwritten. The records are its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import jobkit
from jobkit import submit
from jobkit.cli import main
from jobkit.config.identity import run_name
from jobkit.config.load import load
from jobkit.run.rundir import RunDir

STARTED = 1795838790.0


def make_old(runs: Path, config: Any, state: str, cause: str, step: int, **fields: Any) -> RunDir:
    """Make a run directory as the jobkit before this edition left it."""
    run = RunDir(runs / run_name(config))
    run.path.mkdir(parents=True)
    run.config_file.write_text("name: old\nstart_from: {run: '', step: 0}\n")
    names = {"name": "old", "seed": 0, "params": config.params}
    lines: list[dict[str, Any]] = [
        {"event": "submitting", "cluster": "local", "scheduler": "local", **names},
        {"event": "submitted", "job_id": "11705"},
        {"event": "started", "attempt": 1, "job_id": "11705", "host": "vm"},
        {"event": "resumed", "attempt": 1, "step": 0, "total_steps": 6, "checkpoint": None},
        {"event": state, "attempt": 1, "step": step, "cause": cause},
    ]
    run.journal_file.write_text("".join(f"{json.dumps({'time': STARTED, **line})}\n" for line in lines))
    attempt = {
        "id": 1,
        "cluster": "local",
        "job_id": "11705",
        "started": STARTED,
        "ended": STARTED + 20,
        "cause": cause,
        "first_step": 0,
        "last_step": step,
        "host": "vm",
        "failure": {"error": fields["error"], "rank": 0, "step": step} if "error" in fields else None,
        "resumed": STARTED + 5,
        "last_seen": STARTED + 19,
    }
    status = {
        "state": state,
        "step": step,
        "total_steps": 6,
        "attempts": [attempt],
        "result": None,
        "error": None,
        "scheduler": "local",
        "checkpoint": step,
        "before_submission": ["interrupted", None],
        "journal_bytes": run.journal_file.stat().st_size,
        **names,
        **fields,
    }
    run.status_file.write_text(json.dumps(status))
    progress = {"attempt": 1, "time": STARTED + 19, "step": step, "total_steps": 6, "values": {"train/loss": 0.5}}
    run.progress_file.write_text(json.dumps(progress))
    (run.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    return run


def test_runs_of_an_older_jobkit_are_shown_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JOBKIT_CONFIG", str(tmp_path / "none.yaml"))
    monkeypatch.setenv("JOBKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text("def train(ctx): ...\n")
    Path("old.yaml").write_text("name: old\ntask: task:train\nparams: {lr: 0.1}\n")
    configs = [load(Path("old.yaml"), words).config for words in ([], ["params.lr=1"], ["params.lr=2"])]
    done = make_old(tmp_path / "runs", configs[0], "finished", "finished", 6, result={"loss": 0.25})
    make_old(tmp_path / "runs", configs[1], "failed", "crashed", 3, error="rank 0: ValueError: no data")
    make_old(tmp_path / "runs", configs[2], "interrupted", "user", 4)
    done.final.mkdir()
    save_file({"weight": torch.ones(2)}, done.final / "model.safetensors", {"format": "pt"})

    columns = "--columns=params.lr,state,step,result.loss"
    assert main.main(["list", "--sort", "params.lr", columns, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [[*row.values()][1:] for row in rows] == [
        [0.1, "finished", 6, 0.25],
        [1, "failed", 3, None],
        [2, "interrupted", 4, None],
    ]
    assert main.main(["status", "old*"]) == 0
    shown = capsys.readouterr().out
    assert "ValueError: no data" in shown and "resume" not in shown

    before = {file: file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()}
    for words in ([], ["params.lr=1"], ["params.lr=2"], ["params.steps=1", "--from", done.name]):
        words = [f"+{word}" if "steps" in word else word for word in words]
        assert submit.main(["old.yaml", "--local", *words]) == 2
        assert "older jobkit" in capsys.readouterr().err
    assert main.main(["resume", done.name]) == 2
    assert main.main(["rewind", done.name, "6"]) == 2
    after = {file: file.read_bytes() for file in before}
    assert after == before

    opened = jobkit.open_run(done.path)
    assert (opened.weights()["weight"].tolist(), opened.result) == ([1.0, 1.0], {"loss": 0.25})
    assert main.main(["rm", "old*", "-y"]) == 0
    assert [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")] == []
