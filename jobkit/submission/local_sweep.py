"""A sweep on this machine: its runs in turn, so many at a time, in the foreground or in a process of its own session.

    waiting plans --transaction.submit--> job scripts --ended--> a line each --> counts

The loop holds the sweep's lock: a second command for the same sweep says where the first one is. Each run lives in its
own session, as every local run. A loop that is killed leaves those that train; the same command starts the rest.
submit.py calls it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jobkit.config.machine import visible_devices
from jobkit.disk import Looks
from jobkit.display import Display
from jobkit.errors import EXIT_FAILED, EXIT_RESUMABLE, JobkitError, worst
from jobkit.run import snapshot
from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.run.runs import sweep_cancel_file, sweep_lock
from jobkit.run.status import State
from jobkit.run.view import View
from jobkit.submission import transaction
from jobkit.submission.follow import POLL_SECONDS, LocalStopper, ended
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.signals import Signals
from jobkit.submission.sweep import Sweep, SweepOutcome, counted, starting


def submit(
    sweep: Sweep,
    folder: Path,
    max_running: int | None,
    signals: Signals,
    *,
    prepare: Callable[[LaunchPlan], None],
    detach: bool,
    as_json: bool,
) -> int:
    """Run what is to be started of a sweep, `max_running` at a time; returns the exit code of the worst.

    With `detach` a process of its own does it, and writes `X.sweep.log` beside the sweep's file.
    """
    sweep.write()
    log = sweep.file.with_name(f"{sweep.name}.log")
    outcome = SweepOutcome(sweep=sweep)
    todo = starting(outcome)
    lock, cancel_file = sweep_lock(sweep.file), sweep_cancel_file(sweep.file)
    if todo and not lock.take():
        print(f"sweep {sweep.name} runs here already{f'; its output: {log}' if log.exists() else ''}", file=sys.stderr)
        if cancel_file.exists():
            outcome.unsubmitted = [plan.run.name for plan in todo]
            outcome.refusal = "it was cancelled, and has not ended yet"
        todo = []
    if todo:
        cancel_file.unlink(missing_ok=True)  # it was for the loop before
    say: Callable[[str], None] = (lambda line: print(line, file=sys.stderr)) if as_json else print
    say(f"sweep {sweep.name}: {outcome.counts()}")
    exit_code = outcome.say_left()
    if not todo:
        if as_json:
            print(json.dumps(outcome.as_json()))
        return exit_code
    code = snapshot.take(folder, sweep.file.parent, sweep.plans[0].config.code.exclude)
    loop = _Loop(todo, folder, code, max_running or _room(todo[0]), signals, prepare, cancel_file)
    if not detach:
        return worst([loop.run(), exit_code])
    sys.stdout.flush()
    if (process := os.fork()) == 0:
        _leave_terminal(log)
        os._exit(loop.run())
    if as_json:
        print(json.dumps({**outcome.as_json(), "process": process, "log": str(log)}))
    else:
        print(f"process {process}: `kill {process}` stops the sweep with checkpoints\noutput {log}")
    return exit_code


def _leave_terminal(log: Path) -> None:
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for source, stream in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, stream)


def _room(plan: LaunchPlan) -> int:
    """For how many runs at once this machine has devices; one on the CPU."""
    resources = plan.config.resources
    devices = visible_devices(plan.config.device)[1] or []
    return max(1, len(devices) // (resources.world_size * resources.devices_per_rank or len(devices) + 1))


@dataclass
class _Loop:
    """Starts, watches and counts the runs of a sweep."""

    waiting: list[LaunchPlan]
    folder: Path
    code: Path
    max_running: int
    signals: Signals
    prepare: Callable[[LaunchPlan], None]
    cancel_file: Path
    running: dict[RunDir, tuple[subprocess.Popen[bytes], LocalStopper]] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    looks: Looks = field(default_factory=Looks)

    def run(self) -> int:
        """Go on until all runs are over, or a signal has stopped those that run; returns the exit code of the worst."""
        self.signals.job_exists()
        while self.running or (self.waiting and not self._is_stopped()):
            while self.waiting and len(self.running) < self.max_running and not self._is_stopped():
                self._start(self.waiting.pop(0))
            for run, (process, stop) in list(self.running.items()):
                if process.poll() is not None and (now := self.looks.at(ended, run)) is not None:
                    del self.running[run]
                    self._ended(now, process)
                elif self.signals.received and (status := self.looks.at(read_status, run)) is not None:
                    stop.ask(status, kills=len(self.signals.received) > 1)
            time.sleep(POLL_SECONDS)
        self.states += ["not started"] * len(self.waiting)
        print(counted(self.states), flush=True)
        return EXIT_RESUMABLE if self.signals.received or self.waiting else worst(self.codes)

    def _is_stopped(self) -> bool:
        """Return whether a signal, or `cancel` of the sweep, has asked to start nothing more."""
        return bool(self.signals.received) or bool(self.looks.at(self.cancel_file.exists))

    def _start(self, plan: LaunchPlan) -> None:
        try:
            outcome = self.looks.at(transaction.submit, plan, self.folder, code=self.code, prepare=self.prepare)
        except JobkitError as error:
            print(f"error: {plan.run.name}: {error}", file=sys.stderr, flush=True)
            self.states.append("not started")
            self.codes.append(error.exit_code)
            return
        if outcome is None:  # the disk is away
            self.waiting.insert(0, plan)
            time.sleep(POLL_SECONDS)
            return
        if outcome.process is None:  # another command has started it since
            self.states.append(outcome.before.state)
            return
        print(f"{outcome.run.name} starts; {len(self.waiting)} run(s) wait", file=sys.stderr, flush=True)
        stop = LocalStopper(outcome.run, outcome.process, Display(outcome.run.name))
        self.running[outcome.run] = outcome.process, stop
        if self.looks.at(self.cancel_file.exists):  # `cancel` may have looked for runs before this one was there
            outcome.run.ask("cancel", read_status(outcome.run))

    def _ended(self, now: View, process: subprocess.Popen[bytes]) -> None:
        words = now.status.result if now.state == State.FINISHED else now.words
        print(f"{now.run.name}: {now.state}{f', {words}' if words else ''}", flush=True)
        self.states.append(now.state)
        cannot_start = now.state == State.LOST and process.returncode == EXIT_FAILED  # no supervisor could start
        self.codes.append(EXIT_FAILED if cannot_start else now.exit_code)
