"""What to type to continue a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from jobkit.run.rundir import RunDir
from jobkit.run.status import Status

RUNS_DIR = "--runs-dir"


def how_to_continue(run: RunDir, status: Status) -> str:
    """The command of its last submission, and where to type it.

    It names the runs directory where the command alone would start another run from its beginning: it was typed with
    JOBKIT_RUNS set, or the runs were moved since.
    """
    if words := status.resume or status.command:
        words = words if _looks_in(words, status.cwd) == _resolved(run.path.parent) else _with_runs_dir(words, run)
        return words if status.resume else f"{words}   (in {status.cwd})"
    if not status.typed:
        return "the same command"
    known = status.launcher in ("torchrun", "mpirun", "srun")
    by = "" if status.launcher == "python" else f" under {status.launcher if known else 'its launcher'}, as before"
    return f"{status.typed}{by}   (in {status.cwd})"


def _looks_in(command: str, folder: str) -> Path:
    """Where a command looks for runs that is typed in a folder, without JOBKIT_RUNS."""
    words = _words(command)
    given = words[words.index(RUNS_DIR) + 1] if RUNS_DIR in words[:-1] else "runs"
    return _resolved(Path(folder) / given)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # jobkit has not written it
        return []


def _with_runs_dir(command: str, run: RunDir) -> str:
    if not (words := _words(command)):
        return command
    if RUNS_DIR in words[:-1]:
        at = words.index(RUNS_DIR)
        del words[at : at + 2]
    return shlex.join([*words, RUNS_DIR, str(run.path.parent)])


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # of a folder that is away, or a circle of links
        return path.absolute()
