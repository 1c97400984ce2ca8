"""Snapshots of code that several runs of a runs directory have together, as those of a sweep do.

A snapshot is a folder `.code/<digest>` in the runs directory; in a run's own `code` folder there is a link to it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from jobkit.run import snapshot, sweeps
from jobkit.run.files import replace_link
from jobkit.run.rundir import SHARED_CODE, RunDir

FOLDER = SHARED_CODE


def folder(runs_dir: Path) -> Path:
    """Where the snapshots of a runs directory are that several runs have."""
    return runs_dir / FOLDER


def use(run: RunDir, version: str) -> str:
    """Give a run, whose submission lock is held, a snapshot of `folder`, unless it has one; returns its name."""
    own = run.code / version
    if own.is_dir() and not own.is_symlink():
        if not snapshot.verify(run.code, version):
            return version
        shutil.rmtree(own)
    run.code.mkdir(parents=True, exist_ok=True)
    replace_link(own, folder(run.path.parent) / version)
    return version


def used_by(run: RunDir) -> list[str]:
    """The names of the shared snapshots that a run has."""
    return [name for name, is_link in _versions(run.code) if is_link]


def remove_unused(runs_dir: Path, versions: Collection[str]) -> list[str]:
    """Remove those of some shared snapshots that no run has any more; returns their names.

    The caller holds no run's lock: whoever submits a sweep takes that of the sweeps first.
    """
    if not versions or sweeps.is_being_submitted(runs_dir):  # a snapshot that no run has yet may be meant for some
        return []
    with sweeps.submission_lock(runs_dir):
        used = {
            name
            for entry in os.scandir(runs_dir)
            if not entry.name.startswith(".")
            for name, is_link in _versions(Path(entry.path) / "code")
            if is_link
        }
        unused = sorted(set(versions) - used)
        for version in unused:
            shutil.rmtree(folder(runs_dir) / version, ignore_errors=True)
    return unused


def _versions(code: Path) -> list[tuple[str, bool]]:
    """Of a run's snapshots the names, and whether they are links to shared ones."""
    try:
        return [(entry.name, entry.is_symlink()) for entry in os.scandir(code)]
    except OSError:
        return []
