"""Why is this attempt being stopped? Asked once, by rank 0, when a notice has come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from jobkit import slurm
from jobkit.errors import SchedulerError
from jobkit.run.files import read_json
from jobkit.run.rundir import RunDir
from jobkit.worker.notices import Notices

ASK_SECONDS = 2.0
"""How long to wait for Slurm's record to name a reason; the signal can overtake it."""

SCRIPT_ASKS = 4
"""How often, after a signal, Slurm is asked whether the batch script was killed."""


class CauseFinder:
    """Knows whom to ask: jobkit's own notice first, then the scheduler, then the clock and the signal itself."""

    def __init__(self, run: RunDir, attempt: int, notices: Notices) -> None:
        self.run = run
        self.attempt = attempt
        self.notices = notices
        self.job_id = slurm.current_job() if os.environ.get("JOBKIT_SCHEDULER") == "slurm" else None
        self.margin = 0.0
        self._script_asked = 0

    def look_around(self) -> None:
        """Learn when Slurm will end this attempt, and whether it is being stopped already.

        Signals that came while the interpreter was starting are lost; the notice and the job's record still know.
        """
        if self._notice() is not None:
            self.notices.signal = signal.SIGTERM
        job = self._ask() if self.job_id is not None else None
        if job is None:
            return
        if job.limit is not None:
            self.margin = slurm.stop_margin(job.limit)
        if slurm.stop_cause(job, self.margin):
            self.notices.signal = signal.SIGTERM
        elif job.remaining is not None:
            self.notices.deadline = time.monotonic() + job.remaining - self.margin

    def _notice(self) -> str | None:
        notice = read_json(self.run.stop_request_file(self.attempt))
        return str(notice["cause"]) if isinstance(notice, dict) and notice.get("cause") else None

    def find(self) -> str | None:
        """preempted, timeout, cancelled, killed, user or signal; None for a false alarm."""
        if (noticed := self._notice()) is not None:
            return noticed
        if self.job_id is None:
            return "user" if self.notices.signal is not None else None
        until = time.monotonic() + ASK_SECONDS
        while True:
            job = self._ask()
            if job is not None and (cause := slurm.stop_cause(job, self.margin)):
                return cause
            if job is not None and self.notices.signal is None and (job.remaining or 0.0) > self.margin:
                self.notices.deadline = time.monotonic() + (job.remaining or 0.0) - self.margin
                return None  # an operator has given the job more time
            by_timer = self.notices.signal == signal.SIGUSR2
            if job is not None and by_timer and slurm.early_timeout_signal(job, self.margin):
                return None  # the deadline, which is exact, will say when
            if job is None and self.notices.overdue:
                return "timeout"
            if time.monotonic() >= until:
                return "signal"  # someone's own `scancel --signal`: save, and go on in a new attempt
            time.sleep(0.3)

    def replace_dead_script(self) -> None:
        """Do the batch script's last work where it was killed: nobody else would start the job again.

        For rank 0 to call twice a second. Slurm lets the ranks live for KillWait then, time enough for it, and with
        luck for a checkpoint. Asked a few times: Slurm's second SIGTERM may hit the scontrol of the first.
        """
        if self.notices.signal is None:
            self._script_asked = 0
        if self.notices.signal is None or self.job_id is None or self._script_asked >= SCRIPT_ASKS:
            return
        self._script_asked += 1
        job = self._ask()
        if job is not None and job.script_died:
            self._script_asked = SCRIPT_ASKS
            end = [sys.executable, "-m", "jobkit.supervisor", "end", str(self.run.path), str(self.attempt)]
            subprocess.Popen(end, stdin=subprocess.DEVNULL, start_new_session=True)

    def _ask(self) -> slurm.JobInfo | None:
        assert self.job_id is not None
        try:
            return slurm.show_job(self.job_id, timeout=5.0)  # a save is waiting for the answer
        except SchedulerError as error:
            print(f"jobkit: {error}", file=sys.stderr)
            return None
