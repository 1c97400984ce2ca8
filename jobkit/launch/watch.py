"""The watchdog: notices from outside that the ranks of an attempt no longer get anywhere, and ends them.

From outside, because a stopped process, or a loop in C that holds the interpreter, cannot notice itself. The local
controller looks in its own loop; under Slurm the batch script runs `python -m jobkit.launch.watch RUN ATTEMPT` beside
srun. What is watched is rank 0's count of beats (runtime/pulse.py): the ranks wait for each other all the time, so it
stops wherever one of them does.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jobkit.errors import EXIT_RESUMABLE, SchedulerError
from jobkit.launch import attempt as attempts
from jobkit.launch.postmortem import first_casualty
from jobkit.run.duration import format_seconds, parse_seconds
from jobkit.run.files import read_json, write_json
from jobkit.run.rundir import RunDir
from jobkit.scheduler import slurm

LEAST_SECONDS = 300.0
"""`watchdog: auto` waits at least this long for a step: nobody's checkpoint or evaluation is taken for a hang."""

TIMES_SLOWEST = 20.0
"""`watchdog: auto` waits this many times as long as the slowest step so far took."""

OUTSIDE_LOOP_SECONDS = 1800.0
"""How long imports, the building of a model, the first step and what follows the loop may take, at the least."""

STACKS_SECONDS = 2.0
"""What the ranks get to write down their stacks."""

KILL_AFTER_FAILURE_SECONDS = 3.0
"""What the ranks beside a failed one get to write down their own error before they are killed."""

ASK_SECONDS = 60.0
"""How often Slurm is asked for the time limit."""


class Watch:
    """Judges from the progress reports of one attempt whether its ranks hang; `setting` is the YAML's `watchdog`.

    `false_alarms`: how many attempts in a row ended as hung: `auto` gives each next one twice the time, so that a step
    which really takes that long is done in the end.
    """

    def __init__(self, run: RunDir, attempt: int, setting: str | int | bool, false_alarms: int = 0) -> None:
        self.run = run
        self.attempt = attempt
        self.setting = setting
        self.factor = 2.0**false_alarms
        self._beats: object = None
        self._since = time.monotonic()

    @classmethod
    def of(cls, run: RunDir, attempt: int) -> Watch:
        """The watch of an attempt that has just begun."""
        hangs = 0
        for before in reversed(run.status().attempts[:-1]):
            if before.cause != "hang":
                break
            hangs += 1
        return cls(run, attempt, run.config().watchdog, hangs)

    def limit(self, training: bool, slowest: float) -> float:
        """Seconds without a beat that count as hung; `slowest` is 0 before the first step is done."""
        if self.setting == "auto":
            limit = max(LEAST_SECONDS, TIMES_SLOWEST * slowest) * self.factor
            known = training and slowest > 0
        else:
            limit, known = float(parse_seconds(self.setting)), training
        return limit if known else max(limit, OUTSIDE_LOOP_SECONDS)

    def look(self) -> str | None:
        """What to tell about a hang, or None where there is none."""
        if self.setting == "off" or self.setting is False:
            return None
        report = read_json(self.run.progress_file)
        report = report if isinstance(report, dict) and report.get("attempt") == self.attempt else {}
        now, beats = time.monotonic(), (report.get("beats"), report.get("training"))
        if beats != self._beats:
            self._beats, self._since = beats, now
            return None
        training = bool(report.get("training"))
        limit = self.limit(training, float(report.get("slowest") or 0.0))
        if now - self._since < limit:
            return None
        if not self._can_be_written():
            self._since = now  # the ranks could not report if they wanted to: the disk is full or away
            return None
        where = f"in step {report.get('step')}" if training else "outside its loop"
        return f"no sign of life for {format_seconds(limit)} {where} (watchdog: {self.setting})"

    def _can_be_written(self) -> bool:
        try:
            with tempfile.TemporaryFile(dir=self.run.logs(self.attempt)) as file:
                file.write(b"x" * 4096)
        except OSError:
            return False
        return True


def end_hung(run: RunDir, attempt: int, error: str, send: Callable[[str], None]) -> None:
    """Have all ranks write down their stacks, then kill them; `send` sends the signal of a name to every rank."""
    write_json(run.notice_file(attempt), {"cause": "hang", "error": error})
    send("USR1")  # STACKS_SIGNAL of runtime/failure.py
    send("CONT")  # a stopped one writes its own down when it goes on
    time.sleep(STACKS_SECONDS)
    send("KILL")


class BesideSrun:
    """The watch of the batch script: hangs, the time limit, and an end that leaves the script no time.

    At the end of a job Slurm signals this process like the script, which cannot go on while srun waits for ranks that
    take long to save, or are not listening: then it decides here, at once, how the run goes on.
    """

    def __init__(self, run: RunDir, attempt: int, job_id: str) -> None:
        self.run, self.attempt, self.job_id = run, attempt, job_id
        self.watch = Watch.of(run, attempt)
        self.told = False
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
            self.told = False
            if self._is_final():
                attempts.end_on_slurm(self.run, self.attempt, 0, self.job_id)
                return True
        if self._is_one_dead():
            self._send("KILL")
            return True
        if error := self.watch.look():
            print(f"jobkit: {self.run.name}: {error}", file=sys.stderr, flush=True)
            end_hung(self.run, self.attempt, error, self._send)
            return True
        if self._is_out_of_time():
            write_json(self.run.notice_file(self.attempt), {"cause": "timeout"})
            self._send("KILL")
            return True
        return False

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
            first = first_casualty(attempts.srun_said(self.run, self.attempt))
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
