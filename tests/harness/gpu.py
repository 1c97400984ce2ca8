"""What the tests of tests/cuda compute on, a GPU or the CPU in its place, and how a run is told."""

from __future__ import annotations

import os

import torch

WANTED = "JOBKIT_TEST_DEVICE"
"""Environment variable: `cuda`, or `cpu` for all of these tests without a GPU."""


def pretended_or_real() -> torch.device:
    """The device that is named, else the first GPU, else the CPU."""
    name = os.environ.get(WANTED) or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cpu") if name == "cpu" else torch.device(name, 0)


def overrides(device: torch.device, ranks: int = 1) -> list[str]:
    """For a run on this machine of so many ranks on `device`."""
    gpus = 0 if device.type == "cpu" else 1
    return [
        "--local",
        f"device={device.type}",
        "resources.nodes=1",
        f"resources.tasks_per_node={ranks}",
        f"resources.gpus_per_task={gpus}",
    ]
