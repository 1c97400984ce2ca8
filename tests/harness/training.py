"""Training runs in tests: their project, result and curves.

launch = training_project(tmp_path, ranks=2).submit("--local", "--detach", steps=60)
assert result(launch) == result_of_another_run
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from harness.runs import Launch, Project

YAML = """\
name: training
task: training_task:{task}
params: {{steps: 60}}
checkpoint: {{every: {every}, memory: {memory}}}
resources: {{tasks_per_node: {ranks}}}
"""


def training_project(
    folder: Path,
    *,
    task: str = "train",
    ranks: int = 1,
    every: Any = "10min",
    memory: Any = "off",
    environment: Mapping[str, str] | None = None,
) -> Project:
    """Return a project whose experiment is a function of training_task.py."""
    yaml = YAML.format(task=task, ranks=ranks, every=every, memory=memory)
    made = Project(folder, environment, yaml, plain=False)
    shutil.copy(Path(__file__).with_name("training_task.py"), folder)
    return made


def result(launch: Launch) -> dict[str, Any]:
    """Return the result of a run, once it has finished."""
    launch.wait_until_over()
    assert launch.status.state == "finished"
    assert launch.status.result is not None
    return launch.status.result


def curve(launch: Launch, tag: str) -> dict[int, Any]:
    """Return what a tag shows at its steps, as TensorBoard would read it. No step may be there twice."""
    values: dict[int, Any] = {}
    for file in sorted(launch.run.tensorboard.glob("events*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag == tag:
                    assert event.step not in values, (tag, event.step)
                    values[event.step] = value.tensor.float_val[0] if value.tensor.float_val else value
    return values


def points(launch: Launch, tag: str) -> list[int]:
    """Return the steps of a tag."""
    return sorted(curve(launch, tag))
