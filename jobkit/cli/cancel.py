"""jobkit cancel RUN ...: stop them for good; a running one leaves a checkpoint."""

from __future__ import annotations

import argparse
import sys

from jobkit.cli.arguments import add_selection, chosen_runs, confirm
from jobkit.cli.several import each
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED
from jobkit.run.command_line import to_type
from jobkit.run.duration import format_seconds
from jobkit.run.rundir import RunDir
from jobkit.run.silent import NOTHING_KEPT, is_silent
from jobkit.run.status import State
from jobkit.submission import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, asks=True)
    parser.add_argument("--no-grace", action="store_true", help="kill the ranks at once, without a checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Cancel and wait for the checkpoint; cancelling what has ended already is no mistake."""
    found = chosen_runs(arguments)
    confirm(found, arguments)
    return each(found, lambda run: _cancel(run, grace=not arguments.no_grace))


def _cancel(found: RunDir, *, grace: bool) -> int:
    def tell() -> None:
        seconds = format_seconds(job.CANCEL_SECONDS)
        said = f"its ranks get {seconds} to write a checkpoint; --no-grace kills them"
        if is_silent(found, found.status()):
            said = f"your program got SIGTERM and has {seconds} to end; {NOTHING_KEPT}; --no-grace kills it"
        print(f"{found.name}: {said}", file=sys.stderr)

    status = job.cancel(found, grace=grace, on_wait=tell if grace else lambda: None)
    if status is None:
        print(f"{found.name} is {found.status().state} already; nothing to cancel")
        return EXIT_FINISHED
    if not status.cancel_requested:
        print(f"{found.name} was stopped, and another command has continued it since: it is {status.state}")
        return EXIT_FINISHED
    if status.state in (State.FINISHED, State.FAILED):
        print(f"{found.name} {status.state}{status.at_steps}, before it could be cancelled")
        return EXIT_FINISHED
    if status.state != State.CANCELLED:
        print(f"{found.name} is still {status.state}: it was asked to stop; {to_type('status', found.name)}")
        return EXIT_FAILED if status.state.is_under_way else EXIT_FINISHED
    if is_silent(found, status):
        print(f"{found.name} cancelled; {NOTHING_KEPT}\nto start it again: {status.how_to_continue}")
        return EXIT_FINISHED
    safe = (
        f"checkpoint of step {status.checkpoint} is safe" if status.checkpoint is not None else "it had no checkpoint"
    )
    reached = max(status.step, (status.attempt.last_step if status.attempt else 0) or 0)
    if lost := reached - (status.checkpoint or 0):
        safe += f", the {lost} step(s) since are repeated when it goes on"
    print(f"{found.name} cancelled at step {reached}; {safe}\nto continue it: {status.how_to_continue}")
    return EXIT_FINISHED
