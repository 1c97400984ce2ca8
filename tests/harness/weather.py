"""Runs in bad weather: their project, and the world that fails.

project = weather_project(tmp_path)
launch = project.submit("--local", "--detach").wait_for_step(40)
be(launch, kind="read", seconds=6)
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from harness.runs import Launch, Project

YAML = """\
name: weather
task: weather_task:train
params: {steps: 300, workers: 0}
checkpoint: {every: 50, memory: 5}
retry: {patience: 2min}
"""
"""Pauses are a thirtieth: an outage of 5 seconds is one of 150."""


def with_task(project: Project) -> Project:
    """Return a project whose experiment trains in the weather."""
    project.environment.pop("PLAIN_RANKS", None)
    project.yaml.write_text(YAML, encoding="utf-8")
    shutil.copy(Path(__file__).with_name("weather_task.py"), project.folder)
    return project


def be(launch: Launch, kind: str, seconds: float | None = None, node: str | None = None) -> Launch:
    """Let the world fail from now on."""
    facts: dict[str, Any] = {"kind": kind, "node": node}
    if seconds is not None:
        facts["until"] = time.time() + seconds
    file = launch.project.folder / "weather"
    file.with_suffix(".new").write_text(json.dumps(facts), encoding="utf-8")
    file.with_suffix(".new").rename(file)
    return launch
