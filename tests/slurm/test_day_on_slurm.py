"""A day with many runs on a Slurm, as docs/many-runs.md tells it for a workstation."""

from __future__ import annotations

import re
from pathlib import Path

from harness.console import type_block, write_files
from harness.project import Project
from slurm_cluster import Cluster


def on_slurm(line: str) -> str:
    """A line of the docs as it is on Slurm."""
    line = line.replace("--local --detach", "--cluster slurm")
    line = re.sub(r"^process (\d+) starts (\d+) run\(s\) in turn", r"job \1: \2 task(s)", line)
    return re.sub(r"^process", "job", line)


def test_the_day_of_the_docs(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path / "project", slurm.env)
    write_files(project)
    type_block(
        project, "--sweep params.lr=.003,.01,.03,.3 seed=0,1,2 --max-running 4\nsweep digits/s1: 12 runs (12", on_slurm
    )
    type_block(project, "--from digits-0a8be2a1@30", on_slurm)
