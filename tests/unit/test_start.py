"""How jobkit starts its own programs: from the jobkit that starts them, and with no module of the user's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.repository import write

from jobkit import start

TELL = """
import json, sys
import jobkit

def main(arguments):
    try:
        import here as found
    except ImportError:
        found = None
    print(json.dumps([arguments, sys.argv[1:], jobkit.__file__, found is not None]))
    return 3
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Another jobkit than the installed one, with a program that tells what it sees."""
    for name in ("__init__.py", "start.py"):
        write(tmp_path / "checkout/jobkit", {name: Path(start.FILE).with_name(name).read_text()})
    write(tmp_path / "checkout/jobkit", {"tell.py": TELL})
    return tmp_path / "checkout"


def told(checkout: Path, folder: Path, **variables: str) -> str:
    words = [sys.executable, str(checkout / "jobkit/start.py"), "jobkit.tell", "a", "b"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("paths", ["", ".", "{folder}"])
def test_a_program_imports_this_jobkit_and_nothing_of_the_users_folder(
    tmp_path: Path, checkout: Path, paths: str, safe: str
) -> None:
    folder = tmp_path / "project"
    hiding = ["secrets.py", "select.py", "here.py"]
    if not paths:  # else Python itself would not start
        hiding += ["types.py", "typing.py", "contextlib.py"]
    write(folder, dict.fromkeys(hiding, "raise RuntimeError\n"))
    seen = told(checkout, folder, PYTHONPATH=paths.format(folder=folder), PYTHONSAFEPATH=safe)
    assert seen == f'[["a", "b"], ["a", "b"], "{checkout}/jobkit/__init__.py", false]'


def test_in_its_checkout_jobkit_finds_what_else_is_there(checkout: Path) -> None:
    write(checkout, {"here.py": "", "types.py": "raise RuntimeError\n"})
    assert told(checkout, checkout) == f'[["a", "b"], ["a", "b"], "{checkout}/jobkit/__init__.py", true]'
