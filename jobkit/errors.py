"""Every error a user can cause. Each message says what was found, what is allowed and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: the same command continues the run


class JobkitError(Exception):
    """Base of all errors with a message meant for the user; shown in a line or two, without a traceback."""

    exit_code = EXIT_FAILED


class InputError(JobkitError):
    """The YAML, the command line or the environment is wrong; nothing was started."""

    exit_code = EXIT_BAD_INPUT


class InvalidValue(InputError):
    """One value of a config is wrong: raised with its dotted key alone; run.places.Places adds file and line."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key = key
        self.problem = problem


class NoSuchModule(InvalidValue):
    """A value names a Python module that is not where the command was typed: run.places.Places looks above the YAML."""

    def __init__(self, key: str, problem: str, module: str) -> None:
        super().__init__(key, problem)
        self.module = module


class UsageError(JobkitError):
    """The training function, its model and the YAML do not fit each other: the run has failed, and is not tried again.

    Raised in a rank. Another attempt, on whatever node, would end the same way.
    """


class NotFinite(UsageError):
    """A loss that is not a number, of a step and its samples on this rank."""

    def __init__(self, step: int, samples: list[int], reason: str, *, repeats: bool = False) -> None:
        super().__init__(f"the loss of step {step} is {reason}")
        self.step, self.samples = step, samples
        self.repeats = repeats
        """Whether another attempt is to repeat the steps up to it, which may come to another result."""


class HardwareFault(JobkitError):
    """A step had another result when it was repeated: what it was first computed on cannot be trusted."""

    def __init__(self, step: int, where: str, node: str | None) -> None:
        super().__init__(f"step {step} had another result when it was repeated: {where} computes wrongly")
        self.node = node
        """Slurm's name of the node; None where there is none to exclude."""


class SchedulerError(JobkitError):
    """A scheduler command is missing, failed or did not answer; nothing was queued."""

    exit_code = EXIT_BAD_INPUT


class SchedulerTimeout(SchedulerError):
    """A scheduler did not answer in time: what it was asked to do may have been done."""


class CheckpointError(JobkitError):
    """A checkpoint could not be written or read; the message says which one is still good."""

    errno: int | None = None
    """The number of the OSError behind it, on whichever rank it was raised, where a disk is to blame."""


class DistributedError(JobkitError):
    """The tasks of an attempt do not form the one process group they were started for."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the allowed name closest to `name`, or an empty string."""
    found = closest(name, allowed)
    return f"; did you mean {found!r}?" if found is not None else ""


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that is most like `name`, or of which one has the other's initials, as `lr`; None for none."""
    names = list(allowed)
    for found in get_close_matches(name, names, n=1, cutoff=0.6):
        return found
    return next((one for one in names if name in _initials(one) or one in _initials(name)), None)


def _initials(name: str) -> list[str]:
    """`lr` of `learning_rate`; none of one word."""
    words = name.split("_")
    return ["".join(word[:1] for word in words)] if len(words) > 1 else []
