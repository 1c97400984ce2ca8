"""Why is this attempt being stopped? Asked once, by rank 0, when a notice has come."""

from __future__ import annotations

import os
import signal
import sys
import time

from jobkit.errors import SchedulerError
from jobkit.run.files import read_json
from jobkit.run.rundir import RunDir
from jobkit.runtime.notices import Notices
from jobkit.scheduler import slurm

ASK_SECONDS = 2.0
"""How long to wait for Slurm's record to name a reason; the signal can overtake it."""


class CauseFinder:
    """Knows whom to ask: jobkit's own notice first, then the scheduler, then the clock and the signal itself."""

    def __init__(self, run: RunDir, attempt: int, notices: Notices) -> None:
        self.run = run
        self.attempt = attempt
        self.notices = notices
        self.job_id = slurm.current_job() if os.environ.get("JOBKIT_SCHEDULER") == "slurm" else None
        self.margin = 0.0

    def set_deadline(self) -> None:
        """Learn when Slurm will end this attempt, and whether it is being stopped already.

        Signals that came while the interpreter was starting are lost; the job's record still knows what they meant.
        """
        if self.job_id is None:
            return
        job = self._ask()
        if job is None or job.end is None or job.start is None:
            return
        self.margin = slurm.stop_margin(job.end - job.start)
        self.notices.deadline = job.end - self.margin
        if slurm.stop_cause(job, self.margin, time.time()):
            self.notices.signal = signal.SIGTERM

    def find(self) -> str | None:
        """preempted, timeout, cancelled, user or signal; None for a false alarm."""
        notice = read_json(self.run.notice_file(self.attempt))
        if isinstance(notice, dict) and notice.get("cause"):
            return str(notice["cause"])
        if self.job_id is None:
            return "user" if self.notices.signal is not None else None
        until = time.monotonic() + ASK_SECONDS
        while True:
            job, now = self._ask(), time.time()
            if job is not None and (cause := slurm.stop_cause(job, self.margin, now)):
                return cause
            by_timer = self.notices.signal == signal.SIGUSR2
            if job is not None and by_timer and slurm.early_timeout_signal(job, self.margin, now):
                return None  # the deadline, which is exact, will say when
            if job is None and self.notices.deadline is not None and now >= self.notices.deadline:
                return "timeout"
            if time.monotonic() >= until:
                return "signal"  # someone's own `scancel --signal`: save, and go on in a new attempt
            time.sleep(0.3)

    def _ask(self) -> slurm.JobInfo | None:
        assert self.job_id is not None
        try:
            return slurm.show_job(self.job_id)
        except SchedulerError as error:
            print(f"jobkit: {error}", file=sys.stderr)
            return None
