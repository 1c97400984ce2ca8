"""The errors that a user can cause, as data (key, found, allowed, hint), and the exit codes of all commands.

raise InputError(key="resources.nodes", found=0, allowed="1 or more")
    --config/load.py adds file and line, usage.py prints-->
error: toy.yaml:7: resources.nodes: found 0, expected 1 or more
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: the same command continues the run

Nature = Literal["program", "outside", "hardware"]
"""What the type of an error says (jobkit/weather.py)."""

_SEVERITY = (EXIT_FINISHED, EXIT_RESUMABLE, EXIT_FAILED, EXIT_BAD_INPUT)

_MISSING: Any = object()


def worst(codes: Iterable[int]) -> int:
    """Return the exit code of several runs: bad input before failed, before interrupted, before finished."""
    return max(codes, key=_SEVERITY.index, default=EXIT_FINISHED)


class JobkitError(Exception):
    """Base of all errors with a message for the user: a line or two, without a traceback."""

    exit_code = EXIT_FAILED


class InputError(JobkitError):
    """The YAML, the command line or the environment is wrong; nothing was started.

    Fields:
        problem: the sentence, where "found ..., expected ..." does not say it
        key: dotted key of the config, or an option of the command line
        found, allowed: the value that stands there, and the values that may
        hint: what to type instead
        file, line: where the key stands; the loader fills them in (`at`)
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(
        self, problem: str = "", *, key: str = "", found: Any = _MISSING, allowed: str = "", hint: str = ""
    ) -> None:
        super().__init__(problem)
        self.problem, self.key, self.found, self.allowed, self.hint = problem, key, found, allowed, hint
        self.file: Path | str | None = None
        self.line: int | None = None

    def at(self, file: Path | str, line: int | None = None) -> InputError:
        """The same error with the place of its key; a place that it has already is kept."""
        if self.file is None:
            self.file, self.line = file, line
        return self

    def __str__(self) -> str:
        place = "" if self.file is None else f"{self.file}:{self.line}" if self.line else str(self.file)
        values = "" if self.found is _MISSING else f"found {self.found!r}"
        if self.allowed:
            values = f"{values}, expected {self.allowed}".removeprefix(", ")
        words = "; ".join(part for part in (self.problem, values, self.hint) if part)
        return ": ".join(part for part in (place, self.key, words) if part)


class SchedulerError(JobkitError):
    """A scheduler command is missing, failed or did not answer; nothing was queued."""

    exit_code = EXIT_BAD_INPUT


class SchedulerMissing(SchedulerError):
    """A scheduler command is not on PATH: no wait brings it."""


class SchedulerTimeout(SchedulerError):
    """A scheduler did not answer in time: the request may have been carried out."""


class NoSuchRun(InputError):
    """No run has this name, job id or path."""


class UsageError(JobkitError):
    """The training function, its model and the YAML do not fit each other: another attempt would end the same way.

    Raised in a rank.
    """


class CheckpointError(JobkitError):
    """A checkpoint cannot be written, or does not fit the tracked objects."""


class DistributedError(JobkitError):
    """The tasks of an attempt do not form the process group that they were started for."""


class OutsideError(OSError):
    """A disk, a network or a service failed. The text has the type and the words of the error.

    For an error whose own type does not reach this rank: it was a DataLoader's worker's, another rank's, or a thread's.
    """


class NoRoom(OSError):
    """The run directory's disk is full or read-only, and has taken no checkpoint for minutes."""

    def __init__(self, words: str) -> None:
        super().__init__(errno.ENOSPC, words)


class Stopped(SystemExit):
    """The rank was asked to stop and has saved. It passes through `except Exception` of the training function.

    A script that lets it pass ends with exit code 75, without a traceback.
    """

    def __init__(self, words: str = "") -> None:
        super().__init__(EXIT_RESUMABLE)
        self.words = words

    def __str__(self) -> str:
        return self.words


class LostLease(BaseException):
    """Another attempt owns the run: this process writes nothing more and ends."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`did you mean 'x'?` for the allowed name closest to `name`, or an empty text; a hint for InputError."""
    match = closest(name, allowed)
    return f"did you mean {match!r}?" if match is not None else ""


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that is most like `name`, or that shares its initials (`lr`); None if no name is like it."""
    names = list(allowed)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    initials = [full for full in names if name in _initials(full) or full in _initials(name)]
    return next(iter([*close, *initials]), None)


def _initials(name: str) -> list[str]:
    """`lr` for `learning_rate`; nothing for a single word."""
    words = name.split("_")
    return ["".join(word[:1] for word in words)] if len(words) > 1 else []
