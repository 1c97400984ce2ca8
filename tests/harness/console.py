"""Commands that a page of the docs shows with what they print: typed, and compared line by line."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.documents import block
from harness.project import Project

PAGE = Path(__file__).parents[2] / "docs/many-runs.md"

_RUN = r"\b[a-z]+-[0-9a-f]{8}\b"
_AGE = r"\b\d+(?::\d\d)+\b|\b[\d.]+ (?:s|min|h|d)\b"


@dataclass
class Command:
    """One command of a page, and the lines below it."""

    typed: str
    printed: list[str]


def commands_of(text: str) -> list[Command]:
    """The commands of a block, which begin with `$ `."""
    found: list[Command] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        else:
            found[-1].printed.append(line)
    return found


def write_files(project: Project) -> None:
    """The files of the day in the docs."""
    names = {
        "digits.yaml": "name: digits\ntask",
        "sample.yaml": "name: sample",
        "mytask.py": "def sample(ctx)",
        "gpu.yaml": "name: gpu",
        "gpu.py": 'print("GPU"',
    }
    for name, contains in names.items():
        (project.path / name).write_text(block(PAGE, contains))


def type_block(project: Project, contains: str, translate: Callable[[str], str] = lambda line: line) -> None:
    """Type the commands of the block of the docs that has a text in it, and compare what they print.

    Names of runs are those of this project, numbers, sizes and times count for nothing, and of lines that begin alike
    neither does the order: runs end as they do. `translate` makes another line of one of the docs.
    """
    names: dict[str, str] = {}
    for command in commands_of(block(PAGE, contains)):
        typed = re.sub(_RUN, lambda found: names.get(found[0], found[0]), translate(command.typed))
        done = subprocess.run(
            ["bash", "-c", typed],
            cwd=project.path,
            env=project.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{typed}: {done.returncode}\n{done.stdout}"
        printed = done.stdout.replace(f"{project.path}/", "").splitlines()
        expected = [translate(line) for line in command.printed]
        assert sorted(map(_shape, printed)) == sorted(map(_shape, expected)), f"{typed}\n{done.stdout}"
        for there, here in zip(command.printed, printed, strict=True):
            names.update(zip(re.findall(_RUN, there), re.findall(_RUN, here), strict=False))


def _shape(line: str) -> str:
    """What stays of a line from one day to another."""
    line = re.sub(r"\((?:queued|running)\)", "(under way)", line)
    line = re.sub(_AGE, "TIME", re.sub(_RUN, lambda found: found[0].partition("-")[0], line))
    return " ".join(re.sub(r"-?\b\d+(?:\.\d+)?(?:e-?\d+)?\b", "N", line).split())
