"""`--tenth` runs a tenth of the zoo: the commit chooses it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", action="store_true", help="every tenth test; the commit chooses the first")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--tenth"):
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, text=True)
        items[:] = items[int(commit, 16) % 10 :: 10]
