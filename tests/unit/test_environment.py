"""tools/environment.sh makes the virtual environment of a clone, here with a Python that downloads nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from mutants import ROOT

# As python: says that it is new enough, and makes an environment whose pip writes down its arguments.
PYTHON = """\
#!/usr/bin/env bash
case $* in
    "-c "*) exit 0 ;;
    "-m venv "*)
        mkdir -p "${@: -1}/bin"
        cp "$0" "${@: -1}/bin/python"
        [[ $* != *--clear* ]] || rm -f "${@: -1}/incomplete"
        echo "$*" >>"$CALLS"
        ;;
    "-m pip "*)
        echo "pip ${@: -1}" >>"$CALLS"
        exit "${PIP_STATUS:-0}"
        ;;
esac
"""


class Clone:
    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, root / "calls"
        (root / "tools").mkdir()
        shutil.copy(ROOT / "tools/environment.sh", root / "tools")
        for name in ("setup.cfg", "pyproject.toml", "tools/constraints.txt"):
            (root / name).write_text(name)
        (root / "python").write_text(PYTHON)
        (root / "python").chmod(0o755)

    def ensure(self, *extras: str, pip_status: int = 0) -> subprocess.CompletedProcess[str]:
        """As tools/test does it, in a shell without anybody's environment."""
        script = f"set -euo pipefail; source tools/environment.sh; ensure_environment {' '.join(extras)}"
        env = {
            "PATH": os.defpath,
            "PYTHON": str(self.root / "python"),
            "CALLS": str(self.calls),
            "PIP_STATUS": str(pip_status),
        }
        self.calls.write_text("")
        return subprocess.run(["bash", "-c", script], cwd=self.root, env=env, capture_output=True, text=True)

    def installed(self) -> list[str]:
        """What pip was asked for in the last call."""
        return [line.removeprefix("pip ") for line in self.calls.read_text().splitlines() if line.startswith("pip ")]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_the_first_call_installs_and_the_second_does_nothing(clone: Clone) -> None:
    first = clone.ensure("test")
    assert (first.returncode, clone.installed()) == (0, [f"{clone.root}[test]"]), first.stderr
    assert clone.ensure("test").returncode == 0
    assert clone.installed() == []


def test_the_extras_of_earlier_calls_stay(clone: Clone) -> None:
    clone.ensure("test")
    clone.ensure("test", "test-integrations")
    assert clone.installed() == [f"{clone.root}[test,test-integrations]"]
    clone.ensure()
    clone.ensure("test")
    assert clone.installed() == []


def test_other_constraints_install_again(clone: Clone) -> None:
    clone.ensure("test")
    (clone.root / "tools/constraints.txt").write_text("torch==2")
    clone.ensure("test")
    assert clone.installed() == [f"{clone.root}[test]"]


def test_a_failed_install_is_tried_again(clone: Clone) -> None:
    assert clone.ensure("test", pip_status=1).returncode == 1
    assert clone.ensure("test").returncode == 0
    assert clone.installed() == [f"{clone.root}[test]"]


def test_an_interrupted_install_starts_from_an_empty_environment(clone: Clone) -> None:
    clone.ensure("test")
    (clone.root / ".venv/incomplete").touch()
    (clone.root / ".venv/installed").unlink()
    assert clone.ensure().returncode == 0
    assert "--clear" in clone.calls.read_text()


def test_a_python_that_is_not_there_is_said(clone: Clone) -> None:
    (clone.root / "python").unlink()
    done = clone.ensure("test")
    assert (done.returncode, done.stderr) == (2, f"PYTHON={clone.root}/python: there is no such program\n")
