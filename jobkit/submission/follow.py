"""Following a run: rank 0's output, its progress, the ends of its attempts, and the meaning of Ctrl-C.

follow_local   the foreground command: Ctrl-C asks the run to save and stop, a second one kills its ranks
follow         --follow: Ctrl-C leaves the run alone
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from jobkit.agent.devices import turns
from jobkit.disk import Looks
from jobkit.display import Display
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.run.after import waits_for
from jobkit.run.journal import known_status, read_status
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, State, Status, next_try
from jobkit.run.tail import Tail
from jobkit.run.view import View, known_view
from jobkit.submission.signals import Signals
from jobkit.usage import to_type

POLL_SECONDS = 0.1

ASK_SECONDS = 10.0
"""Between two questions to Slurm: all users share a slurmctld. The run's own files say most of it sooner."""

AGAIN_SECONDS = 1.0
"""Between two looks at the line for devices, and between two signals to a supervisor that has no attempt: one that was
killed meanwhile has not heard the first."""

LINES_OF_LOG = 3


class Follower:
    """Shows the news of a run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.display = Display(run.name)
        self._tail = Tail()
        status = read_status(run)
        self._first = len(status.attempts) + (status.open_attempt is None)
        """The attempt from which on output is shown."""
        self._ended = sum(attempt.ended is not None for attempt in status.attempts)
        self._warnings: set[str] = set()

    def refresh(self, status: Status, *, to_the_end: bool = False) -> None:
        """Show the new output, progress and ends of attempts."""
        newest = status.attempt.number if status.attempt is not None else 0
        for number in range(max(self._first, newest - 1), newest + 1):  # the one before may have printed its last later
            for line in self._tail.read(self.run.rank_log(number, 0), to_the_end=to_the_end):
                print(line, flush=True) if not sys.stdout.isatty() else self.display.say(line)
            for line in self._tail.read(self.run.rank_log(number, 0, "err"), to_the_end=to_the_end):
                self.display.say(line)
        ended = [attempt for attempt in status.attempts if attempt.ended is not None]
        for attempt in ended[self._ended :]:
            if attempt.ended is not None and attempt.ended.next not in ("stop", "fail"):
                self.display.say(describe(attempt))
        self._ended = len(ended)
        progress = self.run.progress()
        if status.open_attempt is None and not status.is_over:
            self.display.close()  # a bar that stands still would look as if it trained
            return
        if progress is None or progress.attempt != newest or newest < self._first:
            return
        for warning in progress.warnings:
            if warning not in self._warnings:
                self._warnings.add(warning)
                self.display.say(f"warning: {warning}")
        self.display.show(progress)

    def end(self, now: View) -> int:
        """Say how the run stands, and the next command; returns the exit code."""
        self.refresh(now.status, to_the_end=True)
        self.display.close()
        say, status, state = self.display.say, now.status, now.state
        ended = status.attempt.ended if status.attempt is not None else None
        if state == State.FINISHED:
            result = f": {status.result}" if status.result is not None else ""
            say(f"{self.run.name} finished{result}")
            say(f"run directory: {self.run.path}")
            return EXIT_FINISHED
        if state == State.FAILED and ended is not None:
            if ended.traceback and (ended.rank != 0 or ended.attempt < self._first):  # rank 0's was shown as it came
                say(ended.traceback.rstrip())
            say(f"output: {self.run.logs(ended.attempt)}")
        elif status.attempt is None or status.attempt.submission != status.person_submission:
            for line in self._tail.read(self.run.job_log, to_the_end=True)[-LINES_OF_LOG:]:
                say(line)
        say(f"{self.run.name}: {state}{f', {now.words}' if now.words else ''}")
        if state != State.LOST:  # its words say so already
            when = " once that is mended" if state == State.FAILED else ""
            say(f"to continue it{when}: the same command; with the code as it was: {to_type('resume', self.run.path)}")
        return now.exit_code


def describe(attempt: Attempt) -> str:
    """How an attempt ended that another one follows."""
    ended = attempt.ended
    if ended is None:
        return f"attempt {attempt.number} runs"
    is_said = (ended.error or "").startswith(ended.cause)  # `stopped by root`
    cause = f"{ended.cause}: {ended.error}" if ended.error and not is_said else ended.error or ended.cause
    follows = {"in_place": "starting again", "requeue": "requeued", "successor": "another job follows"}
    then = next_try(ended) or follows.get(ended.next, ended.next)
    return f"attempt {attempt.number} ended ({cause}); {then}"


def follow_local(run: RunDir, process: subprocess.Popen[bytes], signals: Signals) -> int:
    """Show a local run until its job has ended; returns the exit code. A signal stops the run, a second one kills."""
    follower = Follower(run)
    stop = LocalStopper(run, process, follower.display)
    try:
        now = _show(run, process, signals, follower, stop)
    except OSError:
        # Ctrl-C ends `| tee` too, and a terminal closes: the output may fail before the signal is here.
        time.sleep(AGAIN_SECONDS)
        if not signals.received:
            raise
        stop.ask(read_status(run), kills=False)
        return EXIT_RESUMABLE
    code = follower.end(now)
    cannot_start = now.state == State.LOST and process.returncode == EXIT_FAILED and not signals.received  # setup lines
    return EXIT_FAILED if cannot_start else code


def ended(run: RunDir) -> View | None:
    """Return the view of a local run whose job script has ended; None while its supervisor lives on."""
    return None if run.alive_lock().is_held() else known_view(run)


def _show(
    run: RunDir, process: subprocess.Popen[bytes], signals: Signals, follower: Follower, stop: LocalStopper
) -> View:
    """Show the output until the job has ended, and pass signals on. Raises OSError where nobody takes the output."""
    look_at, turn_shown, looks = time.monotonic() + AGAIN_SECONDS, "", Looks()
    while process.poll() is None or (now := looks.at(ended, run)) is None:
        kills = len(signals.received) > 1
        status = read_status(run) if kills else looks.at(known_status, run)  # a second Ctrl-C waits for no disk
        if status is not None and signals.received:
            stop.ask(status, kills=kills)
        elif status is not None and status.open_attempt is None and time.monotonic() >= look_at:
            look_at = time.monotonic() + AGAIN_SECONDS
            if (turn := looks.at(waits_for, run, status) or turns().get(str(run.path), "")) not in ("", turn_shown):
                turn_shown = turn
                follower.display.say(f"waiting: {turn}")
        if status is not None:
            follower.refresh(status)
        time.sleep(POLL_SECONDS)
    return now


class LocalStopper:
    """Asks a local run to stop, until it has: a supervisor that is killed in between has not heard it."""

    def __init__(self, run: RunDir, process: subprocess.Popen[bytes], display: Display) -> None:
        self.run, self.process, self.display = run, process, display
        self._requested: set[tuple[int, bool]] = set()
        self._signal_at = 0.0

    def ask(self, status: Status, *, kills: bool) -> None:
        """Stop the open attempt by a request; without one, end whatever is about to begin one."""
        attempt = status.open_attempt
        number = attempt.number if attempt is not None else 0
        is_new = (number, kills) not in self._requested
        if attempt is not None and is_new:
            self.run.ask("stop", status, 0.0 if kills else None)
        self._requested.add((number, kills))
        if attempt is None and time.monotonic() >= self._signal_at:
            self._signal_at = time.monotonic() + AGAIN_SECONDS
            self._signal(status, kills)
        if is_new:  # last: nobody may read it
            saves = "stopping once the ranks have saved; Ctrl-C again kills" if attempt is not None else "stopping"
            self.display.say("killing the ranks" if kills else saves)

    def _signal(self, status: Status, kills: bool) -> None:
        lease = self.run.lease()
        number = signal.SIGKILL if kills else signal.SIGTERM
        try:
            if not kills and lease is not None and lease.pid and lease.token == status.token:
                os.kill(lease.pid, number)  # the supervisor waits for its agents, or for a device
            else:
                os.killpg(self.process.pid, number)  # setup lines, or a supervisor that imports
        except ProcessLookupError:
            return  # it ends already


def follow(run: RunDir) -> int:
    """Show a run until it is over, through its requeues. Ctrl-C leaves it running."""
    follower, shown, ask_at, looks = Follower(run), "", 0.0, Looks()
    before: tuple[str, int] | None = None
    try:
        while True:
            if (status := looks.at(known_status, run)) is not None:
                place = (status.state, len(status.attempts))
                is_due = place != before or time.monotonic() >= ask_at
                if is_due and (now := looks.at(known_view, run)) is not None:
                    before, ask_at = place, time.monotonic() + ASK_SECONDS
                    if now.is_over:
                        return follower.end(now)
                    if (line := f"{run.name}: {now.state}, {now.words}") != shown:
                        shown = line
                        follower.display.say(line)
                follower.refresh(status)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        follower.display.close()
        follower.display.say(f"no longer following; the run goes on. To stop it: {to_type('cancel', run.path)}")
        return EXIT_FINISHED
