"""What a command of jobkit imports."""

from __future__ import annotations

import json
import subprocess
import sys

from harness.project import Project

HEAVY = ("torch", "numpy", "tensorboard", "safetensors")
"""What the submitting side never imports."""

TELL = """
import atexit, json, os, sys

def tell():
    with open(os.environ["JOBKIT_TEST_MODULES"], "a") as file:
        file.write(json.dumps([sys.orig_argv[1:], sorted(sys.modules)]) + "\\n")

atexit.register(tell)
"""


def heavy_in(modules: set[str]) -> dict[str, set[str]]:
    """Of some modules those of each heavy package."""
    return {name: {one for one in modules if one.split(".")[0] == name} for name in HEAVY}


def imported_by(project: Project, *arguments: str) -> set[str]:
    """The modules that `python -m jobkit ARGUMENTS`, alone of all processes, had imported when it ended."""
    (project.path / "tell").mkdir()
    (project.path / "tell/sitecustomize.py").write_text(TELL)
    found = project.path / "modules.jsonl"
    environment = project.env | {"PYTHONPATH": str(project.path / "tell"), "JOBKIT_TEST_MODULES": str(found)}
    command = [sys.executable, "-m", "jobkit", *arguments]
    done = subprocess.run(command, cwd=project.path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in found.read_text().splitlines():
        argv, names = json.loads(line)
        if argv[:2] == ["-m", "jobkit"]:
            return set(names)
    raise AssertionError("the command did not say what it imported")
