"""Every strategy of `parallel:` and `comm:` is judged by `jobkit verify`, as a user would ask it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from harness.runs import Project

YAML = """\
name: strategies
task: strategies_task:train
params: {steps: 100}
resources: {tasks_per_node: 4}
"""

STRATEGIES = [
    "parallel=zero1",
    "parallel=zero2",
    "parallel=zero3 precision=bf16",
    "parallel={data: zero3, offload: true}",
    "parallel={data: hsdp, shards: 2}",
    "parallel=tensor",
    "parallel={data: zero3, tensor: 2}",
    "parallel={pipeline: 2}",
    "parallel={data: zero1, pipeline: 2}",
    "parallel={tensor: 2, pipeline: 2}",
    "comm.hook=fp16",
    "comm.hook=powersgd",
    "comm.local_sgd=4",
]


@pytest.mark.parametrize("words", STRATEGIES)
def test_a_strategy_is_exact(tmp_path: Path, words: str) -> None:
    made = Project(tmp_path, None, YAML, plain=False)
    shutil.copy(Path(__file__).parents[1] / "harness" / "strategies_task.py", tmp_path)
    overrides = [words] if "{" in words else words.split()
    done = made.jobkit("verify", str(made.yaml), *overrides, "--local", "--steps", "15", "--json", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["equal"], report
    assert "evaluation" not in report["missing"], report
