"""Following a run from outside: rank 0's output, the progress bar, and what Ctrl-C means."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from jobkit.display import Display
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, SchedulerError
from jobkit.run.command_line import to_type
from jobkit.run.continuation import how_to_continue
from jobkit.run.dependencies import verdict
from jobkit.run.rundir import RunDir
from jobkit.run.silent import how_it_continues, is_silent, stopping
from jobkit.run.status import State, Status
from jobkit.run.tail import Tail
from jobkit.submission.ending import exit_code, read_to_the_end
from jobkit.submission.observer import Observer, observe
from jobkit.supervisor.line import Line

POLL_SECONDS = 0.2
"""How often the run's files are read: a progress bar that moves at once, and five reads a second of a shared disk."""


LOOK_SECONDS = 1.0
"""How often a run's place in the line is looked at."""


class Follower:
    """Shows a run: rank 0's output, the progress bar, and how it ends."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.display = Display(run.name)
        self._tail = Tail()
        self._attempt = 0
        """The newest that was shown: it may have printed its last after the next one had begun."""

    def refresh(self, status: Status) -> None:
        """Show what is new."""
        if not status.attempt:
            return
        newest = status.attempt.id
        for number in range(self._attempt or newest, newest + 1):
            for line in self._tail.read(self.run.rank_log(number, 0), whole_lines=True).splitlines():
                self.display.say(line)
        self._attempt = newest
        progress = self.run.progress()
        if progress is not None and progress.attempt == status.attempt.id:
            self.display.show(progress)

    def end(self, status: Status) -> int:
        """Say how the run stands now, and what to type next; returns the exit code: 75 for what can be continued."""
        self.display.close()
        say, attempt = self.display.say, status.attempt
        if not self.run.exists():
            say(f"{self.run.path} was removed, or moved: the run has ended")
            return EXIT_FAILED
        safe = f"{how_it_continues(self.run, status)}:\n  {how_to_continue(self.run, status)}"
        if status.state == State.FINISHED:
            say(f"finished{status.at_steps}: {status.result if status.result is not None else ''}".rstrip(": "))
            say(f"run directory: {self.run.path}")
        elif status.state == State.FAILED:
            say(f"failed{status.at_steps}: {status.error}")
            if attempt:
                say(f"tracebacks: {self.run.logs(attempt.id)}/rank_*.err")
            say(safe)
        else:
            failure = attempt.failure.error if attempt and attempt.failure else None
            why = f": {failure or status.error}" if failure or status.error else ""
            say(f"{status.state}{status.at_steps}{why}. {safe}")
        return exit_code(status.state)


def is_waiting(status: Status) -> bool:
    """Whether a run's own process waits for its turn."""
    return status.state == State.QUEUED and status.waiting is not None


class Wait:
    """Tells of a local run's place in the line, whenever that is another one."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._told: tuple[int, int] | None = None
        """The number of attempts before, and the place."""
        self._before = ""
        """The runs that it comes after, as they were told of last."""
        self._look_at = 0.0

    def news(self, status: Status) -> str:
        """A line, or nothing where nothing is new."""
        if not is_waiting(status) or time.monotonic() < self._look_at:
            return ""
        self._look_at = time.monotonic() + LOOK_SECONDS
        found = Line().find(self.run.path, os.getuid())
        others = verdict(self.run, status.after)
        if before := others.text:
            is_new, self._before = before != self._before, before
            stopped = [run.name for run, status in others.unfinished if not status.state.is_under_way]
            hint = f"; to continue: {to_type('resume', *stopped)}" if stopped else ""
            return f"queued: waiting for {before}{hint}" if is_new else ""
        if found is None or (len(status.attempts), found.place) == self._told:
            return ""
        hint = "" if self._told else f"; {to_type('logs', '-f', self.run.name)}"
        self._told = len(status.attempts), found.place
        return f"queued: {found}{hint}"


def follow_local(run: RunDir, supervisor: subprocess.Popen[bytes], asked: list[int]) -> int:
    """Show a local run until its supervisor ends. A signal in `asked`: checkpoint and stop; a second one kills.

    A run that waits for its turn leaves the line, but for SIGHUP: after a closed terminal it waits in the background.
    """
    follower, wait, stops = Follower(run), Wait(run), 0
    now = run.status()
    told = sum(attempt.submission < now.submissions for attempt in now.attempts)  # by earlier commands
    while supervisor.poll() is None:
        status = run.status()
        if len(asked) > stops:
            if is_waiting(status) and asked[-1] == signal.SIGHUP:
                return EXIT_FINISHED
            stops = len(asked)
            supervisor.send_signal(signal.SIGTERM if stops == 1 else signal.SIGINT)
            leaving = "leaving the line" if is_waiting(status) else stopping(run, status)
            follower.display.say(leaving if stops == 1 else "killing")
        elif line := wait.news(status):
            follower.display.say(line)
        follower.refresh(status)
        for attempt in status.attempts[told:-1]:  # those that another one follows
            why = (attempt.failure and attempt.failure.error) or attempt.cause
            again = "starts it again" if is_silent(run, status) else "goes on"
            follower.display.say(f"attempt {attempt.id} ended: {why}; attempt {attempt.id + 1} {again}")
            told = attempt.id
        time.sleep(POLL_SECONDS)
    follower.refresh(run.status())
    return follower.end(observe(run))


def follow_slurm(run: RunDir) -> int:
    """Show a run on Slurm until it is over, through its requeues. Ctrl-C leaves it running."""
    follower, observer, shown = Follower(run), Observer(run), None
    try:
        while True:
            try:
                status = observer.look()
            except SchedulerError as error:
                status = run.status()
                follower.display.say(f"{error}; still following")
            if observer.is_over:
                read_to_the_end(run, status, lambda: follower.refresh(status))  # noqa: B023
                return follower.end(status)
            if (status.state, len(status.attempts)) != shown:
                shown = (status.state, len(status.attempts))
                place = f"job {status.job_id}, attempt {len(status.attempts)}"
                place += f", {status.waits_for}" if status.state == State.HELD else ""
                follower.display.say(f"{run.name}: {status.state} ({place})")
            follower.refresh(status)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        follower.display.close()
        follower.display.say(f"no longer following; the job goes on. To stop it: {to_type('cancel', run.name)}")
        return EXIT_FINISHED
