"""Runs that fail again and again, and the pauses between their attempts."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.runs import Launch, Project, wait_until

YAML = """\
name: failing
task: failing_task:train
params: {steps: 90}
checkpoint: {every: 100000, memory: 20}
retry: {crash: unlimited}
"""
"""Each attempt takes one snapshot, where it fails: one that comes before the last is complete would be left out."""

SHORT = 18
"""Makes a pause of 2 s one of 36 to 43 s: one of 45 s saves the snapshot at its beginning."""


def failing_project(project: Project) -> Project:
    """Return a project whose experiment is failing_task.py."""
    shutil.copy(Path(__file__).with_name("failing_task.py"), project.folder)
    return project


def fail_at(project: Project, step: int, pause: int = 1, request: str = "") -> None:
    """Let the next attempt fail at a step, and all after it at their imports; -1: none.

    Pauses of the next submission are so many times as long. With a `request` the ranks wait for it before they fail.
    """
    project.write("fault", f"{step} {request}")  # first: an attempt may begin as soon as the other file is gone
    (project.folder / "fault.used").unlink(missing_ok=True)
    project.environment["JOBKIT_TEST_PAUSE"] = str(pause)


def wait_for_pause(launch: Launch, deaths: int) -> None:
    """Wait for the pause of 2 s, times the factor: after a death with progress, and one without."""
    wait_until(lambda: len(launch.ends) >= deaths and launch.status.open_attempt is None, "the pause")
