"""The start of a DataLoader's worker: the stop signals are for the rank, which saves and then ends its workers.

    torchrun, timeout --SIGTERM to the group--> rank: saves      worker: goes on, until the rank's exit sets a flag

A worker that the signal ended would be an error of the rank before the rank comes to save. Every loader that jobkit
reads begins its workers so.
"""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from typing import Any

from torch.utils.data import DataLoader

from jobkit.errors import OutsideError, UsageError
from jobkit.weather import nature_of

LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")
"""The path of a Unix socket has at most 107 bytes. The rest is the name that multiprocessing gives one."""

_ENDS: dict[int, mmap.mmap] = {}
"""By process: a byte in shared memory, 1 from the exit of the process on."""


def _end_of_process() -> mmap.mmap:
    if os.getpid() not in _ENDS:
        _ENDS.clear()
        flag = _ENDS[os.getpid()] = mmap.mmap(-1, 1)
        atexit.register(_note_end, os.getpid(), flag)  # before multiprocessing's own, which sends SIGTERM and waits
    return _ENDS[os.getpid()]


def _note_end(process: int, flag: mmap.mmap) -> None:
    if os.getpid() == process:  # else it is one that the rank has forked
        flag[0] = 1


class WorkerInit:
    """A worker_init_fn that takes stop signals from the end of the rank alone, and then calls the script's own."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self._init = init
        self._ends: mmap.mmap | None = _end_of_process()

    def __getstate__(self) -> dict[str, Any]:
        return {"_init": self._init, "_ends": None}  # a worker that is spawned has no memory of the rank's

    def __call__(self, number: int) -> None:
        if (ends := self._ends) is not None:
            for stop in (signal.SIGTERM, signal.SIGUSR2):
                signal.signal(stop, lambda *_: os._exit(0) if ends[0] else None)
        if self._init is not None:
            self._init(number)


@contextmanager
def outside_is_said() -> Iterator[None]:
    """In a worker, raise an error of the outside as an OutsideError.

    The rank gets an error's type and text, without its number and its causes: EIO would look like a missing file.
    """
    try:
        yield
    except Exception as error:
        if multiprocessing.parent_process() is None or nature_of(error) != "outside":
            raise
        raise OutsideError(f"{type(error).__name__}: {error}") from error


def fork_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Let a loader fork its workers where the script has chosen no start method, and return it.

    Python 3.14 chooses a server of its own: each worker imports torch anew, and SIGTERM to the group ends the server.
    Raises UsageError where workers could hand no tensor over: a thread of theirs would die, and the rank wait for ever.
    """
    folder = tempfile.gettempdir()
    over = len(os.fsencode(folder)) - LONGEST_TMPDIR
    if loader.num_workers > 0 and over > 0 and util.get_temp_dir().startswith(folder):  # Python may take /tmp instead
        words = f"TMPDIR={folder}: {over} byte(s) too long for the sockets of a DataLoader's workers"
        raise UsageError(f"{words}; set a shorter one, or num_workers=0")
    is_chosen = loader.multiprocessing_context is not None or multiprocessing.get_start_method(allow_none=True)
    if loader.num_workers > 0 and not is_chosen:
        loader.multiprocessing_context = "fork"
    return loader
