"""Fixtures for all tests: a project with the scripted rank, here and on a private Slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from harness.runs import YAML, Project
from slurmbox import Cluster

pytest_plugins = ["slurmbox.pytest_plugin"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project folder on this machine."""
    return Project(tmp_path / "project")


@pytest.fixture
def on_slurm(tmp_path: Path) -> Callable[..., Project]:
    """A function that makes a project whose commands talk to a cluster: `on_slurm(cluster, yaml)`."""

    def make(cluster: Cluster, yaml: str = YAML, folder: str = "project") -> Project:
        return Project(tmp_path / folder, cluster.env, yaml)

    return make
