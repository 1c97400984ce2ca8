"""jobkit queue: who waits for this machine's devices and CPU slots, and which runs did when their process ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import pwd
import sys
import time
from pathlib import Path
from typing import Any

from jobkit.cli import resume
from jobkit.cli.arguments import add_runs_dir, runs_dir
from jobkit.cli.several import each
from jobkit.errors import EXIT_FINISHED
from jobkit.run.command_line import to_type
from jobkit.run.duration import format_seconds
from jobkit.run.rundir import RunDir
from jobkit.run.runs import all_runs
from jobkit.run.status import State, Status
from jobkit.submission.observer import observe
from jobkit.supervisor.line import Line, Standing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resume", action="store_true", help="start again, in the old order, what waited until its process was killed"
    )
    parser.add_argument("--json", action="store_true", help="for programs: {waiting: [...], waited: [...]}")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the line of this machine, and of the runs directory what waits no more; or let that wait again."""
    waited = _waited(runs_dir(arguments))
    if arguments.resume:
        if not waited:
            print(f"nothing in {runs_dir(arguments)} has lost its place in a line")
            return EXIT_FINISHED
        options = argparse.Namespace(detach=True, follow=False)
        return each([found for found, _ in waited], lambda found: resume.resume(found, options))
    waiting = [_row(one) for one in Line().standings()]
    if arguments.json:
        lost = [{"run": found.name, "path": str(found.path), "for": status.waiting} for found, status in waited]
        print(json.dumps({"waiting": waiting, "waited": lost}, indent=1))
        return EXIT_FINISHED
    if not waiting:
        print("nobody waits for devices or CPU slots of this machine")
    for row in waiting:
        priority = f", priority {row['priority']}" if row["priority"] else ""
        used = f" ({row['used']})" if row["used"] else ""
        since = format_seconds(max(0.0, time.time() - row["since"]))
        print(f"{row['place']:3}  {row['run']}, of {row['user']}{priority}: {row['for']}{used}, for {since}")
    if waited:
        print("their processes are gone, as after a reboot, so they wait no more:")
        for found, status in waited:
            print(f"     {found.name}: {status.waiting}")
        print(f"to let them wait again, in this order: {to_type('queue', '--resume')}", file=sys.stderr)
    return EXIT_FINISHED


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


def _waited(runs: Path) -> list[tuple[RunDir, Status]]:
    """The runs whose process ended while it waited for its turn, and nobody has told it to; the longest wait first."""
    found = []
    for one in all_runs(runs):
        recorded = one.recorded_status()
        if recorded is not None and recorded.get("waiting") is None:
            continue
        with contextlib.suppress(OSError):  # another user's
            status = one.open().status()
            if status.waiting and status.scheduler == "local":
                status = observe(one.open())
                if status.state == State.INTERRUPTED:
                    found.append((one.open(), status))
    return sorted(found, key=lambda one: one[1].queued or 0.0)
