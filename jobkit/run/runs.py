"""The runs of a runs directory: all of them, the versions of one, the one that a person means."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import InputError, nearest
from jobkit.run.command_line import to_type
from jobkit.run.files import is_there
from jobkit.run.rundir import BESIDE, CONFIG, JOURNAL, NUMBERED, STATUS, VERSION, RunDir


def default_runs_dir() -> Path:
    """$JOBKIT_RUNS, else ./runs."""
    return Path(os.environ.get("JOBKIT_RUNS") or "runs").absolute()


@dataclass(frozen=True)
class FoundRun:
    """A run in a runs directory that may hold thousands: nothing of it has been read yet."""

    name: str
    directory: str
    """Not a Path: to make one takes longer than to ask the system for the file."""
    changed: float
    """When something was last journalled, in seconds since the epoch."""
    journal_bytes: int

    def open(self) -> RunDir:
        """The run directory itself."""
        return RunDir(self.directory)

    def recorded_status(self) -> dict[str, Any] | None:
        """What status.json says; None where it does not follow from the whole journal."""
        try:
            with open(f"{self.directory}/{STATUS}", "rb") as file:  # noqa: PTH123
                status = json.loads(file.read())
        except (OSError, ValueError):
            return None
        is_new = isinstance(status, dict) and status.get("journal_bytes") == self.journal_bytes
        return status if is_new else None


def all_runs(runs_dir: Path) -> list[FoundRun]:
    """Every run under a runs directory, the most recently changed first; InputError where that may not be read."""
    try:
        found = [run for entry in os.scandir(runs_dir) if (run := _found(entry)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise InputError(f"the runs directory cannot be read: {error}") from None
    return sorted(found, key=lambda run: run.changed, reverse=True)


def _found(entry: os.DirEntry[str]) -> FoundRun | None:
    try:
        os.stat(f"{entry.path}/{CONFIG}")  # noqa: PTH116
    except PermissionError:
        pass  # another user's: whoever opens it says so
    except OSError:
        return None
    journal = _stat(f"{entry.path}/{JOURNAL}")
    if journal is None:  # a submission that is just writing it
        return FoundRun(entry.name, entry.path, 0.0, 0)
    return FoundRun(entry.name, entry.path, journal.st_mtime, journal.st_size)


def _stat(file: str) -> os.stat_result | None:
    try:
        return os.stat(file)  # noqa: PTH116
    except OSError:
        return None


def versions(runs_dir: Path, name: str) -> Iterator[RunDir]:
    """The run directories of one identity, oldest first: `name`, then `name-2`, `name-3` ... made by --fresh.

    A number is missing where somebody has removed that run.
    """
    for number in sorted(_numbers(_names(runs_dir), name)):
        run = _version(runs_dir, name, number)
        if run.exists():
            yield run


def next_version(runs_dir: Path, name: str) -> RunDir:
    """The run directory that --fresh makes next: its number is above that of every one there is, or has been."""
    removed = [file.removesuffix(NUMBERED) for file in _names(runs_dir / BESIDE) if file.endswith(NUMBERED)]
    return _version(runs_dir, name, 1 + max(_numbers([*_names(runs_dir), *removed], name), default=0))


def version_number(run: str, name: str) -> int:
    """Which version of the identity `name` a run directory is, by its own name: 1 for the first."""
    return _numbers([run], name)[0]


def _version(runs_dir: Path, name: str, number: int) -> RunDir:
    return RunDir(runs_dir / (name if number == 1 else f"{name}-{number}"))


def _numbers(names: Iterable[str], name: str) -> list[int]:
    """Of names of run directories, the numbers of those that are versions of `name`."""
    matches = [re.fullmatch(re.escape(name) + VERSION, one) for one in names]
    return [int(match[1] or 1) for match in matches if match]


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; set --runs-dir or JOBKIT_RUNS") from None


def find_run(text: str, runs_dir: Path) -> RunDir:
    """The run a person means: a path, a run's name, the unique beginning of one, or a job id; InputError for others.

    The name in the YAML means the newest version of its only run; others only begin with it.
    """
    for candidate in (Path(text), runs_dir / text):
        if _is_run(RunDir(candidate), runs_dir):
            return RunDir(candidate)
    runs = all_runs(runs_dir)
    matches = [run for run in runs if run.name.startswith(text)]
    if re.fullmatch(r"[0-9]+", text) and (of_job := _of_job(text, runs)):
        if {run.name for run in (*of_job, *matches)} != {of_job[0].name}:
            has = f"the job of {', '.join(run.name for run in of_job)}"
            begins = f" and the beginning of {', '.join(run.name for run in matches[:5])}" if matches else ""
            raise InputError(f"{text!r} is ambiguous: {has}{begins}; name the run")
        return of_job[0].open()
    found = [re.fullmatch(rf"({re.escape(text)}-[0-9a-f]{{8}}){VERSION}", run.name) for run in matches]
    own = {match[1] for match in found if match}
    if len(own) == 1:
        (name,) = own
        return list(versions(runs_dir, name))[-1]
    if len(matches) == 1:
        return matches[0].open()
    if matches:
        raise InputError(f"{text!r} is the beginning of {len(matches)} runs: {', '.join(r.name for r in matches[:5])}")
    names = [run.name for run in runs]
    raise InputError(f"no run {text!r} in {runs_dir}{nearest(text, names)}; `{to_type('list')}` shows them")


def _is_run(run: RunDir, runs_dir: Path) -> bool:
    """Whether a folder is a run: outside the runs directory it may be any project's that has a config.yaml."""
    return run.exists() and (run.path.parent == runs_dir or is_there(run.journal.path))


def _of_job(job_id: str, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs that have a job now, else those that have had it: Slurm may count anew, and so do other clusters."""
    statuses = [(run, _status(run)) for run in runs]
    now = [run for run, status in statuses if status.get("job_id") == job_id]
    return now or [run for run, status in statuses if job_id in (one.get("job_id") for one in status["attempts"])]


def _status(run: FoundRun) -> dict[str, Any]:
    try:
        return run.recorded_status() or run.open().status().as_dict()
    except OSError:  # another user's: its jobs are theirs
        return {"attempts": ()}
