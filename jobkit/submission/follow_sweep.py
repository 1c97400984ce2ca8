"""Following a sweep on this machine: a line for each run that ends, how many there are, and what Ctrl-C means."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE
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
    shown: dict[str, int] = {}
    states = {run.name: run.status().state for run in runs}
    passed_on = 0
    with _bar(len(runs)) as bar:
        while sweep.has_runner():
            for number in asked[passed_on:]:
                passed_on += 1
                if number == signal.SIGHUP:
                    return EXIT_RESUMABLE
                _say("stopping with a checkpoint; a second Ctrl-C kills" if passed_on == 1 else "killing")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(sweep.process_file.read_text()), signal.SIGTERM)
            _look(runs, states, shown)
            bar(states)
            time.sleep(POLL_SECONDS)
        _look(runs, states, shown)
    counts = Counter(states.values())
    print(f"sweep {sweep.name}: {', '.join(f'{count} {state}' for state, count in counts.items())}", flush=True)
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
            is_first = run.name not in shown
            shown[run.name] = size
            status = run.status()
            was, states[run.name] = states[run.name], status.state
            if status.state != was and not status.state.is_under_way and not is_first:
                ended = status.error if status.state == State.FAILED else status.result
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
