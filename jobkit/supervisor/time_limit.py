"""When an attempt has to end for its time limit: as Slurm counts it, or `resources.time` on this machine."""

from __future__ import annotations

import math
import time

from jobkit import slurm
from jobkit.run.config import Resources
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import ask, notice_margin

ASK_SECONDS = 60.0
"""How often Slurm is asked for the time limit: an operator may have given the job more time."""


class LocalTimeLimit:
    """`resources.time` as Slurm would keep it, margin included; none where the YAML says nothing."""

    def __init__(self, resources: Resources) -> None:
        self.seconds = math.inf if resources.time == "auto" else float(resources.seconds)
        self._started = time.monotonic()

    def is_near(self) -> bool:
        """Whether the ranks have to be told to write the last checkpoint."""
        return math.isfinite(self.seconds) and self._left() <= slurm.stop_margin(self.seconds)

    def gives_notice(self) -> bool:
        """Never: `is_near` is the notice, for commands too."""
        return False

    def is_over(self, saving: bool = False) -> bool:
        """Whether the ranks have to be killed, as Slurm would kill them even while they save."""
        return self._left() <= 0

    def _left(self) -> float:
        return self._started + self.seconds - time.monotonic()


class SlurmTimeLimit:
    """The job's limit. At its end Slurm kills the supervisor too, which needs a part of the margin to decide in."""

    def __init__(self, run: RunDir, job_id: str) -> None:
        self.run = run
        self.job_id = job_id
        self._asked = -math.inf
        self._notice_at = self._kill_at = self._kill_saving_at = math.inf

    def is_near(self) -> bool:
        """Never: the ranks ask Slurm for the limit themselves (worker/stop.py)."""
        return False

    def gives_notice(self) -> bool:
        """Whether a command that does not ask has to be told of it, as `is_over` knows it.

        Slurm's own --signal would come up to a minute early, only once in a job, and end whatever does not catch it.
        """
        return time.monotonic() >= self._notice_at

    def is_over(self, saving: bool) -> bool:
        """Whether the ranks, which were to stop a margin before the limit, leave too little of it. Asks Slurm."""
        now = time.monotonic()
        if now - self._asked > ASK_SECONDS:
            self._asked, job = now, ask(self.job_id)  # the limit that is known holds where Slurm does not answer
            if job is not None and job.remaining is not None and job.limit is not None:
                margin, end = slurm.stop_margin(job.limit), now + job.remaining
                # Ranks that have not begun to save by half of it are stuck; with less than an eighth, 11 s of 90, the
                # supervisor could not record the end and requeue the job before Slurm kills it.
                self._kill_at, self._kill_saving_at = end - margin / 2, end - margin / 8
                self._notice_at = end - notice_margin(self.run, job.limit)
        return now >= (self._kill_saving_at if saving else self._kill_at)


TimeLimit = LocalTimeLimit | SlurmTimeLimit
