"""The process that waits on behalf of a sweep's runs on this machine, and starts each when it is its turn.

`jobkit/start.py jobkit.submission.local_sweep SWEEP_DIRECTORY`. One process waits for all of them: a
supervisor for each of a thousand runs would take the machine's memory. Whoever submits the sweep again only writes down
what is wanted. It ends when all runs are over that it has started; when it is killed these go on, and those that wait
are started by the next submission of the sweep.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, JobkitError
from jobkit.log import configure, log
from jobkit.run import sweeps
from jobkit.run.disk_errors import DISK_ERRORS
from jobkit.run.events import Event
from jobkit.run.files import write_atomic
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.run.sweeps import Sweep
from jobkit.submission import local
from jobkit.submission.plan import LaunchPlan, Turn, make_plan
from jobkit.supervisor.needs import need_of
from jobkit.supervisor.queue import LOOK_SECONDS, Place
from jobkit.supervisor.waiting import is_after_others


@dataclass
class _Waiting:
    """A run that has not been started, and how long its journal was at the last look."""

    run: RunDir
    journal_bytes: int
    is_after_others: bool
    """Whether there may be runs that it has to wait for."""


class Runner:
    """Starts the runs of a sweep that wait, in its order."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.max_running: int | None = None
        self.signals = 0
        """How often it was told to stop; each is passed on to the runs that train."""
        self._passed_on = 0
        self._waiting: dict[str, _Waiting] = {}
        self._running: list[subprocess.Popen[bytes]] = []
        self._place: Place | None = None
        self._record_version: tuple[int, int] | None = None

    def listen(self) -> None:
        """Take signals from here on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal ends no sweep

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals += 1

    def work(self) -> None:
        """Return when all runs that were started are over, and none waits, though the sweep was submitted again."""
        problem = ""
        while True:
            try:
                if self._go_on():
                    return
                problem = ""
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
                if str(error) != problem:
                    problem = str(error)
                    log.warning("%s; what waits goes on when that is over", problem)
            time.sleep(LOOK_SECONDS)

    def _go_on(self) -> bool:
        """Do what is to be done now; whether that was all. Raises OSError for a disk that is full or away."""
        self._look_for_runs()
        self._drop_what_waits_no_more()
        if self.signals:
            self._stop()
        elif self._waiting and (self.max_running is None or len(self._running) < self.max_running):
            self._start_first()
        self._running = [one for one in self._running if one.poll() is None]
        return not self._running and not self._waiting and self._is_done()

    def _is_done(self) -> bool:
        """Whether nobody has just submitted the sweep again; whoever does is then told that this process is gone."""
        with sweeps.submission_lock(self.sweep.runs_dir):
            self._look_for_runs()
            if self._waiting and not self.signals:
                return False
            self.sweep.alive_lock.release()
            return True

    def _look_for_runs(self) -> None:
        """Add those that a submission of the sweep has prepared since the last look."""
        if (version := self.sweep.version()) == self._record_version:
            return
        if (record := self.sweep.record()) is None:
            return
        self._record_version, self.max_running = version, record.max_running
        for name in record.runs:
            run = RunDir(self.sweep.runs_dir / name)
            if name not in self._waiting and run.exists() and self._is_waiting(run.status()):
                self._waiting[name] = _Waiting(run, -1, bool(run.config().after))

    def _is_waiting(self, status: Status) -> bool:
        is_begun = any(attempt.submission == status.submissions for attempt in status.attempts)
        return status.state == State.QUEUED and status.sweep == self.sweep.name and not is_begun

    def _drop_what_waits_no_more(self) -> None:
        """Forget runs that were cancelled, removed, or started by somebody else."""
        for name, waiting in list(self._waiting.items()):
            try:
                size = waiting.run.journal.path.stat().st_size
            except OSError:
                del self._waiting[name]
                continue
            if size != waiting.journal_bytes:
                waiting.journal_bytes = size
                status = waiting.run.status()
                if not self._is_waiting(status):
                    del self._waiting[name]
                elif status.cancel_requested:
                    waiting.run.record(Event.CANCELLED)
                    del self._waiting[name]

    def _start_first(self) -> None:
        """Start the first that waits for no other run, if it is its turn."""
        for name, waiting in self._waiting.items():
            waiting.is_after_others = waiting.is_after_others and is_after_others(waiting.run)
            if not waiting.is_after_others:
                self._start_if_possible(name, waiting.run)
                return

    def _start_if_possible(self, name: str, run: RunDir) -> None:
        try:
            plan = make_plan(run.path, run.config(), "local")
            status = run.status()
            turn = Turn(queues=status.queues, priority=status.priority)
            if self._place is None or self._place.run != run.path:
                self._leave_line()
                self._place = Place(need_of(plan.config, os.environ, queues=turn.queues), run.path, turn.priority)
            if (leases := self._place.take()) is None:
                return
            self._place = None
            self._start(run, replace(plan, turn=replace(turn, leases=leases)))
            del self._waiting[name]
        except (JobkitError, OSError) as error:
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise
            log.warning("%s cannot be started: %s", name, error)
            with contextlib.suppress(FileNotFoundError):  # removed
                run.record(Event.REQUEUE_FAILED, error=f"it could not be started: {error}")
            self._waiting.pop(name, None)

    def _start(self, run: RunDir, plan: LaunchPlan) -> None:
        with contextlib.ExitStack() as unused, run.submission_lock():
            if plan.turn.leases is not None:
                unused.callback(plan.turn.leases.close)
            status = run.status()
            # Unless it was cancelled, or submitted by itself, in this moment.
            if self._is_waiting(status) and not status.cancel_requested:
                os.chdir(status.cwd or ".")
                unused.pop_all()  # what starts it closes them
                self._running.append(local.start(plan, foreground=False))

    def _stop(self) -> None:
        """Let the runs that train stop with a checkpoint, and the others wait no more."""
        self._leave_line()
        while self._passed_on < self.signals:
            self._passed_on += 1
            for process in self._running:
                process.send_signal(signal.SIGTERM)
        for name, waiting in list(self._waiting.items()):
            waiting.run.record(Event.INTERRUPTED, cause="user")
            del self._waiting[name]

    def _leave_line(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None


def start(sweep: Sweep) -> subprocess.Popen[bytes]:
    """Start the process for a sweep that has none; returns when others can see that it lives, or it has ended."""
    from jobkit.start import words

    with (sweep.path / "runner.log").open("ab") as output:
        process = subprocess.Popen(
            words("jobkit.submission.local_sweep", str(sweep.path)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    while process.poll() is None and not sweep.has_runner():
        time.sleep(0.01)
    return process


def main(arguments: Sequence[str]) -> int:
    """Start the runs of a sweep; returns the exit code."""
    configure("stderr")
    sweep = sweeps.at(Path(arguments[0]))
    runner = Runner(sweep)
    runner.listen()
    write_atomic(sweep.process_file, str(os.getpid()), durable=False)  # before the lock tells others that it is there
    try:
        sweep.alive_lock.acquire(timeout=10)  # not at once: whoever asks whether we live takes the lock for an instant
    except Timeout:
        log.warning("%s has a process already", sweep.name)
        return EXIT_FAILED
    runner.work()
    return EXIT_FINISHED
