"""The processes beside rank 0 that copy what is logged to other services (jobkit/mirror)."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from jobkit.log import log
from jobkit.start import words

WAIT_SECONDS = 20.0
"""How long the end of a finished run waits for its last points to be copied."""


class MirrorProcesses:
    """Copy a run's curves, one process a service, until they are closed or this process ends.

    Nothing here waits for them but `finish`.
    """

    def __init__(self, run: Path, services: Sequence[str]) -> None:
        self._run = run
        # Not the terminal's input, and no output but their warnings.
        self._processes = [
            subprocess.Popen(
                words("jobkit.mirror.main", str(run), service), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            for service in services
        ]

    def close(self) -> None:
        """Let them copy what is left by themselves, and end."""
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed before
                    process.stdin.write(b"\n")  # its end alone is not seen while a loader's worker has the pipe, too
                    process.stdin.close()

    def finish(self) -> None:
        """The same, and wait a while: a finished run's processes end, and these would be ended with them."""
        self.close()
        until = time.monotonic() + WAIT_SECONDS
        try:
            for process in self._processes:
                process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning(
                "what was logged is not all copied after %.0f s; `python -m jobkit mirror %s` copies the rest",
                WAIT_SECONDS,
                self._run.name,
            )
