"""jobkit preempt RUN: rehearse a preemption, here or on Slurm."""

from __future__ import annotations

import argparse

from jobkit.cli.arguments import add_run, chosen_run
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED
from jobkit.submission import job


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--no-grace", action="store_true", help="kill its ranks at once, without a checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Preempt the attempt that runs, and say from where the next one will go on."""
    found = chosen_run(arguments)
    before = found.status().attempt
    status = job.preempt(found, grace=not arguments.no_grace)
    ended = next((one for one in status.attempts if before and one.id == before.id), None)
    if ended is None or ended.ended is None:
        print(f"{found.name} was asked to stop and has not yet; python -m jobkit status {found.name}")
        return EXIT_FAILED
    print(f"{found.name}: attempt {ended.id} {ended.cause} at step {ended.last_step or 0}")
    if ended.cause == "finished":
        return EXIT_FINISHED
    print(f"it continues by itself from step {ended.durable_step}; python -m jobkit status {found.name}")
    return EXIT_FINISHED
