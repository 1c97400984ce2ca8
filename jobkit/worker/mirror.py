"""The process beside rank 0 that copies what is logged to other services (jobkit/mirror)."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from jobkit.log import log
from jobkit.start import words

WAIT_SECONDS = 20.0
"""How long the end of a finished run waits for its last points to be copied."""


class MirrorProcess:
    """Copies a run's curves until it is closed, or this process ends. Nothing here waits for it but `finish`."""

    def __init__(self, run: Path) -> None:
        self._run = run
        # Not the terminal's input, and no output but its warnings.
        self._process = subprocess.Popen(
            words("jobkit.mirror.main", str(run)), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )

    def close(self) -> None:
        """Let it copy what is left by itself, and end."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def finish(self) -> None:
        """The same, and wait a while: a finished run's processes end, and it would be ended with them."""
        self.close()
        try:
            self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            log.warning(
                "what is logged is not all copied after %.0f s; `python -m jobkit mirror %s` copies the rest",
                WAIT_SECONDS,
                self._run.name,
            )
