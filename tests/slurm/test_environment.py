"""The user's shell reaches the job: its functions and variables, and a PATH that hides Slurm's commands."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from harness.runs import Project
from slurmbox import Cluster

GREETS = """\
name: greets
command: [bash, -c, 'greet "$(printenv dotted.name)" >greeting-$SLURM_JOB_ID']
"""


@pytest.mark.parametrize("container", [None, {"prefix": ["env"]}], ids=["plain", "container"])
def test_functions_and_dotted_variables_reach_the_ranks(
    slurm: Cluster, on_slurm: Callable[..., Project], container: dict[str, list[str]] | None
) -> None:
    project = on_slurm(slurm, f"{GREETS}container: {json.dumps(container)}\n")
    project.environment |= {"BASH_FUNC_greet%%": "() {  echo hello\n  echo $1\n}", "dotted.name": "dotted value"}
    for where in ("--local", "--cluster=slurm"):
        launch = project.submit(where, f"name=greets{where[2:7]}").wait_until_over()
        assert launch.status.state == "finished", launch.status
    greetings = [file.read_text() for file in project.folder.glob("greeting-*")]
    assert greetings == ["hello\ndotted value\n"] * 2
