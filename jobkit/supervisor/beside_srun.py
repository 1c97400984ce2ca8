"""`python -m jobkit.supervisor.beside_srun RUN ATTEMPT`: what the batch script runs beside srun, which it waits for."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from pathlib import Path

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE, SchedulerError
from jobkit.run.files import read_json
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import request_stop
from jobkit.supervisor.batch import end_on_slurm
from jobkit.supervisor.diagnosis import first_failure, srun_said
from jobkit.supervisor.watchdog import KILL_AFTER_FAILURE_SECONDS, Watch, end_hung

ASK_SECONDS = 60.0
"""How often Slurm is asked for the time limit."""


class BesideSrun:
    """The watch of the batch script: hangs, the time limit, and an end that leaves the script no time.

    At the end of a job Slurm signals this process like the script, which cannot go on while srun waits for ranks that
    take long to save, or are not listening: then it decides here, at once, how the run goes on.
    """

    def __init__(self, run: RunDir, attempt: int, job_id: str) -> None:
        self.run, self.attempt, self.job_id = run, attempt, job_id
        self.watch: Watch | None = None
        self.told = True  # a signal may have come before there was anyone to take it
        self._killed = False
        self._failed_at = 0.0
        self._asked = -math.inf
        self._deadline = self._last = math.inf

    def listen(self) -> None:
        """Take SIGTERM from here on."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.told = True

    def look(self) -> bool:
        """One round; whether there is nothing left to watch."""
        if self.told:
            if self._is_final():
                end_on_slurm(self.run, self.attempt, None, self.job_id)
                return True
            self.told = False
        if self._killed:
            return False  # srun may go on waiting for a lost node: a signal is what may still come
        self.watch = self.watch or Watch.of(self.run, self.attempt)
        if self._is_one_dead():
            self._kill()
        elif error := self.watch.look():
            print(f"jobkit: {self.run.name}: {error}", file=sys.stderr, flush=True)
            end_hung(self.run, self.attempt, error, self._send)
            self._killed = True
        elif self._is_out_of_time():
            request_stop(self.run, self.attempt, StopRequest(cause="timeout"))
            self._kill()
        return False

    def _kill(self) -> None:
        self._send("KILL")
        self._killed = True

    def _send(self, name: str) -> None:
        slurm.signal_steps(self.job_id, name)

    def _is_final(self) -> bool:
        """Whether Slurm is ending the job for good, though not by its owner's wish."""
        job = slurm.show_job(self.job_id)
        return job is not None and job.state == "COMPLETING" and slurm.stop_cause(job) != "cancelled"

    def _is_one_dead(self) -> bool:
        """Whether a rank has died, so that the others wait for it, and had their time to say so.

        Slurm would give them KillWait. Where that is as long as its MessageTimeout, it may repeat its kill a minute
        later, and hit the next attempt: its step has the same number.
        """
        if not self._failed_at:
            first = first_failure(srun_said(self.run, self.attempt))
            if first is not None and first.code != EXIT_RESUMABLE:
                self._failed_at = time.monotonic()
        return self._failed_at > 0 and time.monotonic() - self._failed_at > KILL_AFTER_FAILURE_SECONDS

    def _is_out_of_time(self) -> bool:
        """Whether the ranks, which were to stop a margin before the limit, leave none for the decision after them."""
        now = time.monotonic()
        if now - self._asked > ASK_SECONDS:  # an operator may have given the job more time
            self._asked, job = now, slurm.show_job(self.job_id)
            if job is not None and job.remaining is not None and job.limit is not None:
                margin = slurm.stop_margin(job.limit)
                self._deadline, self._last = now + job.remaining - margin / 2, now + job.remaining - margin / 8
        return now >= (self._last if self._is_saving() else self._deadline)

    def _is_saving(self) -> bool:
        report = read_json(self.run.progress_file)
        return isinstance(report, dict) and report.get("attempt") == self.attempt and bool(report.get("stopping"))


def main(arguments: list[str]) -> int:
    """Watch one attempt beside srun until the batch script ends this process, or is gone itself."""
    run, attempt = RunDir(Path(arguments[0])), int(arguments[1])
    parent = os.getppid()
    beside = BesideSrun(run, attempt, slurm.current_job() or "")
    beside.listen()
    while os.getppid() == parent and run.owner() in (attempt, None):
        try:
            if beside.look():
                return 0
        except (SchedulerError, OSError) as problem:  # the controller, or the disk, may be back in the next round
            print(f"jobkit: {problem}", file=sys.stderr, flush=True)
        time.sleep(1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
