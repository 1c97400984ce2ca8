"""Snapshots of code that several runs of a runs directory have together, as those of a sweep do.

A snapshot is a folder `.code/<digest>` in the runs directory; in a run's own `code` folder there is a link to it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from jobkit.run import snapshot
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
