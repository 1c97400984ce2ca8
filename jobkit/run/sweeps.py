"""The sweeps of a runs directory: which runs each of them wants, and has wanted.

A sweep is a folder `.sweeps/<name>/s<N>` with a record and the batch scripts of its job arrays; its runs are run
directories like any other, and know nothing of it but which submission was their newest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from filelock import FileLock

from jobkit.run import records
from jobkit.run.locks import held, is_held, lock_at
from jobkit.run.rundir import BESIDE

FOLDER = ".sweeps"
"""A folder in the runs directory: `.sweeps/<name>/s<N>/sweep.json` for each sweep."""

WAIT_SECONDS = 60.0
"""How long a command for one run waits for a sweep that is being submitted: six times what one of 1,000 runs takes."""

_LOCK, _ALIVE, _RECORD = "sweeps.submit", "alive", "sweep.json"


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """Which runs a sweep wants, in its own order."""

    key: str
    """What tells it from other sweeps of that name: where its points were written, or the axes that were typed."""
    runs: list[str]
    former: list[str] = field(default_factory=list)
    """Those that it wanted once and does no more, unless --prune has cancelled them."""
    max_running: int | None = None
    """How many of them may train at once on this machine; None for as many as fit."""
    command: str = ""
    """What submits it again."""
    cwd: str = ""
    """Where that was typed."""


@dataclass(frozen=True)
class Sweep:
    """A sweep, which may have been submitted before."""

    name: str
    """As `digits/s1`."""
    path: Path
    before: SweepRecord | None
    """What it wanted when it was last submitted."""

    @property
    def runs_dir(self) -> Path:
        return self.path.parents[2]

    @cached_property
    def alive_lock(self) -> FileLock:
        """Held on this machine by the process that waits for its runs, as long as that lives."""
        return lock_at(self.path / _ALIVE, elsewhere="set --runs-dir or JOBKIT_RUNS")

    @property
    def process_file(self) -> Path:
        """Where that process writes its id."""
        return self.path / "runner.pid"

    @property
    def log(self) -> Path:
        """What that process says: it has no terminal."""
        return self.path / "runner.log"

    def has_runner(self) -> bool | None:
        """Whether that process lives; None where nobody here can know."""
        return is_held(self.path / _ALIVE)

    def version(self) -> tuple[int, int]:
        """Changes whenever a submission of the sweep has written down what it wants."""
        found = (self.path / _RECORD).stat()
        return found.st_mtime_ns, found.st_ino

    def record(self) -> SweepRecord | None:
        """What it wants by now; None where that cannot be read."""
        return records.read(SweepRecord, self.path / _RECORD)

    @property
    def arrays(self) -> Path:
        """A folder with a folder for each job array."""
        return self.path / "arrays"

    def next_array(self) -> Path:
        """The folder of one more job array; it is made."""
        self.arrays.mkdir(parents=True, exist_ok=True)
        numbers = [int(one.name) for one in self.arrays.iterdir() if one.name.isdigit()]
        folder = self.arrays / str(max(numbers, default=0) + 1)
        folder.mkdir()
        return folder

    def former(self, runs: Sequence[str]) -> list[str]:
        """Of the runs that it has wanted those that are not among `runs`."""
        known = [] if self.before is None else [*self.before.runs, *self.before.former]
        return [name for name in dict.fromkeys(known) if name not in set(runs)]

    def write(self, record: SweepRecord) -> None:
        """Record what it wants from now on."""
        self.path.mkdir(parents=True, exist_ok=True)
        records.write(self.path / _RECORD, record)

    def announce(self) -> None:
        """Let `version` change: what the sweep wants is prepared by now."""
        with contextlib.suppress(OSError):  # whoever looks does so once more before it ends
            os.utime(self.path / _RECORD)


def at(path: Path) -> Sweep:
    """The sweep in a folder."""
    return Sweep(f"{path.parent.name}/{path.name}", path, records.read(SweepRecord, path / _RECORD))


def open_sweep(runs_dir: Path, name: str, key: str) -> Sweep:
    """The sweep of a name that has this key, else the next new one; the caller holds `submission_lock`."""
    folder = runs_dir / FOLDER / name
    numbers = []
    with contextlib.suppress(FileNotFoundError):
        numbers = sorted(int(one.name[1:]) for one in folder.iterdir() if one.name[1:].isdigit())
    for number in numbers:
        record = records.read(SweepRecord, folder / f"s{number}" / _RECORD)
        if record is not None and record.key == key:
            return at(folder / f"s{number}")
    number = max(numbers, default=0) + 1
    return at(folder / f"s{number}")


def wanted_by_others(sweep: Sweep) -> set[str]:
    """The names of the runs that the other sweeps of that runs directory want."""
    records_of_all = (sweep.runs_dir / FOLDER).glob(f"*/*/{_RECORD}")
    others = (records.read(SweepRecord, file) for file in records_of_all if file.parent != sweep.path)
    return {name for record in others if record is not None for name in record.runs}


def has_runner(runs_dir: Path, sweep: str) -> bool | None:
    """As the sweep's own; its record, which may be long, is not read."""
    return is_held(runs_dir / FOLDER / sweep / _ALIVE)


def max_running(runs_dir: Path, sweep: str) -> int | None:
    """How many of a sweep's runs may train at once on this machine; None for as many as fit."""
    record = records.read(SweepRecord, runs_dir / FOLDER / sweep / _RECORD)
    return None if record is None else record.max_running


def runs_of(runs_dir: Path, sweep: str) -> list[str] | None:
    """The names of the runs of a sweep, as `digits/s1`, in its own order; None where there is no such sweep."""
    record = records.read(SweepRecord, runs_dir / FOLDER / sweep / _RECORD)
    return None if record is None else record.runs


def names_of_sweeps(runs_dir: Path) -> list[str]:
    """As `digits/s1`, all there are, in the order of their names and numbers."""
    found = [(file.parent.parent.name, file.parent.name) for file in (runs_dir / FOLDER).glob(f"*/s*/{_RECORD}")]
    return [f"{name}/{own}" for name, own in sorted(found, key=lambda one: (one[0], len(one[1]), one[1]))]


def key_of(*words: str) -> str:
    """The key of a sweep that is told from others by these words."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def submission_lock(runs_dir: Path, seconds: float | None = None) -> AbstractContextManager[FileLock]:
    """Held while a sweep is submitted: one lock for all of a runs directory, since two sweeps may share a run.

    Raises JobkitError after a wait of `seconds`, where they are given.
    """
    lock = lock_at(runs_dir / BESIDE / _LOCK, elsewhere="set --runs-dir or JOBKIT_RUNS")
    return held(lock, f"submitting a sweep in {runs_dir}", seconds)


def wait_until_submitted(runs_dir: Path) -> None:
    """Return when nobody submits a sweep; whoever does needs no lock of a run that it has written down.

    Raises JobkitError after WAIT_SECONDS: where an earlier submission had written the run down, and was cut off, the
    one that goes on now may wait for the caller's lock.
    """
    with submission_lock(runs_dir, WAIT_SECONDS):
        pass


def is_being_submitted(runs_dir: Path) -> bool | None:
    """Whether somebody is submitting a sweep; None where nobody here can know. Nothing is written."""
    return is_held(runs_dir / BESIDE / _LOCK)
