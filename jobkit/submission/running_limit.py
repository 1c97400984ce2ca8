"""How many runs of a sweep may train at once on Slurm, where they are in several jobs: Slurm's limit is for one array.

What is submitted later starts when the jobs before it have ended, unless there is room for all of it beside them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jobkit import slurm
from jobkit.errors import SchedulerError
from jobkit.run.rundir import RunDir
from jobkit.submission.observer import can_be_asked

ENDED_MEANWHILE = ("Job has already finished", "No error", "Invalid job id")
"""What Slurm says of the tasks of an array that need no limit any more, and of those that got it beside them."""


@dataclass(frozen=True)
class Jobs:
    """The jobs of a sweep's runs on the Slurm that commands here talk to."""

    arrays: list[str]
    """Ids of the job arrays that the sweep has for itself."""
    others: list[str]
    """Ids of jobs, or of single tasks, that its runs were submitted in otherwise."""

    @property
    def ids(self) -> list[str]:
        """All of them."""
        return [*self.arrays, *self.others]


def jobs_here(runs: Sequence[RunDir], sweep: str) -> Jobs:
    """The jobs of runs that are under way. Raises SchedulerError."""
    arrays: dict[str, None] = {}
    others: dict[str, None] = {}
    for run in runs:
        status = run.status()
        if status.job_id is not None and status.scheduler == "slurm" and can_be_asked(status):
            array, _, task = status.job_id.partition("_")
            own = bool(task) and status.sweep == sweep
            (arrays if own else others)[array if own else status.job_id] = None
    return Jobs(list(arrays), list(others))


def limit(arrays: Sequence[str], most: int) -> int:
    """Let at most `most` tasks of some job arrays run at once, and at least one of each; what runs already, runs on.

    Arrays that wait for others of them have the whole limit, the rest share it. Returns how many may run at once.
    Raises SchedulerError.
    """
    if not arrays:
        return most
    waiting = _that_wait(arrays)
    at_once = [one for one in arrays if one not in waiting]
    share = max(1, most // max(1, len(at_once)))
    for ids, throttle in ((at_once, share), (waiting, most)):
        if ids:
            _update(ids, throttle)
    return max(most, len(at_once))


def _that_wait(arrays: Sequence[str]) -> list[str]:
    """Those whose tasks wait until another one of them has ended."""
    options = [*slurm.EVEN_HIDDEN, "--noheader", "--me", "--states=PENDING", "--format=%i|%E"]
    rows = [row.partition("|")[::2] for row in slurm.command("squeue", *options).splitlines()]
    found = {job.partition("_")[0]: set(re.findall(r"(?<=:)\d+", dependency)) for job, dependency in rows}
    return [one for one in arrays if found.get(one, set()) & set(arrays) - {one}]


def _update(arrays: Sequence[str], throttle: int) -> None:
    try:
        slurm.command("scontrol", "update", f"JobId={','.join(arrays)}", f"ArrayTaskThrottle={throttle}")
    except SchedulerError as error:  # it says so of each task that has ended, and the others have the limit
        parts = str(error).partition(": ")[2].split("; ")
        if slurm.is_away(error) or not all(any(words in part for words in ENDED_MEANWHILE) for part in parts):
            raise
