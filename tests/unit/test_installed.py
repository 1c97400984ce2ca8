"""What is taken for an installed package's code, and not for the user's."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pytest
import torch

from jobkit.run.installed import is_installed


@pytest.mark.parametrize(
    "file",
    [
        json.__file__,
        torch.__file__,
        "/home/eve/.local/lib/python3.11/site-packages/torchmetrics/metric.py",
        "/usr/lib/python3/dist-packages/numpy/__init__.py",
        os.path.realpath(sysconfig.get_path("stdlib")) + "/random.py",
    ],
)
def test_packages_and_the_standard_library_are(file: str) -> None:
    assert is_installed(file)


@pytest.mark.parametrize("file", [__file__, "/home/eve/my-site-packages-notes/train.py", f"{Path.home()}/train.py"])
def test_a_users_own_files_are_not(file: str) -> None:
    assert not is_installed(file)
