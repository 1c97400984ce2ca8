"""The device of these tests: `tools/test cuda` names it. Without a name a GPU that is there, else the CPU.

On the CPU they say nothing about a GPU, and keep the tests themselves from rotting: in the whole suite the short ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from harness.gpu import WANTED, pretended_or_real


@pytest.fixture(scope="session")
def device() -> torch.device:
    """What to compute on; the current one."""
    found = pretended_or_real()
    if found.type != "cpu":
        torch.get_device_module(found).set_device(found)
    return found


@pytest.fixture(autouse=True)
def _long_ones_are_asked_for(request: pytest.FixtureRequest) -> None:
    """Skip what takes long unless a device was named."""
    if request.node.get_closest_marker("long") and not os.environ.get(WANTED):
        pytest.skip(f"takes long: set {WANTED}=cuda, or =cpu")


@pytest.fixture(autouse=True)
def _memory_is_free(device: torch.device) -> Iterator[None]:
    """What a test has left on a GPU is not there for the next."""
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()
