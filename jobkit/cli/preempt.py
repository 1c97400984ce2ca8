"""jobkit preempt RUN ...: rehearse a preemption, here or on Slurm."""

from __future__ import annotations

import argparse

from jobkit.cli.arguments import add_selection, chosen_runs, confirm
from jobkit.cli.several import add_json, each, print_json
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED
from jobkit.run.command_line import to_type
from jobkit.run.rundir import RunDir
from jobkit.run.silent import NOTHING_KEPT, is_silent
from jobkit.run.usage import show_examples
from jobkit.submission import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, asks=True)
    parser.add_argument("--no-grace", action="store_true", help="kill the ranks at once, without a checkpoint")
    add_json(parser)
    show_examples(
        parser,
        "toy  stop it with a checkpoint, as Slurm would; it continues by itself",
        "toy --no-grace  kill its ranks at once",
    )


def run(arguments: argparse.Namespace) -> int:
    """Preempt the attempt that runs, and say from where the next one will go on."""
    found = chosen_runs(arguments)
    confirm(found, arguments)
    return each(found, lambda run: _preempt(run, grace=not arguments.no_grace, as_json=arguments.json))


def _preempt(found: RunDir, *, grace: bool, as_json: bool) -> int:
    ended = job.preempt(found, grace=grace)
    if as_json:
        print_json(found, attempt=ended.id, cause=ended.cause)
        return EXIT_FAILED if ended.ended is None else EXIT_FINISHED
    if ended.ended is None:
        print(f"{found.name} was asked to stop and has not yet; {to_type('status', found.name)}")
        return EXIT_FAILED
    reached = "" if ended.last_step is None else f" at step {ended.last_step}"  # it may have reported none
    print(f"{found.name}: attempt {ended.id} {ended.cause}{reached}")
    if ended.cause == "finished":
        return EXIT_FINISHED
    if is_silent(found, found.status()):
        got = "got SIGTERM" if grace else "was killed"
        print(f"your program {got}; {NOTHING_KEPT}: it starts again by itself; {to_type('status', found.name)}")
        return EXIT_FINISHED
    kept = f" from step {ended.durable_step}" if ended.resumed else ""
    if kept and ended.durable_step != ended.last_step:
        kept += " or a later snapshot in memory"
    print(f"it continues by itself{kept}; {to_type('status', found.name)}")
    return EXIT_FINISHED
