"""What a message says to type for a package that is missing: it leaves torch as it is, and names no stranger's."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from jobkit.run import command_line

ROOT = Path(__file__).parents[2]


def test_in_the_clone_packages_come_in_the_versions_that_jobkit_is_tested_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.chdir(ROOT)
    assert command_line.to_install("a", "b").endswith("-m pip install -c tools/constraints.txt a b")
    monkeypatch.chdir(tmp_path)
    assert command_line.to_install("a").endswith(f"-m pip install -c {ROOT}/tools/constraints.txt a")


def test_another_torch_than_the_tested_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.1+cu128")
    assert command_line.to_install("a").endswith("-m pip install a torch==2.9.1+cu128")


def test_where_jobkit_is_no_clone_the_installed_torch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(command_line, "__file__", str(tmp_path / "site-packages/jobkit/run/command_line.py"))
    assert command_line.to_install("a").endswith("-m pip install a torch==2.13.0+cpu")


def test_each_package_of_an_extra_has_a_version_that_jobkit_is_tested_with() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "tools/constraints.txt").read_text().splitlines()}
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    for extra, packages in setup["options.extras_require"].items():
        for package in packages.split("\n"):
            name = re.split(r"[><=]", package)[0]
            assert not name or name in pinned, (extra, name)
    assert {"torch", "torchvision"} <= pinned  # torch-fidelity's own need, which fits one torch alone


def test_nothing_tells_to_install_what_the_registry_has_under_the_name_of_jobkit() -> None:
    typed = ["git", "grep", "-nE", r"pip install (-\S+ )*'?jobkit", "--", ".", ":!tests"]
    assert subprocess.run(typed, cwd=ROOT, capture_output=True, text=True).stdout == ""
