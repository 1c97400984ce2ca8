"""What tests on a real Slurm share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster


@pytest.fixture
def other(short_dir: Path) -> Iterator[Cluster]:
    """A second cluster, which has the same name."""
    with Cluster(short_dir, nodes=1, **QUICK) as cluster:
        yield cluster
