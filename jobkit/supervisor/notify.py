"""The command of `--notify`, which the run's owner gets told by: for each end of the run, and for a long wait.

    submit --keep--> notify (for its owner alone) --tell, after the end is journalled--> bash -c COMMAND, or sh

Whoever writes the end calls `tell`: the supervisor as its last act, an agent that has closed the attempt of a dead
supervisor, `cancel` of a run in the queue. job.sh tells where no supervisor can start. Nobody is there to tell of a job
that an administrator takes out of the queue.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from jobkit.config.machine import clean_environment
from jobkit.duration import format_seconds
from jobkit.log import log
from jobkit.run.files import FOR_OWNER, foreign_owner, is_there, json_text, write_atomic
from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.slurm.commands import without_options
from jobkit.supervisor.allocation import KILLED_SECONDS
from jobkit.supervisor.retry import KEEP_SECONDS

SECONDS = 60.0
"""How long the command may take."""

MOST_BYTES = 100_000
"""Linux takes no variable of more than 128 KiB."""


def keep(run: RunDir, command: str | None) -> None:
    """Keep the command for the run's next ends; None leaves the one before, and an empty one takes it away."""
    if command:
        write_atomic(run.notify_file, os.fsencode(command), mode=FOR_OWNER)  # it may hold a token
    elif command is not None:
        run.notify_file.unlink(missing_ok=True)


def tell(run: RunDir, token: str, before: Status) -> None:
    """Run the command if the submission with this token has ended since `before`."""
    status = read_status(run)
    if status.since != before.since and status.is_over and status.token == token:
        _execute(run, status, variables(run, status))


def tell_waiting(run: RunDir) -> None:
    """Run the command, in a thread, once a run has waited for KEEP_SECONDS without progress."""
    status = read_status(run)
    waited = [attempt.ended.waited for attempt in status.attempts if attempt.ended is not None]
    if waited and waited[-1] >= KEEP_SECONDS > sum(waited[-2:-1]):
        text = f"{run.name}: no progress for {format_seconds(waited[-1])}: {status.reason}"
        words = variables(run, status) | {"JOBKIT_TEXT": text}
        threading.Thread(target=_execute, args=(run, status, words), daemon=True).start()


def tell_no_room(run: RunDir, error: OSError) -> None:
    """Run the command for a run whose disk takes no files, so that its journal cannot say that it is interrupted."""
    with contextlib.suppress(OSError):
        status = replace(read_status(run), state=State.INTERRUPTED, reason=str(error))
        _execute(run, status, variables(run, status))


def _execute(run: RunDir, status: Status, words: dict[str, str]) -> None:
    if not is_there(run.notify_file):
        return
    if (owner := foreign_owner(run.notify_file)) is not None:
        log.warning("%s belongs to %s: not executed", run.notify_file, owner)
        return
    folder = Path(status.submitted.folder if status.submitted is not None else "/")
    with _log(run) as said:
        # A session of its own, no file of this process, no variable of the job: what it starts lives on its own.
        process = subprocess.Popen(
            [shutil.which("bash") or "sh", "-c", run.notify_file.read_bytes()],
            cwd=folder if folder.is_dir() else "/",
            env={**without_options(clean_environment()), **words},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("the command of --notify was killed after %g s", SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_SECONDS)


def _log(run: RunDir) -> BinaryIO:
    """Open the file for the command's words; a disk without room takes none of them."""
    try:
        run.notify_log.parent.mkdir(exist_ok=True)
        return open(run.notify_log, "ab", opener=lambda name, flags: os.open(name, flags, FOR_OWNER))
    except OSError:
        return Path(os.devnull).open("ab")


def variables(run: RunDir, status: Status) -> dict[str, str]:
    """Return the variables of the command, for a run that is over."""
    ended = status.attempt.ended if status.attempt is not None else None
    step = ended.last_step if ended is not None else None
    error = status.reason
    if status.state == State.FAILED and ended is not None and ended.error:
        error = ended.error
    result = json_text(status.result, indent=None) if status.result is not None else ""
    at, why = f" at step {step}" if step is not None else "", f": {status.reason}" if status.reason else ""
    return {
        "JOBKIT_RUN": str(run.path),
        "JOBKIT_NAME": run.name,
        "JOBKIT_STATE": status.state,
        "JOBKIT_TEXT": f"{run.name}: {status.state}{at}{why}",
        "JOBKIT_STEP": str(step) if step is not None else "",
        "JOBKIT_RESULT": result if len(result) <= MOST_BYTES else "",
        "JOBKIT_ERROR": error,
    }
