"""Saves what the ranks of this node have compiled to the run directory, for attempts on nodes that have none of it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from types import TracebackType

from jobkit.log import log
from jobkit.run import archive, compiler_cache
from jobkit.run.append import Outage
from jobkit.run.rundir import RunDir
from jobkit.run.status import State

LOOK_SECONDS = 5.0
"""How often the folder is looked at; what two looks have found alike is saved: the compilers have paused."""

LAST_SECONDS = 5.0
"""How long the end of an attempt that nobody asked to stop waits for the last save."""

MAX_BYTES = 1 << 30
"""What is larger is not saved: its way to and from a file server would take longer than it spares."""

IDLE = 19
"""The lowest priority: the ranks need the cores."""


class CacheKeeper:
    """Saves the cache of one attempt, in a thread of its own beside the supervisor: ranks do not wait for it."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self.run = run
        self.attempt = attempt
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._said_too_large = False
        self._outage = Outage("what was compiled", "Another node would compile it again.")

    def environment(self, code: str) -> dict[str, str]:
        """Variables for the ranks of an attempt with this version of the code; from here on it is saved."""
        folder = compiler_cache.folder_of(self.run, code)
        if folder is None or not (variables := compiler_cache.variables(folder, os.environ)):
            return {}
        if not compiler_cache.make_root(folder):
            return {}
        self._thread = threading.Thread(target=self._keep, args=(folder,), name="cache keeper", daemon=True)
        self._thread.start()
        return variables

    def __enter__(self) -> CacheKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(wait=False)

    def end(self, *, wait: bool) -> None:
        """Let the thread save once more and end; with `wait` it gets LAST_SECONDS, else what is left of this process.

        A stop does not wait: within what Slurm leaves it the job has to be requeued.
        """
        self._end.set()
        if wait and self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def _keep(self, folder: Path) -> None:
        if sys.platform == "linux":  # elsewhere it would be the whole process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), IDLE)
        target = self.run.compiled_archive(compiler_cache.version(folder))
        saved, before = archive.contents(target), None
        is_last = False
        while not is_last:
            is_last = self._end.wait(LOOK_SECONDS)
            now = compiler_cache.files_in(folder)
            is_over = is_last and self._is_over()
            if (now == before or is_last) and not (is_over or now.items() <= saved.items()) and self._fits(now):
                with self._outage.survived():
                    self._save(folder, now, target)
                    saved = now
            before = now
            if is_over or (is_last and not now):
                compiler_cache.remove(folder)

    def _is_over(self) -> bool:
        with contextlib.suppress(OSError):
            return self.run.status().state == State.FINISHED
        return False

    def _fits(self, files: dict[str, int]) -> bool:
        size = sum(files.values())
        if size > MAX_BYTES and not self._said_too_large:
            self._said_too_large = True
            log.info("what was compiled is not saved: %d MiB, more than %d", size >> 20, MAX_BYTES >> 20)
        return size <= MAX_BYTES

    def _save(self, folder: Path, files: dict[str, int], target: Path) -> None:
        if self.run.owner() != self.attempt:
            return
        target.parent.mkdir(exist_ok=True)
        archive.pack(folder, sorted(files), target)
        # No attempt will run another version of the code; a temporary is a dead attempt's.
        code = target.name.partition("-")[0]
        for other in target.parent.iterdir():
            if not other.name.startswith(code):
                with contextlib.suppress(OSError):
                    other.unlink()
