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


def logged(folder: Path, tag: str) -> list[tuple[int, Any]]:
    """Return the steps and the values of a tag in a folder of event files, as TensorBoard reads them."""
    events = [event for file in sorted(folder.glob("events*")) for event in EventFileLoader(str(file)).Load()]
    return [(event.step, value) for event in events for value in event.summary.value if value.tag == tag]


def curve(launch: Launch, tag: str) -> dict[int, Any]:
    """Return what a tag shows at its steps. No step may be there twice."""
    pairs = logged(launch.run.tensorboard, tag)
    values = {step: value.tensor.float_val[0] if value.tensor.float_val else value for step, value in pairs}
    assert len(values) == len(pairs), (tag, [step for step, _ in pairs])
    return values


def points(launch: Launch, tag: str) -> list[int]:
    """Return the steps of a tag."""
    return sorted(curve(launch, tag))
