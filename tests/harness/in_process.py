"""jobkit's commands in the test's own process: what refuses, lists or asks needs no interpreter of its own."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.project import Project
from jobkit.cli.main import main


@dataclass(frozen=True)
class Done:
    """What a command returned and printed."""

    returncode: int
    stdout: str
    stderr: str


def jobkit(project: Project, *arguments: str, expect: int | None = 0) -> Done:
    """As `project.jobkit`, for commands that start no run here: the same folder and environment, another process."""
    out, err = io.StringIO(), io.StringIO()
    with _as_typed_in(project), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:  # of argparse
            code = end.code if isinstance(end.code, int) else 0
    done = Done(code, out.getvalue(), err.getvalue())
    if expect is not None:
        assert done.returncode == expect, f"{arguments}: {done}"
    return done


@contextlib.contextmanager
def _as_typed_in(project: Project) -> Iterator[None]:
    environment, folder = dict(os.environ), Path.cwd()
    os.environ.clear()
    os.environ.update(project.env)
    os.chdir(project.path)
    importlib.invalidate_caches()  # the project's files are younger than what Python knows of its folder
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
