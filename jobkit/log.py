"""What jobkit itself says, line by line: one logger, `jobkit: ` in front, set up once by each program's entry point."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Literal, TextIO

log = logging.getLogger("jobkit")
"""For all of jobkit. Info is what a user wants to know anyway; a warning is what the user may have to act on."""


class _Handler(logging.Handler):
    """Looks sys.stdout and sys.stderr up at each line: a rank replaces them by ones that survive a full disk."""

    def __init__(self, info: Literal["stdout", "stderr"]) -> None:
        super().__init__()
        self._info = info

    def emit(self, record: logging.LogRecord) -> None:
        stream = getattr(sys, self._info if record.levelno < logging.WARNING else "stderr")
        try:
            _print(f"jobkit: {self.format(record)}", stream)
        except Exception:  # as in logging: a line that cannot be printed is no reason to stop
            self.handleError(record)


def _print(line: str, stream: TextIO) -> None:
    """A line of its own also where a progress bar of tqdm's stands at the end of the terminal."""
    with contextlib.ExitStack() as cleared:
        if (tqdm := sys.modules.get("tqdm")) is not None:
            # Without tqdm's lock: a loader's worker that was killed may hold it for ever. Another thread may make a
            # bar right now; then the line stands behind the one that is there.
            with contextlib.suppress(Exception):
                cleared.enter_context(tqdm.tqdm.external_write_mode(file=stream, nolock=True))
        encoding = getattr(stream, "encoding", None) or "utf-8"  # of a terminal that may have no such letters
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)


def configure(info: Literal["stdout", "stderr"] = "stderr") -> None:
    """Print what is logged: warnings to standard error, the rest to `info`, which in a rank is what followers show."""
    log.handlers[:] = [_Handler(info)]
    log.setLevel(logging.INFO)
    log.propagate = False  # a root logger that the user's code sets up would print every line again
