"""The runs of a runs directory: all of them, and the versions of one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jobkit.errors import InputError
from jobkit.run.rundir import BESIDE, CONFIG, JOURNAL, NUMBERED, STATUS, VERSION, RunDir
from jobkit.run.status import State


def default_runs_dir() -> Path:
    """$JOBKIT_RUNS, else ./runs."""
    return Path(os.environ.get("JOBKIT_RUNS") or "runs").absolute()


JournalKey = tuple[int, int, int]
"""Modification time in ns, bytes and inode of a run's journal: one that has changed has another."""


class FoundRun(NamedTuple):
    """A run in a runs directory that may hold thousands: nothing of it has been read yet."""

    name: str
    directory: str
    """Not a Path: to make one takes longer than to ask the system for the file."""
    changed: float
    """When something was last journalled, in seconds since the epoch."""
    journal_bytes: int
    submitted: float = 0.0
    """When its config was last written, as each submission does, in seconds since the epoch."""
    key: JournalKey = (0, 0, 0)

    def open(self) -> RunDir:
        """The run directory itself."""
        return RunDir(self.directory)

    def recorded_config(self) -> dict[str, Any]:
        """Name, seed and params of config.yaml, with what is secret masked; none where it cannot be read.

        For a run that an earlier jobkit submitted: it journalled none of them.
        """
        import yaml  # here: most lists need none

        try:
            with open(f"{self.directory}/{CONFIG}", "rb") as file:  # noqa: PTH123
                values = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # fast: there may be thousands
        except (OSError, ValueError, yaml.YAMLError):
            return {}
        return {key: values.get(key) for key in ("name", "seed", "params")} if isinstance(values, dict) else {}

    def recorded_status(self) -> dict[str, Any] | None:
        """What status.json says; None where it does not follow from the whole journal."""
        try:
            with open(f"{self.directory}/{STATUS}", "rb", buffering=0) as file:  # noqa: PTH123
                status = json.loads(str(file.read(), "utf-8"))
        except (OSError, ValueError):
            return None
        is_new = isinstance(status, dict) and status.get("journal_bytes") == self.journal_bytes
        return status if is_new else None

    def final_status(self) -> dict[str, Any] | None:
        """`recorded_status` of a run that has ended; None for one to which more may happen by itself."""
        status = self.recorded_status()
        is_over = status is not None and not (State(status["state"]).is_under_way or status["submitting"])
        return status if is_over else None


def all_runs(runs_dir: Path) -> list[FoundRun]:
    """Every run under a runs directory, the most recently changed first; InputError where that may not be read."""
    try:
        found = [run for entry in os.scandir(runs_dir) if (run := _found(entry.name, entry.path)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        raise InputError(f"the runs directory cannot be read: {error}") from None
    return sorted(found, key=lambda run: run.changed, reverse=True)


def runs_of(runs_dir: Path, name: str, at_most: int) -> list[FoundRun]:
    """The runs whose configs have one name, the most recently changed first; none of more than `at_most`: on a file
    server each takes a millisecond."""
    names = list(filter(re.compile(f"{re.escape(name)}-[0-9a-f]{{8}}{VERSION}").fullmatch, _names(runs_dir)))
    found = (_found(one, str(runs_dir / one)) for one in names) if len(names) <= at_most else ()
    return sorted((run for run in found if run is not None), key=lambda run: run.changed, reverse=True)


def in_a_folder_above(runs_dir: Path) -> str:
    """`; there are some in ...` where a folder above the one of commands has runs, and this one does not exist."""
    if not runs_dir.exists():
        for folder in runs_dir.parent.parents:
            if all_runs(folder / runs_dir.name):
                return f"; there are some in {folder / runs_dir.name}: type the command in {folder}"
    return ""


def run_at(path: Path) -> FoundRun | None:
    """The run in a folder, which need not be in a runs directory; None where there is none."""
    return _found(path.name, str(path))


def _found(name: str, directory: str) -> FoundRun | None:
    submitted = 0.0
    try:
        submitted = os.stat(f"{directory}/{CONFIG}").st_mtime  # noqa: PTH116
    except PermissionError:
        pass  # another user's: whoever opens it says so
    except OSError:
        return None
    journal = _stat(f"{directory}/{JOURNAL}")
    if journal is None:  # a submission that is just writing it, or any project's folder
        is_run = not submitted or _OF_IDENTITY.fullmatch(name) is not None
        return FoundRun(name, directory, 0.0, 0, submitted) if is_run else None
    key = (journal.st_mtime_ns, journal.st_size, journal.st_ino)
    return FoundRun(name, directory, journal.st_mtime, journal.st_size, submitted, key)


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


def newest_versions(runs_dir: Path, names: Iterable[str]) -> dict[str, RunDir]:
    """The newest version of each of many identities; of one that has no run directory yet the one that it would have.

    The runs directory is read once, which may hold thousands.
    """
    newest: dict[str, int] = {}
    for found in map(_OF_IDENTITY.fullmatch, _names(runs_dir)):
        if found and (runs_dir / found[0] / CONFIG).exists():
            newest[found[1]] = max(newest.get(found[1], 1), int(found[2] or 1))
    return {name: _version(runs_dir, name, newest.get(name, 1)) for name in names}


_OF_IDENTITY = re.compile(rf"(.*-[0-9a-f]{{8}}){VERSION}")


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
