"""The run of the same name that a new run does not continue: it was not finished, and computes something else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from jobkit.errors import InputError, SchedulerError
from jobkit.run.command_line import to_type
from jobkit.run.config import Config
from jobkit.run.differences import DECIDES, differences
from jobkit.run.rundir import RunDir
from jobkit.run.runs import runs_of
from jobkit.run.status import State, Status

LOOKED_AT = 200
"""Of more runs of one name the last one is not looked for: they are a sweep's."""

SHOWN = 5
"""How many differences are told."""


def left_unfinished(run: RunDir, config: Config, observe: Callable[[RunDir], Status]) -> str:
    """What to tell of a run that begins at step 0, where the last run of its name has not come to its end.

    Whoever has changed a value of the YAML, or lacks a variable of the environment, may expect that one to go on.
    Empty where the last one is finished, cancelled, under way, a sweep's, or has no checkpoint.
    `observe` says how a run stands whose journal has no end.
    """
    if config.start_from.run or run.exists() or not (others := runs_of(run.path.parent, config.name, LOOKED_AT)):
        return ""
    last = others[0].open()
    with contextlib.suppress(InputError, SchedulerError, OSError):  # what cannot be read is not for this submission
        status = last.status()
        if not status.checkpoint or status.sweep:
            return ""
        if status.state.is_under_way:
            status = observe(last)
        changed = [str(one) for one in differences(last.config(), config, DECIDES)]
        if status.state in (State.INTERRUPTED, State.FAILED) and changed:
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            told = (
                f"{run.name} is a new run, from step 0: {', '.join(changed[:SHOWN])}{more}, compared with {last.name}, "
                f"{status.state}{status.at_steps}"
            )
            if status.launcher:
                return f"{told}; the values of before continue that one"
            return (
                f"{told}\nto continue that one: {to_type('resume', last.name)}; "
                f"to go on from its checkpoint with these values: this command with --from {last.name}"
            )
    return ""
