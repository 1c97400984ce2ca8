"""Copies of curves at W&B and MLflow, with their own packages: one curve over all attempts, and no run waits for it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.runs import Launch
from harness.training import points, result, training_project

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
pytest.importorskip("wandb")
pytest.importorskip("mlflow")

from mlflow.tracking import MlflowClient
from wandb.proto import wandb_internal_pb2 as wandb_records

BLOCK = 32768


def wandb_file(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run: blocks of LevelDB's log format behind a header of 7 bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_records.Record.FromString(record)
            record = b""


def wandb_curve(launch: Launch, tag: str) -> list[tuple[int, float]]:
    """Return the points of a run's only offline file."""
    (file,) = launch.run.path.glob("wandb/offline-run-*/*.wandb")
    rows = [record.history for record in wandb_file(file) if record.WhichOneof("record_type") == "history"]
    curve = []
    for row in rows:
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        if tag in values:
            curve.append((row.step.num, values[tag]))
    return curve


def copy(launch: Launch, environment: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "jobkit.mirror", str(launch.run.path)], env=environment, check=True)


def mlflow_run(uri: str, launch: Launch) -> tuple[MlflowClient, Any]:
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("training")
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`jobkit.run` = '{launch.run.name}'")
    return client, run


def test_a_run_that_is_killed_has_each_point_once_at_both_services(tmp_path: Path) -> None:
    project = training_project(tmp_path / "project", every=7)
    uri = (tmp_path / "mlruns").as_uri()
    mirrors = ("+mirror.wandb={mode: offline}", f"+mirror.mlflow={{uri: '{uri}'}}")
    # So many steps that the first file is there long before their end.
    launch = project.submit("--local", "--detach", *mirrors, steps=300, step_seconds=0.3, last_attempt=2)
    launch.wait_for_step(20)
    launch.wait_until(lambda me: any(me.run.path.glob("wandb/offline-run-*/*.wandb")), "W&B's first file")
    launch.kill_rank(0)
    last = result(launch)
    assert len(launch.ends) == 2
    copy(launch, project.environment)  # on a busy machine 20 seconds are few
    expected = points(launch, "train/loss")

    assert [step for step, _ in wandb_curve(launch, "train/loss")] == expected == list(range(300))
    validated = list(range(0, 301, 20))
    assert [step for step, _ in wandb_curve(launch, "validation/loss")] == validated

    client, run = mlflow_run(uri, launch)
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == expected
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "validation/loss")] == validated
    assert (run.data.params["seed"], run.data.params["steps"], run.info.status) == ("0", "300", "FINISHED")
    numbers = {name: value for name, value in last.items() if isinstance(value, float)}
    assert numbers == pytest.approx({name: run.data.metrics[name] for name in numbers})  # curves are float32


def test_a_service_that_is_away_costs_a_warning_and_a_command_copies_later(tmp_path: Path) -> None:
    away = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    project = training_project(tmp_path / "project", every=7, environment={**os.environ, **away})
    launch = project.submit("--local", "--detach", "+mirror.mlflow={}", steps=30)
    result(launch)
    progress = launch.run.progress()
    assert progress is not None
    (warning,) = progress.warnings
    assert warning.startswith("mirror.mlflow: ")

    uri = (tmp_path / "mlruns").as_uri()
    for _ in range(2):
        copy(launch, project.environment | {"MLFLOW_TRACKING_URI": uri})
    client, run = mlflow_run(uri, launch)
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == list(range(30))
