"""Git repositories for tests, with nothing of a developer's own configuration."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ENVIRONMENT = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

SETTINGS = {"user.name": "tests", "user.email": "tests@localhost", "protocol.file.allow": "always"}


def git(folder: Path, *words: str) -> None:
    """`git WORDS` in a folder."""
    options = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
    environment = {**os.environ, **ENVIRONMENT}
    subprocess.run(["git", *options, *words], cwd=folder, env=environment, check=True, capture_output=True)


def repository(folder: Path, files: dict[str, str]) -> Path:
    """A repository with these files committed; returns its folder."""
    write(folder, files)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=all")
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files by their names relative to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
