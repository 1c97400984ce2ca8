"""jobkit queue: who waits for this machine's devices and CPU slots, and which runs did when their process ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import pwd
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobkit.cli import resume
from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.cli.several import each
from jobkit.errors import EXIT_FINISHED
from jobkit.run import sweeps
from jobkit.run.command_line import to_type
from jobkit.run.duration import format_seconds
from jobkit.run.rundir import RunDir
from jobkit.run.runs import all_runs
from jobkit.run.status import State, Status
from jobkit.run.usage import show_examples
from jobkit.submission import local_sweep
from jobkit.submission.observer import observe
from jobkit.supervisor.line import Line, Standing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="start again, in the old order, what waited until its process was killed"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="for programs: {waiting: [...], sweeps: [...], waited: [...], broken_off: [...]}",
    )
    add_runs_dir(parser)
    show_examples(
        parser,
        "--resume  start again what waited when this machine went down",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the line of this machine, and of the runs directory what waits no more; or let that wait again."""
    runs = _Waiting(runs_dir(arguments))
    if arguments.resume:
        return _resume(runs)
    waiting = [_row(one) for one in Line().standings()]
    if arguments.json:
        print(json.dumps({"waiting": waiting, **runs.as_dict()}, indent=1))
        return EXIT_FINISHED
    if not waiting and not runs.in_sweeps:
        print("nobody waits for devices or CPU slots of this machine")
    for row in waiting:
        priority = f", priority {row['priority']}" if row["priority"] else ""
        used = f" ({row['used']})" if row["used"] else ""
        since = format_seconds(max(0.0, time.time() - row["since"]))
        print(f"{row['place']:3}  {row['run']}, of {row['user']}{priority}: {row['for']}{used}, for {since}")
    for row in runs.as_dict()["sweeps"]:
        limit = f", at most {row['max_running']} at once" if row["max_running"] else ""
        print(f"     sweep {row['sweep']}: {row['waiting']} run(s) wait for their turn{limit}")
    runs.tell_broken_off()
    if runs.lost:
        print("their processes are gone, as after a reboot, so they wait no more:")
        for what in runs.lost_lines():
            print(f"     {what}")
        print(f"to let them wait again, in this order: {to_type('queue', '--resume')}", file=sys.stderr)
    return EXIT_FINISHED


def _resume(runs: _Waiting) -> int:
    """Let what waits no more wait again; of a sweep one process does so for all."""
    runs.tell_broken_off()
    if not runs.lost:
        print(f"nothing in {runs.runs_dir} has lost its place in a line")
        return EXIT_FINISHED
    options = argparse.Namespace(detach=True, follow=False)
    started: set[str] = set()

    def resume_one(found: RunDir) -> int:
        status = found.status()
        record = sweeps.at(runs.runs_dir / sweeps.FOLDER / status.sweep).record() if status.waits_in_sweep else None
        if record is None or found.name not in (*record.runs, *record.former):
            return resume.resume(found, options)
        if status.sweep not in started:
            started.add(status.sweep)
            print(local_sweep.start_again(runs.runs_dir, status.sweep), flush=True)
        return EXIT_FINISHED

    return each([found for found, _ in runs.lost], resume_one)


class _Waiting:
    """The local runs of a runs directory that wait, or did when their process ended and nobody had told it to."""

    def __init__(self, runs: Path) -> None:
        self.runs_dir = runs
        self.in_sweeps: dict[str, int] = {}
        """How many wait in each sweep whose process lives."""
        self.lost: list[tuple[RunDir, Status]] = []
        """The longest wait first; of a sweep's runs also where that process is gone."""
        self.broken_off: list[str] = []
        """The names of those that ran when their process ended."""
        for one in all_runs(runs):
            recorded = one.recorded_status()
            may_count = recorded is None or recorded.get("waiting") or recorded["state"] in ("queued", "running")
            if may_count:
                with contextlib.suppress(OSError):  # another user's
                    self._add(one.open())
        self.lost.sort(key=lambda one: one[1].queued or 0.0)

    def _add(self, run: RunDir) -> None:
        status = run.status()
        if status.scheduler == "local" and status.state == State.RUNNING:
            if observe(run).probably:
                self.broken_off.append(run.name)
            return
        if status.scheduler != "local" or not (status.waiting or status.waits_in_sweep):
            return
        sweep = status.sweep if status.waits_in_sweep else ""
        status = observe(run)
        if status.state == State.INTERRUPTED:
            self.lost.append((run, status))
        elif sweep and status.state == State.QUEUED:
            self.in_sweeps[sweep] = self.in_sweeps.get(sweep, 0) + 1

    def tell_broken_off(self) -> None:
        """Say which runs do not go on with those that waited: nobody knows whether they should."""
        if self.broken_off:
            print(f"ran when their processes ended, and wait for nothing: {', '.join(self.broken_off)}")
            print(f"to continue: {to_type('resume', *self.broken_off)}", file=sys.stderr)

    def lost_lines(self) -> list[str]:
        """Each run with what it waits for; of a sweep how many."""
        of_sweeps = Counter(status.sweep for _, status in self.lost if not status.waiting)
        return list(dict.fromkeys(_lost_line(run, status, of_sweeps) for run, status in self.lost))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        lost = [
            {"run": run.name, "path": str(run.path), "for": status.waiting, "sweep": status.sweep}
            for run, status in self.lost
        ]
        return {
            "sweeps": [
                {"sweep": name, "waiting": count, "max_running": sweeps.max_running(self.runs_dir, name)}
                for name, count in self.in_sweeps.items()
            ],
            "waited": lost,
            "broken_off": self.broken_off,
        }


def _lost_line(run: RunDir, status: Status, of_sweeps: Mapping[str, int]) -> str:
    if status.waiting:
        return f"{run.name}: {status.waiting}"
    return f"sweep {status.sweep}: {of_sweeps[status.sweep]} run(s)"


def _row(standing: Standing) -> dict[str, Any]:
    ticket = standing.ticket
    return {
        "place": standing.place,
        "run": standing.name,
        "user": _user(ticket.owner),
        "for": standing.text,
        "used": standing.used,
        "priority": ticket.priority,
        "since": ticket.since,
    }


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # one that this machine does not know
        return str(uid)
