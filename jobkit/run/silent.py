"""Runs of a command that reports nothing, as a program that knows nothing of jobkit: what is told of their stops."""

from __future__ import annotations

import contextlib

from jobkit.errors import JobkitError
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status

NOTHING_KEPT = "jobkit has no checkpoint of it"
"""The program may have one of its own, of which jobkit knows nothing."""


def is_silent(run: RunDir, status: Status) -> bool:
    """Whether the run is a command's none of whose attempts has begun a loop of jobkit's."""
    with contextlib.suppress(JobkitError, OSError):  # a config that another jobkit wrote: its status can be told still
        return not status.has_loop and status.checkpoint is None and bool(run.config().command)
    return False


def stopping(run: RunDir, status: Status) -> str:
    """What to tell when the ranks have just been asked to stop: what they do about it."""
    if is_silent(run, status):
        return f"your program got SIGTERM; {NOTHING_KEPT} (once more kills it)"
    if status.attempt is not None and status.attempt.has_loop:
        return "stopping: writing a checkpoint ... (once more kills without one)"
    return "stopping: the loop has not begun, so there is nothing new to save (once more kills)"


def how_it_continues(run: RunDir, status: Status) -> str:
    """What is safe of a run that has stopped, and what the same command does then; of one that has failed, which would
    fail again as it is, what comes before."""
    first = f"{_what_to_correct(status)} first. " if status.state == State.FAILED else ""
    command = "then the same command" if first else "the same command"
    if is_silent(run, status):
        return f"{first}{NOTHING_KEPT}; {command} starts it again"
    if status.checkpoint is None:
        return f"{first}There is no checkpoint yet; {command} begins the run again"
    return f"{first}The checkpoint of step {status.checkpoint} is safe; {command} continues the run"


def _what_to_correct(status: Status) -> str:
    failure = status.attempt.failure if status.attempt is not None else None
    if failure is not None and failure.traceback:
        return "Correct what the traceback names"
    return f"Correct what {'its log' if status.attempt is not None else 'the error'} names"
