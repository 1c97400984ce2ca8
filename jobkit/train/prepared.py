"""Data that is prepared once: a folder that the first process to come makes, while all others wait for it."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from jobkit.run.files import fsync_dir, fsync_file, is_there
from jobkit.run.locks import lock_at


def prepare_folder(folder: Path, fill: Callable[[Path], None], *, durable: bool = True) -> None:
    """Make `folder` unless it is there: `fill(temporary)` writes into a folder that is then given its name.

    It appears whole or not at all, however many processes and hosts ask at once. `durable=False` skips the fsync of its
    files: for many small ones that are quickly made again. Raises OSError, or NoLocks on a file system without locks.
    """
    if is_there(folder):
        return
    parent = folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    with lock_at(parent / ".lock", elsewhere="choose another folder"):
        if is_there(folder):
            return
        # The lock may hold on one host only, as on NFS without a lock daemon; the host's name keeps two of them apart.
        temporary = parent / f".{socket.gethostname()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that died: this one has the lock
        temporary.mkdir()
        fill(temporary)
        for file in temporary.iterdir() if durable else ():
            fsync_file(file)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(temporary)  # another host was first
        fsync_dir(parent)
