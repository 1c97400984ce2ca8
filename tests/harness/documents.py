"""README and docs as tests read them: their pages, code blocks and commands, and a shell to type the commands in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
README, TRAINING, RECIPES = ROOT / "README.md", ROOT / "docs/training.md", ROOT / "docs/recipes.md"


def without_code(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def block(page: Path, contains: str) -> str:
    """The code block that has this text in it."""
    found = re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return next(text for text in found if contains in text)


def commands(page: Path) -> list[str]:
    """The lines of a page's `sh` blocks, without comments."""
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
    return [line.partition("  #")[0].strip() for line in blocks.splitlines()]


class Shell:
    """A folder that looks like a clone of the repository whose environment is the one the tests run in."""

    def __init__(self, path: Path, environment: dict[str, str] | None = None) -> None:
        self.path = path
        (path / "tools").mkdir(parents=True)
        (path / ".venv/bin").mkdir(parents=True)
        shutil.copytree(ROOT / "experiments", path / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
        for tool in (ROOT / "tools").iterdir():
            if tool.name != "run":  # it would install into an environment of its own
                (path / "tools" / tool.name).symlink_to(tool)
        (path / "tests").symlink_to(ROOT / "tests")
        self._program("tools/run", "-m jobkit.submit")
        self._program(".venv/bin/python")
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "JOBKIT_CONFIG": str(path / "config.yaml"),
            **(environment or {}),
        }
        for name in ("JOBKIT_RUNS", "IMAGENET_DIR", "MINIMIND_DATA", "COGVIDEO_DATA"):
            self.environment.pop(name, None)

    def _program(self, name: str, arguments: str = "") -> None:
        file = self.path / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        file.chmod(0o755)

    def type(self, *lines: str, timeout: float = 600) -> str:
        """What these lines print, typed one after the other; a line that fails fails the test."""
        done = subprocess.run(
            ["bash", "-euc", "\n".join(lines)],
            cwd=self.path,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{lines}: {done.returncode}\n{done.stdout}"
        return done.stdout
