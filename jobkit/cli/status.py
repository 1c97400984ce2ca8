"""jobkit status RUN: how a run stands, attempt by attempt."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time

from jobkit.cli.arguments import add_run, chosen_run
from jobkit.errors import EXIT_FINISHED, SchedulerError
from jobkit.launch import job
from jobkit.run import status as states
from jobkit.run.duration import format_seconds
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, Status
from jobkit.scheduler import slurm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """RUN, `--json` and `--runs-dir`."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="for programs: the same as status.json")


def run(arguments: argparse.Namespace) -> int:
    """Print the status, after the scheduler was asked whether the job lives."""
    found = chosen_run(arguments)
    try:
        status = job.current_status(found)
    except SchedulerError as error:
        print(f"{error}; what follows is what the run directory says", file=sys.stderr)
        status = found.status()
    if arguments.json:
        print(json.dumps(status.as_dict(), indent=1))
    else:
        print("\n".join(describe(found, status)))
    return EXIT_FINISHED


def describe(run: RunDir, status: Status) -> list[str]:
    """The status in lines for a person; the last says what to type next."""
    steps = f"step {status.step}" + (f"/{status.total_steps}" if status.total_steps else "")
    lines = [f"{run.name}: {status.state}, {steps}"]
    if status.state in (states.QUEUED, states.RUNNING):
        lines[0] += f" ({'job' if status.scheduler == 'slurm' else 'process'} {status.job_id} on {status.cluster})"
    if status.state == states.QUEUED and status.scheduler == "slurm" and status.job_id:
        with contextlib.suppress(SchedulerError):
            waiting = slurm.show_job(status.job_id)
            lines += [f"  waiting for: {waiting.reason} (Slurm's word; `man squeue` explains it)"] if waiting else []
    lines += [_attempt_line(attempt) for attempt in status.attempts]
    if status.checkpoint is not None:
        lines.append(f"newest checkpoint: step {status.checkpoint}")
    if status.error:
        lines.append(f"error: {status.error}")
    if status.result is not None:
        lines.append(f"result: {json.dumps(status.result)}")
    lines.append(f"run directory: {run.path}")
    if status.state in (states.INTERRUPTED, states.FAILED, states.CANCELLED):
        lines.append(f"to continue it: {status.how_to_continue}")
    return lines


def _attempt_line(attempt: Attempt) -> str:
    seconds = (attempt.ended or time.time()) - attempt.started
    first = "?" if attempt.first_step is None else attempt.first_step
    last = "..." if attempt.last_step is None else attempt.last_step
    cause = attempt.cause or "running"
    return f"  attempt {attempt.id}: {cause}, steps {first} to {last}, {format_seconds(seconds)}, job {attempt.job_id}"
