"""jobkit rm RUN ...: remove runs that are over, or their checkpoints alone.

    runs/<run> --rename, under its submit lock--> runs/.removed/<run>.<time> --delete
    runs/.code/<digest> that no run has any more --rename, under the lock of the snapshots--> the same

A removal that was killed leaves no half of a run: the next `rm` deletes the rest. Files that another run has too, as a
checkpoint that it started from, stay there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jobkit.cli.arguments import add_runs, chosen, confirm, for_each, way_out
from jobkit.errors import EXIT_FINISHED, InputError
from jobkit.run import older, snapshot
from jobkit.run.after import awaited
from jobkit.run.files import foreign_owner, read_json
from jobkit.run.journal import cached_status
from jobkit.run.locks import make_folder
from jobkit.run.rundir import RunDir
from jobkit.run.runs import joined, runs_in
from jobkit.run.status import UNDER_WAY, State
from jobkit.run.view import View, view, views
from jobkit.usage import show_examples

ASIDE = ".removed"
BLOCK = 512
"""Bytes that `st_blocks` counts in."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, asks=True)
    parser.add_argument(
        "--checkpoints-only", action="store_true", help="keep the journal, the logs, the curves and final/"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be removed, and how large it is")
    show_examples(
        parser,
        {
            "'toy*' --dry-run": "what would be removed",
            "'toy*' --checkpoints-only -y": "the checkpoints of several runs, without being asked",
        },
    )


def run(arguments: argparse.Namespace) -> int:
    """Remove the runs, unless one of them may not be removed: then none."""
    runs, checkpoints_only = chosen(arguments), arguments.checkpoints_only
    needed = {} if checkpoints_only else _needed({run.path.parent for run in runs})
    kept = [(now, why) for now in views(runs) if (why := _why_not(now) or needed.get(now.run.path.resolve()))]
    if kept:
        words = joined([f"{now.run.name} ({why})" for now, why in kept])
        hints = ["leave it out, or cancel it first", *[way_out(now) for now, _ in kept if not now.answered][:1]]
        raise InputError(f"nothing was removed: {words}", hint="; ".join(hints))
    if arguments.dry_run:
        sizes = {run.name: _size(_parts(run, checkpoints_only)) for run in runs}
        for name, size in sizes.items():
            print(f"{name}  {in_words(size)}")
        print(f"{len(runs)} run(s), {in_words(sum(sizes.values()))}; nothing was removed")
        return EXIT_FINISHED
    confirm(runs, yes=arguments.yes)
    for folder in {run.path.parent for run in runs}:
        _delete_leftovers(folder)
    snapshots: dict[Path, set[str]] = {}

    def remove(run: RunDir) -> int:
        name = run.code.resolve().name if run.code.is_symlink() else ""
        size = _remove(run, checkpoints_only)
        if name and not checkpoints_only:
            snapshots.setdefault(run.path.parent, set()).add(name)
        print(f"{run.name}{': checkpoints' if checkpoints_only else ''} removed, {in_words(size)}", flush=True)
        return EXIT_FINISHED

    code = for_each(runs, remove)
    for folder, names in snapshots.items():
        snapshot.put_unused(folder, names, _aside(folder))
        _delete_leftovers(folder)
    return code


def _needed(folders: Iterable[Path]) -> dict[Path, str]:
    """Return the runs that queued runs in these folders wait for (`--after`), each with the reason to keep it.

    A run with --from needs no other: the checkpoint that it begins with is in its own directory.
    """
    runs = [run for folder in folders for run in runs_in(folder)]
    queued = [run for run in runs if (cached_status(run) or {"state": "queued"}).get("state") == "queued"]
    return {
        other.path.resolve(): f"{now.run.name} waits for it"
        for now in views(queued)
        if now.state == State.QUEUED
        for other in awaited(now.run, now.status)
    }


def _why_not(now: View) -> str | None:
    """Return the reason against the removal of a run; None without a reason."""
    path = now.run.path
    if not now.run.exists():
        return "it is gone"
    if path.is_symlink():
        return f"a link to {path.resolve()}"
    if os.geteuid() and (owner := foreign_owner(path)) is not None:
        return f"it belongs to {owner}"
    if now.state in UNDER_WAY:
        return now.standing
    if now.status.is_older and (state := read_json(now.run.status_file)["state"]) not in (*older.OVER, "interrupted"):
        return f"an older jobkit left it {state}; if its job is gone: rm -r {path}"
    return None


def _remove(run: RunDir, checkpoints_only: bool) -> int:
    """Remove a run; returns the bytes that the disk gets back. Raises InputError where somebody has continued it."""
    aside = _aside(run.path.parent)
    with run.submit_lock():
        if (why := _why_not(now := view(run, locked=True))) is not None:
            raise InputError(f"not removed: {why}", hint=way_out(now))
        with run.alive_lock():  # the job of a run that has just ended may still write
            parts = _parts(run, checkpoints_only)
            size = _size(parts)
            moved = [part.rename(aside / f"{run.name}.{part.name}.{time.time_ns()}") for part in parts]
    for path in moved:  # without the lock: a new submission of the run makes a directory of its own
        shutil.rmtree(path)
    return size


def _parts(run: RunDir, checkpoints_only: bool) -> list[Path]:
    parts = [run.checkpoints, run.start_folder] if checkpoints_only else [run.path]
    return [part for part in parts if part.exists()]


def _aside(runs_dir: Path) -> Path:
    """The folder in which nobody looks for runs, on the same disk."""
    make_folder(runs_dir / ASIDE)
    return runs_dir / ASIDE


def _delete_leftovers(runs_dir: Path) -> None:
    """Delete the rest of earlier removals, as far as this user may."""
    for path in _aside(runs_dir).iterdir():
        shutil.rmtree(path, ignore_errors=True)


def _size(folders: Sequence[Path]) -> int:
    """Return the bytes that the disk gets back: not those of files with another name elsewhere."""
    names: dict[tuple[int, int], list[int]] = {}
    for info in (info for folder in folders for info in _files(folder)):
        entry = names.setdefault((info.st_dev, info.st_ino), [info.st_nlink, 0, info.st_blocks * BLOCK])
        entry[1] += 1
    return sum(size for links, seen, size in names.values() if seen >= links)


def _files(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, files in os.walk(folder):
        yield from (Path(parent, name).lstat() for name in files)


def in_words(size: int) -> str:
    """Return `512 B`, `30.1 MB`: in powers of 1000, as disks are sold."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
