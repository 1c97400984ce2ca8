"""jobkit cancel RUN ...: stop them for good; a running one leaves a checkpoint."""

from __future__ import annotations

import argparse
import sys

from jobkit.cli.arguments import add_selection, chosen_runs, confirm
from jobkit.cli.several import add_json, print_json, worst
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, JobkitError
from jobkit.run.command_line import to_type
from jobkit.run.continuation import how_to_continue
from jobkit.run.duration import format_seconds
from jobkit.run.rundir import RunDir
from jobkit.run.silent import NOTHING_KEPT, is_silent
from jobkit.run.status import State, Status
from jobkit.run.usage import show_examples
from jobkit.submission.cancel import cancel, cancel_all
from jobkit.submission.job import CANCEL_SECONDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, asks=True)
    parser.add_argument("--no-grace", action="store_true", help="kill the ranks at once, without a checkpoint")
    add_json(parser)
    show_examples(
        parser,
        "digits-11f5f19c  one run",
        "'digits*' --state queued -y  several, without being asked",
        "--where 'params.lr>=0.03'  of all runs those",
    )


def run(arguments: argparse.Namespace) -> int:
    """Cancel and wait for the checkpoints; cancelling what has ended already is no mistake."""
    found, grace = chosen_runs(arguments), not arguments.no_grace
    confirm(found, arguments)
    if len(found) == 1:
        (one,) = found
        code, lines = told(one, cancel(one, grace=grace, on_wait=lambda: _tell_wait(one, grace)))
        _print(one, lines, arguments.json)
        return code
    codes = []
    for one, outcome in cancel_all(found, grace=grace, on_wait=lambda one: _tell_wait(one, grace)):
        if isinstance(outcome, JobkitError):
            print(f"error: {outcome}", file=sys.stderr)
            codes.append(outcome.exit_code)
            continue
        if outcome is not None and outcome.state == State.CANCELLED and not outcome.attempts:
            code, lines = EXIT_FINISHED, [f"{one.name} cancelled before it had begun"]  # without a look at its config
        else:
            code, lines = told(one, outcome)
        _print(one, lines[:1], arguments.json)
        codes.append(code)
    return worst(codes)


def _print(run: RunDir, lines: list[str], as_json: bool) -> None:
    if as_json:
        print_json(run, told=lines[0])
    else:
        print("\n".join(lines), flush=True)


def _tell_wait(run: RunDir, grace: bool) -> None:
    if not grace:
        return
    seconds = format_seconds(CANCEL_SECONDS)
    said = f"its ranks get {seconds} to write a checkpoint; --no-grace kills them"
    if is_silent(run, run.status()):
        said = f"your program got SIGTERM and has {seconds} to end; {NOTHING_KEPT}; --no-grace kills it"
    print(f"{run.name}: {said}", file=sys.stderr)


def told(run: RunDir, status: Status | None) -> tuple[int, list[str]]:
    """The exit code and what to say of a run that was cancelled, its outcome in the first line."""
    if status is None:
        return EXIT_FINISHED, [f"{run.name} is {run.status().state} already; nothing to cancel"]
    if not status.cancel_requested:
        return EXIT_FINISHED, [
            f"{run.name} was stopped, and another command has continued it since: it is {status.state}"
        ]
    if status.state in (State.FINISHED, State.FAILED):
        return EXIT_FINISHED, [f"{run.name} {status.state}{status.at_steps}, before it could be cancelled"]
    if status.state != State.CANCELLED:
        code = EXIT_FAILED if status.state.is_under_way else EXIT_FINISHED
        return code, [f"{run.name} is still {status.state}: it was asked to stop; {to_type('status', run.name)}"]
    if is_silent(run, status):
        return EXIT_FINISHED, [
            f"{run.name} cancelled; {NOTHING_KEPT}",
            f"to start it again: {how_to_continue(run, status)}",
        ]
    safe = (
        f"checkpoint of step {status.checkpoint} is safe" if status.checkpoint is not None else "it had no checkpoint"
    )
    reached = max(status.step, (status.attempt.last_step if status.attempt else 0) or 0)
    if lost := reached - (status.checkpoint or 0):
        safe += f", the {lost} step(s) since are repeated when it goes on"
    return EXIT_FINISHED, [
        f"{run.name} cancelled at step {reached}; {safe}",
        f"to continue it: {how_to_continue(run, status)}",
    ]
