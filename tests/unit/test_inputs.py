"""What a finished run was given as `inputs` and has been written since is told where it would not be computed again."""

from __future__ import annotations

import os
from pathlib import Path

from harness.in_process import jobkit
from harness.made_run import BEGAN, made_run
from harness.project import Project


def test_an_input_that_is_newer_than_a_finished_run_is_told(tmp_path: Path) -> None:
    project = Project(tmp_path)
    data, older = project.path / "weights.safetensors", project.path / "config.yaml"
    for file in (data, older):
        file.touch()
        os.utime(file, (BEGAN, BEGAN))
    submit = ("submit", "toy.yaml", "--local", "inputs=[weights.safetensors,config.yaml]")
    printed = jobkit(project, *submit, "--dry-run").stdout
    made_run(Path(next(line.split()[-1] for line in printed.splitlines() if "run directory" in line)), state="finished")
    done = jobkit(project, *submit)
    assert "already finished" in done.stdout and "changed since it finished" not in done.stderr
    os.utime(data)
    done = jobkit(project, *submit)
    assert "changed since it finished: weights.safetensors\n" in done.stderr
    assert "for a new run of the same config: " in done.stdout
