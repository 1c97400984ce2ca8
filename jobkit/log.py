"""The words of jobkit itself: one logger, `jobkit: ` in front of each line, set up by each program's entry point."""

from __future__ import annotations

import logging
import sys
from typing import Literal

log = logging.getLogger("jobkit")
"""Info tells a user about progress; a warning may need an action of the user."""


class _Handler(logging.Handler):
    """Looks sys.stdout and sys.stderr up at each line, since a program may replace them."""

    def __init__(self, info: Literal["stdout", "stderr"]) -> None:
        super().__init__()
        self._info = info

    def emit(self, record: logging.LogRecord) -> None:
        stream = getattr(sys, self._info if record.levelno < logging.WARNING else "stderr")
        encoding = getattr(stream, "encoding", None) or "utf-8"  # a terminal may lack some letters
        try:
            print(f"jobkit: {self.format(record)}".encode(encoding, "backslashreplace").decode(encoding), file=stream)
            stream.flush()
        except Exception:  # as in logging: a line that cannot be printed is no reason to stop
            self.handleError(record)


def configure(info: Literal["stdout", "stderr"] = "stderr") -> None:
    """Print the log: warnings to standard error, the rest to `info`."""
    log.handlers[:] = [_Handler(info)]
    log.setLevel(logging.INFO)
    log.propagate = False  # a root logger of the user's code would print every line again
