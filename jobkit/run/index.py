"""What the list tells of runs that have ended, in one file a runs directory, so that thousands need not be read again.

The file is this user's own, in $XDG_CACHE_HOME/jobkit or ~/.cache/jobkit, and may be deleted at any time: a run whose
journal has changed, and every run where the file is missing, damaged, somebody else's or of another jobkit, is read
from its directory, with the same answer. Whoever replaces it last has the newest; what another one had added is read
once more.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from jobkit.run import fold, status, summary
from jobkit.run.files import FOR_OWNER, write_atomic
from jobkit.run.runs import FoundRun, JournalKey
from jobkit.run.summary import Facts, facts_of

MIN_RUNS = 100
"""From how many runs on the index is used: of fewer the runs' own files are read sooner than the index of thousands."""

REWRITE_RUNS = 20
"""How many runs must have changed until the index is written again: to read a few again takes less time."""

MAX_ENTRY_BYTES = 8 << 10
"""A run with more than that, as a result of thousands of numbers, is not in the index."""


def facts_of_ended(runs: Sequence[FoundRun], *, with_config: bool = False) -> dict[str, Facts]:
    """What the list tells of those of some runs that have ended, by directory.

    `with_config`: with the params and the seed of runs that an earlier jobkit submitted, which takes longer.
    """
    by_folder: dict[str, list[FoundRun]] = {}
    for run in runs:
        by_folder.setdefault(os.path.dirname(run.directory), []).append(run)  # noqa: PTH120
    found: dict[str, Facts] = {}
    for folder, group in by_folder.items():
        found |= _of_folder(Path(folder), group, with_config) if len(group) >= MIN_RUNS else _read(group, with_config)
    return found


def _read(runs: Iterable[FoundRun], with_config: bool) -> dict[str, Facts]:
    """The same, from the runs' directories."""
    found = {run.directory: facts_of(status) for run in runs if (status := run.final_status()) is not None}
    if with_config:
        for run in runs:
            if run.directory in found and found[run.directory]["name"] is None:
                found[run.directory] |= run.recorded_config()
    return found


def _of_folder(folder: Path, runs: Sequence[FoundRun], with_config: bool) -> dict[str, Facts]:
    """The same, from the index as far as it knows them."""
    file = index_file(folder)
    entries = _load(file, folder)
    found = ((run, entries.get(run.name)) for run in runs)
    known = {run.directory: entry[1] for run, entry in found if entry is not None and entry[0] == run.key}
    if with_config:
        known = {directory: facts for directory, facts in known.items() if facts["name"] is not None}
    new = _read([run for run in runs if run.directory not in known], with_config)
    if len(new) >= REWRITE_RUNS:
        entries |= {run.name: (run.key, new[run.directory]) for run in runs if run.directory in new}
        with suppress(OSError):  # only a shorter way
            _save(file, folder, entries)
    return known | new


def index_file(folder: Path) -> Path:
    """Where the index of a runs directory is."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_home) / "jobkit" / f"runs-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.json"


Entries = dict[str, tuple[JournalKey, Facts]]


def _load(file: Path, folder: Path) -> Entries:
    """What the index says, by a run's name; nothing where it is not whole, or not of this user, folder and jobkit."""
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_uid != os.geteuid():
                return {}
            digest, _, body = opened.read().partition(b"\n")
        if digest != _digest(folder, body):
            return {}
        return {name: (tuple(key), facts) for name, key, facts in json.loads(body)}
    except (OSError, ValueError):
        return {}


def _save(file: Path, folder: Path, entries: Entries) -> None:
    there = {path.name for path in folder.iterdir()}
    rows = (json.dumps([name, *entry]) for name, entry in entries.items() if name in there)
    body = f"[{','.join(row for row in rows if len(row) <= MAX_ENTRY_BYTES)}]".encode()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(file, _digest(folder, body) + b"\n" + body, durable=False, mode=FOR_OWNER)


def _digest(folder: Path, body: bytes) -> bytes:
    return hashlib.sha256(b"\0".join([_rules(), os.fsencode(folder), body])).hexdigest().encode()


@cache
def _rules() -> bytes:
    """What the facts depend on besides the run: the code that makes them, which is another in another jobkit."""
    return b"".join(hashlib.sha256(inspect.getsource(one).encode()).digest() for one in (fold, status, summary))
