"""Why is this attempt being stopped? Asked once, by rank 0, when a notice has come."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from jobkit.errors import EXIT_RESUMABLE, SchedulerError
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
        self.last_call: float | None = None
        """When a rank that is still within a step has to end, in seconds since the epoch."""
        self.found = False
        """Whether `find` has named a cause: from then on this attempt is ending."""

    def look_around(self) -> None:
        """Learn when Slurm will end this attempt, and whether it is being stopped already.

        Signals that came while the interpreter was starting are lost; the notice and the job's record still know.
        """
        if self._notice() is not None:
            self.notices.signal = signal.SIGTERM
        job = self._ask() if self.job_id is not None else None
        if job is None or job.end is None or job.start is None:
            return
        self.margin = slurm.stop_margin(job.end - job.start)
        if slurm.stop_cause(job, self.margin, time.time()):
            self.notices.signal = signal.SIGTERM
        else:
            self.notices.deadline = job.end - self.margin
            self.last_call = job.end - self.margin / 2

    def _notice(self) -> str | None:
        notice = read_json(self.run.notice_file(self.attempt))
        return str(notice["cause"]) if isinstance(notice, dict) and notice.get("cause") else None

    def start_last_call(self, when: float | None, is_main: bool) -> None:
        """End this rank at `when`, shortly before Slurm ends the job: a step takes longer than the margin.

        Every rank does it, at the time rank 0 has learnt: the batch script must outlive the ranks to requeue the job,
        and at the time limit Slurm kills them all at once.
        """
        if when is None:
            return

        def call() -> None:
            if self.found:
                return  # the ranks agreed to stop, and are saving
            try:
                if is_main:
                    self.run.record("interrupted", attempt=self.attempt, cause=self._find() or "timeout")
                    print("jobkit: out of time within one step; its last checkpoint is safe", flush=True)
            finally:
                os._exit(EXIT_RESUMABLE)

        timer = threading.Timer(max(0.0, when - time.time()), call)
        timer.daemon = True
        timer.start()

    def find(self) -> str | None:
        """preempted, timeout, cancelled, user or signal; None for a false alarm."""
        cause = self._find()
        self.found = cause is not None
        return cause

    def _find(self) -> str | None:
        if (noticed := self._notice()) is not None:
            return noticed
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
            return slurm.show_job(self.job_id, timeout=5.0)  # a save is waiting for the answer
        except SchedulerError as error:
            print(f"jobkit: {error}", file=sys.stderr)
            return None
