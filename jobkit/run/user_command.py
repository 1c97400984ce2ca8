"""A command of the user's own, run beside what goes on: it has a session of its own, a limited time, and a log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from jobkit.log import log
from jobkit.run.files import FOR_OWNER

COMMAND_SECONDS = 60.0
"""How long a command may take, and then is killed."""


def start(command: str, found: Mapping[str, str], log_file: Path | None, folder: str = "/") -> threading.Thread:
    """Run a command beside what goes on here, with these variables, in a folder, or in / where that is not there; its
    output is added to a file that only its user can read, or printed where there is none."""
    thread = threading.Thread(target=_run, args=(command, dict(found), log_file, folder), daemon=True)
    thread.start()
    return thread


def _run(command: str, found: Mapping[str, str], log_file: Path | None, folder: str) -> None:
    try:
        with _opened(log_file) as output:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env={**os.environ, **found},
                cwd=folder if os.access(folder, os.X_OK) else "/",
                start_new_session=True,  # it gets none of the run's signals, and can be killed whole
            )
        try:
            code = process.wait(COMMAND_SECONDS)
            if code:
                log.warning(
                    "the command of `notify` ended with exit code %s%s", code, f" ({log_file})" if log_file else ""
                )
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.warning("the command of `notify` took more than %.0f s and was killed", COMMAND_SECONDS)
    except OSError as error:
        log.warning("the command of `notify` could not be run: %s", error)


def _opened(file: Path | None) -> contextlib.AbstractContextManager[BinaryIO | None]:
    if file is None:
        return contextlib.nullcontext()
    return open(file, "ab", opener=lambda name, flags: os.open(name, flags, FOR_OWNER))
