"""Following several runs on this machine: a line for each that ends, how many there are, and what Ctrl-C means."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, JobkitError
from jobkit.run.command_line import to_type
from jobkit.run.dependencies import verdict
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.run.sweeps import Sweep

Bar = Callable[[dict[str, State]], None]

POLL_SECONDS = 0.5
"""How often the journals of the runs are looked at."""


def follow_sweep(sweep: Sweep, runs: Sequence[RunDir], asked: list[int]) -> int:
    """Show the runs until the process that waits for them has ended; returns the exit code, of the worst.

    A signal in `asked`: checkpoint and stop; a second one kills. A closed terminal stops no sweep.
    """

    def stop() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(sweep.process_file.read_text(encoding="utf-8")), signal.SIGTERM)

    states = {run.name: run.status().state for run in runs}
    code = _follow(f"sweep {sweep.name}", runs, states, lambda: bool(sweep.has_runner()), stop, asked)
    if not sweep.has_runner() and any(map(_waits_in_sweep, runs)):
        _say(f"the process that waited for the rest has ended ({sweep.log}); to go on: {to_type('queue', '--resume')}")
    return code


def _waits_in_sweep(run: RunDir) -> bool:
    try:
        return run.status().waits_in_sweep and run.exists()
    except (JobkitError, OSError):
        return False


def follow_runs(what: str, started: Sequence[tuple[RunDir, subprocess.Popen[bytes]]], asked: list[int]) -> int:
    """As `follow_sweep`, of runs with supervisors of their own; it also returns when those that are left wait for a
    run that has stopped: they wait on in the background."""
    runs = [run for run, _ in started]

    def stop() -> None:
        for _, supervisor in started:
            supervisor.send_signal(signal.SIGTERM)

    def goes_on() -> bool:
        alive = [run for run, supervisor in started if supervisor.poll() is None]
        return any(_can_go_on(run) for run in alive)

    states = dict.fromkeys((run.name for run in runs), State.QUEUED)
    code = _follow(what, runs, states, goes_on, stop, asked)
    for run, supervisor in started:
        others = verdict(run, run.status().after)
        if supervisor.poll() is None and not others.are_under_way:
            stopped = [one.name for one, status in others.unfinished if not status.state.is_under_way]
            _say(f"{run.name} waits for {others.text}; to continue: {to_type('resume', *stopped)}")
    return code


def _can_go_on(run: RunDir) -> bool:
    """Whether a run trains, or waits for nothing that has stopped."""
    status = run.status()
    if status.state != State.QUEUED:
        return True
    others = verdict(run, status.after)
    return others.are_under_way and all(_can_go_on(one) for one, _ in others.unfinished)


def _follow(
    what: str,
    runs: Sequence[RunDir],
    states: dict[str, State],
    goes_on: Callable[[], bool],
    stop: Callable[[], None],
    asked: list[int],
) -> int:
    """`states` are those that a person knows of already."""
    shown: dict[str, int] = {}
    passed_on = 0
    with _bar(len(runs)) as bar:
        while goes_on():
            for number in asked[passed_on:]:
                passed_on += 1
                if number == signal.SIGHUP:
                    return EXIT_RESUMABLE
                _say("stopping with a checkpoint; a second Ctrl-C kills" if passed_on == 1 else "killing")
                stop()
            _look(runs, states, shown)
            bar(states)
            time.sleep(POLL_SECONDS)
        _look(runs, states, shown)
    counts = Counter(states.values())
    print(f"{what}: {', '.join(f'{count} {state}' for state, count in counts.items())}", flush=True)
    if counts[State.FAILED]:
        return EXIT_FAILED
    return EXIT_FINISHED if counts[State.FINISHED] == len(runs) else EXIT_RESUMABLE


def _look(runs: Sequence[RunDir], states: dict[str, State], shown: dict[str, int]) -> None:
    """Tell of each run whose journal says that it has ended since the last look."""
    for run in runs:
        with contextlib.suppress(OSError):  # removed
            size = run.journal.path.stat().st_size
            if shown.get(run.name) == size:
                continue
            shown[run.name] = size
            status = run.status()
            was, states[run.name] = states[run.name], status.state
            if status.state != was and not status.state.is_under_way:
                ended = status.error or status.result
                text = ended if isinstance(ended, str) else "" if ended is None else json.dumps(ended)
                _say(f"{run.name} {status.state}{status.at_steps}{': ' if text else ''}{text}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Bar]:
    """A function that shows how many runs are in which state; on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda states: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)

        def show(states: dict[str, State]) -> None:
            counts = Counter(states.values())
            text = ", ".join(f"{counts[state]} {state}" for state in (State.RUNNING, State.QUEUED) if counts[state])
            over = sum(not state.is_under_way for state in states.values())
            progress.update(task, completed=over, description=text)

        yield show
