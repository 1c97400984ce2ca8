"""The paths of `inputs`: whether they are there before anything is queued, and which are newer than a finished run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jobkit.errors import InvalidValue
from jobkit.run import references
from jobkit.run.config import Config
from jobkit.run.runs import all_runs


def check(config: Config, runs_dir: Path) -> None:
    """Raise InvalidValue for a path of `inputs` that is not there; a run looks for another's when it starts."""
    refers = {text for _, text in references.texts_with_references(config)}
    for path in (one for one in config.inputs if one not in refers):
        try:
            full = Path(path).expanduser()
            problem = "" if full.exists() else "no such file or directory"
            if path.startswith("~") and not problem:  # params have it as it stands, and open() takes no `~`
                problem = f"`~` is not expanded in the job: write {full}"
        except (OSError, ValueError, RuntimeError) as error:  # too long, not to be looked at, or `~` of nobody
            problem = getattr(error, "strerror", None) or str(error)
        if problem:
            meant = _directory_meant(path, runs_dir)
            raise InvalidValue("inputs", f"{path}: {problem}; the task needs it to start{meant}")


def _directory_meant(path: str, runs_dir: Path) -> str:
    """What to say of a path that begins with a run's name, or the beginning of one, and not with its directory."""
    word, *below = path.split("/")
    if not word or not below:
        return ""
    runs = [run for run in all_runs(runs_dir) if run.name.startswith(word)]
    runs = [run for run in runs if run.name.startswith(f"{word}-")] or runs
    shown = [os.path.relpath(run.directory) for run in runs[:3]]
    return f"; {word!r} is a run's name: give its directory, {' or '.join(shown)}" if shown else ""


def changed_since(config: Config, ended: float | None) -> tuple[str, ...]:
    """Those that were written after a run had ended, in seconds since the epoch: what it has computed is of others.

    Of a folder its own time counts: files may have been written in place in it.
    """
    changed = []
    for path in config.inputs:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # one that refers to another run, or is gone
            if ended is not None and Path(path).expanduser().stat().st_mtime > ended:
                changed.append(path)
    return tuple(changed)
