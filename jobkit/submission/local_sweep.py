"""The process that waits on behalf of a sweep's runs on this machine, and starts each when it is its turn.

`jobkit/start.py jobkit.submission.local_sweep SWEEP_DIRECTORY`. One process waits for all of them: a
supervisor for each of a thousand runs would take the machine's memory. Whoever submits the sweep again only writes down
what is wanted. It ends when all runs are over that it has started; when it is killed these go on, and count for the
process that the next submission of the sweep starts, or `jobkit queue --resume`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import Timeout

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, JobkitError
from jobkit.log import configure, log
from jobkit.run import sweeps
from jobkit.run.dependencies import Verdict, verdict
from jobkit.run.disk_errors import AWAY, disk_errno
from jobkit.run.events import Event
from jobkit.run.files import write_atomic
from jobkit.run.locks import held_by_children
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.run.sweeps import Sweep
from jobkit.run.tail import Tail
from jobkit.submission import job, local
from jobkit.submission.plan import LaunchPlan, Turn, make_plan
from jobkit.supervisor import lock_files
from jobkit.supervisor.needs import need_of
from jobkit.supervisor.presence import is_missing
from jobkit.supervisor.queue import LOOK_SECONDS, Place

RETRY_SECONDS = 5.0
"""How long a run whose disk has refused something is left alone: the others are started meanwhile."""


@dataclass
class _Waiting:
    """A run that has not been started."""

    run: RunDir
    after: tuple[str, ...]
    """The runs that it may have to wait for."""
    has_begun: bool
    """Whether it had an attempt before this submission."""
    journal_bytes: int = -1
    """How long its journal was at the last look."""
    not_before: float = 0.0
    """By the monotonic clock: the disk has refused something, and the others come first for a while."""


@dataclass
class _Other:
    """A run of the sweep that trains and that this process has not started."""

    run: RunDir
    is_by_itself: bool
    """Whether a person has submitted it by itself since; else the process that waited before this one has started it,
    and was killed."""


class Runner:
    """Starts the runs of a sweep that wait, in its order. What fails for one run costs that run alone."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.max_running: int | None = None
        self.signals = 0
        """How often it was told to stop; each is passed on to the runs that train."""
        self._passed_on = 0
        self._all: dict[str, RunDir] = {}
        """Those that the sweep wants, and has wanted, by their names."""
        self._waiting: dict[str, _Waiting] = {}
        self._stopping: dict[str, RunDir] = {}
        """Those that waited when it was told to stop, and whose journals do not say so yet."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._others: list[_Other] = []
        self._place: Place | None = None
        self._record_version: tuple[int, int] | None = None
        self._look_again_at: float | None = None
        """By the monotonic clock: the status of a run could not be read."""
        self._told: set[str] = set()
        """Problems that are in the log."""

    def listen(self) -> None:
        """Take signals from here on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal ends no sweep

    def _on_signal(self, number: int, frame: object) -> None:
        self.signals += 1

    def work(self) -> None:
        """Return when all runs that were started are over, and none waits, though the sweep was submitted again; or
        when the sweep's own folder was removed."""
        while True:
            try:
                if self._is_removed() or self._go_on():
                    return
            except OSError as error:  # the sweep's own files cannot be read: it may be over in a moment
                if self._has_nothing_to_do():
                    return
                self._tell(f"{error}; what waits goes on when that is over")
            time.sleep(LOOK_SECONDS)

    def _go_on(self) -> bool:
        """Do what is to be done now; whether that was all. Raises OSError for a disk that is full or away."""
        self._look_for_runs()
        self._drop_what_waits_no_more()
        self._running = {name: one for name, one in self._running.items() if one.poll() is None}
        self._others = [one for one in self._others if one.run.has_local_supervisor()]
        if self._passed_on < self.signals:
            self._stop()
        self._interrupt()
        if self._waiting and not self._is_full():
            self._start_next()
        return self._has_nothing_to_do() and self._is_done()

    def _has_nothing_to_do(self) -> bool:
        is_waited_for = any(not one.is_by_itself for one in self._others)
        return not (self._waiting or self._stopping or self._running or is_waited_for or self._look_again_at)

    def _is_done(self) -> bool:
        """Whether nobody has just submitted the sweep again; whoever does is then told that this process is gone."""
        with sweeps.submission_lock(self.sweep.runs_dir):
            self._record_version = None  # a submission may have been killed before it said that it was done
            self._look_for_runs()
            if not self._has_nothing_to_do():
                return False
            self.sweep.alive_lock.release()
            return True

    def _is_removed(self) -> bool:
        """Whether somebody has removed the sweep's folder: another submission has a process of its own then."""
        files = held_by_children(self.sweep.alive_lock)
        return any(os.fstat(file).st_nlink == 0 for file in files)

    def _tell(self, problem: str) -> None:
        """Once: the same is found four times a second."""
        if problem not in self._told:
            self._told.add(problem)
            log.warning("%s", problem)

    # Which runs there are

    def _look_for_runs(self) -> None:
        """Add those that a submission of the sweep has prepared since the last look."""
        is_due = self._look_again_at is not None and time.monotonic() >= self._look_again_at
        if (version := self.sweep.version()) == self._record_version and not is_due:
            return
        if (record := self.sweep.record()) is None:
            return
        self._record_version, self._look_again_at, self.max_running = version, None, record.max_running
        self._all = {name: RunDir(self.sweep.runs_dir / name) for name in (*record.runs, *record.former)}
        for name, run in self._all.items():
            if name not in self._waiting and name not in self._stopping:
                with self._alone(run):
                    if run.exists() and self._is_waiting(run, status := run.status()):
                        self._waiting[name] = _Waiting(run, tuple(status.after), bool(status.attempts))
        self._find_others()

    def _is_waiting(self, run: RunDir, status: Status) -> bool:
        """Whether it is for this process to start a run: not one whose submission may still be undone, nor one that
        somebody has started."""
        return status.waits_in_sweep and status.sweep == self.sweep.name and not run.has_local_supervisor()

    def _find_others(self) -> None:
        """Find the runs of the sweep that somebody else has started and that train."""
        others = []
        for name, run in self._all.items():
            if name not in self._waiting and name not in self._running and run.has_local_supervisor():
                with contextlib.suppress(JobkitError, OSError):
                    status = run.status()
                    if status.state == State.RUNNING or not status.waiting:
                        others.append(_Other(run, is_by_itself=status.sweep != self.sweep.name))
        self._others = others

    def _is_full(self) -> bool:
        """Whether as many train as may."""
        return self.max_running is not None and len(self._running) + len(self._others) >= self.max_running

    def _drop_what_waits_no_more(self) -> None:
        """Forget runs that were cancelled, removed, or started by somebody else."""
        for name, waiting in list(self._waiting.items()):
            with self._alone(waiting.run):
                size = waiting.run.journal.path.stat().st_size
                if size == waiting.journal_bytes:
                    continue
                status = waiting.run.status()
                if not self._is_waiting(waiting.run, status):
                    del self._waiting[name]
                elif status.cancel_requested:
                    waiting.run.record(Event.CANCELLED)
                    del self._waiting[name]
                waiting.journal_bytes = size

    @contextlib.contextmanager
    def _alone(self, run: RunDir) -> Iterator[None]:
        """Let what fails for a run end nothing but its own wait; after an error of its disk it is tried again."""
        try:
            yield
        except Exception as error:  # whatever a file leads to that somebody has changed by hand
            is_away = isinstance(error, FileNotFoundError) and not run.exists() and not is_missing(run)
            if is_away or disk_errno(error) or getattr(error, "errno", None) in AWAY:
                self._tell(f"{run.name}: {error}; it is tried again")
                later = time.monotonic() + RETRY_SECONDS
                if run.name in self._waiting:
                    self._waiting[run.name].not_before = later
                else:
                    self._look_again_at = later
                return
            if not isinstance(error, JobkitError | OSError):
                log.exception("%s", run.name)
            self._give_up(run, error)

    def _give_up(self, run: RunDir, error: Exception) -> None:
        """A run waits no more, and its status says why, unless it was removed or may not be written to."""
        self._waiting.pop(run.name, None)
        if is_missing(run):
            return
        self._tell(f"{run.name} cannot be started: {error}")
        with contextlib.suppress(Exception):  # its journal may be what is broken
            run.record(Event.REQUEUE_FAILED, error=f"it could not be started: {error}")

    # Starting

    def _start_next(self) -> None:
        """Start the first that waits for no other run, if it is its turn."""
        verdicts: dict[tuple[tuple[str, ...], bool], Verdict] = {}
        for waiting in list(self._waiting.values()):
            # A command that is at work on one may stand still.
            if time.monotonic() < waiting.not_before or waiting.run.is_being_submitted():
                continue
            with self._alone(waiting.run):
                if waiting.after and self._waits_for_others(waiting, verdicts):
                    continue
                self._start_if_possible(waiting.run)
            return

    def _waits_for_others(self, waiting: _Waiting, verdicts: dict[tuple[tuple[str, ...], bool], Verdict]) -> bool:
        """Whether a run may not start yet, or never; `verdicts` are those of this look, as a rule one for all runs."""
        key = waiting.after, waiting.has_begun
        if key not in verdicts:
            verdicts[key] = verdict(waiting.run, waiting.after)
        found = verdicts[key]
        if found.ends:
            log.warning("%s does not start: %s", waiting.run.name, found.ends)
            waiting.run.record(Event.CANCELLED, error=found.ends)
            del self._waiting[waiting.run.name]
            return True
        if not found.unfinished:
            waiting.after = ()
        return bool(found.unfinished)

    def _start_if_possible(self, run: RunDir) -> None:
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

    def _start(self, run: RunDir, plan: LaunchPlan) -> None:
        """Start a run, unless it was cancelled, or submitted by itself, in this moment, or others train by now."""
        with contextlib.ExitStack() as unused:
            if plan.turn.leases is not None:
                unused.callback(plan.turn.leases.close)
            if self.max_running is not None:
                self._find_others()
                if self._is_full():
                    return
            with run.submission_lock():
                status = run.status()
                if self._is_waiting(run, status) and not status.cancel_requested:
                    os.chdir(status.cwd or ".")
                    unused.pop_all()  # what starts it closes them
                    self._running[run.name] = local.start(plan, foreground=False)
                    self._waiting.pop(run.name)

    # Stopping

    def _stop(self) -> None:
        """Let what trains stop with a checkpoint, and the rest wait no more; what is submitted after that starts."""
        self._leave_line()
        while self._passed_on < self.signals:
            self._passed_on += 1
            for process in self._running.values():
                process.send_signal(signal.SIGTERM)
            for other in self._others:
                if not other.is_by_itself:
                    job.signal_supervisor(other.run, grace=True)
        self._stopping |= {name: waiting.run for name, waiting in self._waiting.items()}
        self._waiting.clear()

    def _interrupt(self) -> None:
        for name, run in list(self._stopping.items()):
            try:
                run.record(Event.INTERRUPTED, cause="user")
            except OSError as error:
                if self.signals == 1 and not is_missing(run):  # told twice, it leaves them: `jobkit queue` lists them
                    self._tell(f"{run.name}: {error}; it is tried again")
                    continue
            del self._stopping[name]

    def _leave_line(self) -> None:
        if self._place is not None:
            self._place.leave()
            self._place = None


def start(sweep: Sweep) -> subprocess.Popen[bytes]:
    """Start the process for a sweep that has none; returns when others can see that it lives. Raises JobkitError."""
    from jobkit.start import words

    folder = lock_files.folder(os.environ)
    with local.usable(folder):
        lock_files.make(folder)
    with sweep.log.open("ab") as output:
        process = subprocess.Popen(
            words("jobkit.submission.local_sweep", str(sweep.path)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    while process.poll() is None and not sweep.has_runner():
        time.sleep(0.01)
    if not sweep.has_runner():
        said = " / ".join(Tail().read(sweep.log).strip().splitlines()[-2:])
        raise JobkitError(f"the process that is to wait for the runs has ended: {said} ({sweep.log})")
    return process


def start_again(runs_dir: Path, name: str) -> str:
    """Start the process of a sweep whose runs wait and that has none, as after a reboot; returns what to tell.

    Raises JobkitError.
    """
    with sweeps.submission_lock(runs_dir):
        sweep = sweeps.at(runs_dir / sweeps.FOLDER / name)
        if sweep.has_runner():
            return f"sweep {name}: its runs wait again"
        return f"sweep {name}: process {start(sweep).pid} starts what waits in turn"


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
