"""jobkit preempt RUN ...: rehearse a preemption; the run stops as Slurm would stop it, and continues by itself."""

from __future__ import annotations

import argparse
import time

from jobkit.cli.arguments import add_runs, confirmed, for_each
from jobkit.cli.cancel import LOOK_SECONDS, PATIENCE_SECONDS
from jobkit.disk import Looks
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, JobkitError
from jobkit.run.journal import known_status
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.run.view import view
from jobkit.usage import show_examples, to_continue, to_type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, asks=True)
    parser.add_argument("--no-grace", action="store_true", help="kill the ranks at once, without a checkpoint")
    show_examples(parser, {"toy": "stop it with a checkpoint; it continues by itself", "toy --no-grace": "kill it"})


def run(arguments: argparse.Namespace) -> int:
    """Preempt the attempt that runs, and say from where the next one goes on."""
    return for_each(confirmed(arguments), lambda run: _preempt(run, grace=not arguments.no_grace))


def _preempt(run: RunDir, *, grace: bool) -> int:
    now = view(run)
    attempt = now.status.open_attempt
    if attempt is None or now.state == State.LOST:
        raise JobkitError(f"{run.name} is {now.state}, and no attempt of it runs: there is nothing to preempt")
    run.ask("preempt", now.status, None if grace else 0.0)
    deadline = time.monotonic() + PATIENCE_SECONDS
    looks, number = Looks(), attempt.number
    while (ended := looks.at(lambda: known_status(run).attempts[number - 1].ended)) is None:
        if time.monotonic() > deadline:
            print(f"{run.name} was asked to stop and has not yet; {to_type('status', run.path)}")
            return EXIT_FAILED
        time.sleep(LOOK_SECONDS)
    at = "" if ended.last_step is None else f" at step {ended.last_step}"
    print(f"{run.name}: attempt {number} ended{at} ({ended.cause})")
    if ended.next in ("stop", "fail") and ended.cause != "finished":
        print(f"it does not continue by itself ({ended.reason}); {to_continue(run.path, now.status.submitted)}")
    elif ended.cause != "finished":
        # In place it goes on from the memory of its job, where the snapshot is that it began with, or a newer one.
        states = [ended.snapshot_step, ended.first_step] if ended.next == "in_place" else []
        step = max((step for step in (ended.durable_step, *states) if step is not None), default=0)
        kept = f"from step {step} or later" if step else "from its start"
        print(f"it continues by itself {kept}; {to_type('status', run.path)}")
    return EXIT_FINISHED
