"""jobkit status RUN ...: how runs stand, attempt by attempt."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence

from jobkit.cli.arguments import add_selection, chosen_runs
from jobkit.cli.json_text import json_text
from jobkit.errors import EXIT_FINISHED, SchedulerError
from jobkit.run.accounting import Account, Restart
from jobkit.run.config import StartFrom
from jobkit.run.continuation import how_to_continue
from jobkit.run.dependencies import verdict
from jobkit.run.duration import format_seconds
from jobkit.run.records import Failure
from jobkit.run.rundir import RunDir
from jobkit.run.silent import is_silent
from jobkit.run.status import Attempt, State, Status
from jobkit.run.usage import show_examples
from jobkit.submission.checkpoints_left import where_deleted
from jobkit.submission.observer import is_active, may_be_requeued, observe
from jobkit.submission.waiting import explained

SAMPLES_SHOWN = 8
"""How many ids of a failed rank's batch are printed: a person looks one or two up."""


ENDS = {
    "user": "stopped by Ctrl-C or SIGTERM",
    "left": "the script ended without ctx.finish",
    "timeout": "time limit",
    "signal": "stopped by a signal",
    "lost": "lost, nobody recorded why",
}
"""Causes of an end whose names do not explain themselves, as a person reads them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument(
        "--json", action="store_true", help="for programs: what status.json has, and the state of the job"
    )
    show_examples(
        parser,
        "toy  attempts, the time in them, and why they ended",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the status of each run, after the scheduler was asked whether its job lives."""
    found = chosen_runs(arguments)
    statuses = [(run, *_look(run)) for run in found]
    if arguments.json:
        plain = [{"run": run.name, "path": str(run.path), **status.as_dict()} for run, status, _ in statuses]
        print(json_text(plain[0] if len(found) == 1 else plain))
    else:
        texts = ["\n".join(describe(run, status, is_ending=is_ending)) for run, status, is_ending in statuses]
        print("\n\n".join(texts), end="\n" if texts else "")
    return EXIT_FINISHED


def _look(run: RunDir) -> tuple[Status, bool]:
    """A run's status, and whether it has stopped in a job that has not ended."""
    try:
        status = observe(run)
        return status, may_be_requeued(status) and is_active(run, status)
    except SchedulerError as error:
        print(f"{error}; what follows is what the run directory says", file=sys.stderr)
        return run.status(), False


def describe(run: RunDir, status: Status, *, is_ending: bool = False) -> list[str]:
    """The status in lines for a person; the last says what to type next.

    `is_ending` says of an interrupted run that its Slurm job has not ended, and so may go back into the queue.
    """
    silent = is_silent(run, status)
    known = f", {status.steps}" if status.has_loop else ""
    lines = [f"{run.name}: {status.state}{known}"]
    if status.probably is not None:
        job_gone = f"job {status.job_id}" if status.scheduler == "slurm" else f"process {status.job_id}"
        why = f"{job_gone} is gone, and nobody recorded why" if status.job_id else "it has no job"
        lines[0] = f"{run.name}: probably {status.probably}{known} ({why})"
    if status.state.is_under_way:
        lines[0] += f" ({'job' if status.scheduler == 'slurm' else 'process'} {status.job_id} on {status.cluster})"
    if status.state == State.QUEUED and status.next_began != "submitted":
        lines.append("  in the queue again: it continues by itself")
    before = verdict(run, status.after).text if status.state in (State.QUEUED, State.HELD) else ""
    if before and status.scheduler == "slurm":
        held = "held until that is continued, and " if status.state == State.HELD and status.held_for_others else ""
        lines.append(f"  waiting for: {before}; {held}it starts by itself when that is finished")
    elif status.state == State.HELD:
        lines.append(f"  held: {explained(str(status.waits_for))}; to release it: scontrol release {status.job_id}")
    elif status.waits_for is not None and status.scheduler != "slurm":
        lines.append(f"  waiting for: {status.waits_for}")
    elif status.waits_for is not None:
        lines.append(f"  waiting: {explained(status.waits_for)}")
    if status.state.is_under_way and status.cancel_at is not None:
        left = format_seconds(status.cancel_seconds_left)
        ranks = f"its program has {left} more to end" if silent else f"its ranks have {left} more to write a checkpoint"
        lines.append(f"  cancelling: {ranks if status.state == State.RUNNING else 'its job ends when it starts'}")
    if status.start_from is not None:
        lines.append(f"  started from {StartFrom(**status.start_from)}")
    if status.skipped_batches:
        *_, (step, samples) = status.skipped_batches.items()
        shown = f"the last of step {step}, samples {_shown(samples)}"
        lines.append(f"  left out {len(status.skipped_batches)} batch(es) whose loss was no number: {shown}")
    if (loss := status.loss_without_harm) is not None:
        place = f"step {loss['step']} on rank {loss['rank']}, samples {_shown(loss['samples'])}"
        lines.append(f"  a loss that was no number did no harm: {place}")
    if status.skip_samples:
        lines.append(f"  leaves out {len(status.skip_samples)} sample(s): {_shown(status.skip_samples)}")
    nodes: list[str] = []
    for attempt in status.attempts:
        lines += _attempt_lines(attempt, has_moved=attempt.nodes != nodes, is_silent=silent)
        nodes = attempt.nodes
    for slow in status.stragglers:
        times = f"{slow.seconds:.3g} s a step by itself, the median rank {slow.median:.3g} s"
        lines.append(f"slow: rank {slow.rank} on {slow.host} is slower than the others: {times}")
    if status.excluded_nodes:
        lines.append(f"excluded nodes: {', '.join(status.excluded_nodes)} (they failed under this run)")
    if status.goodput is not None:
        since = format_seconds(max(a.account.until for a in status.attempts if a.account) - status.attempts[0].started)
        lines.append(f"goodput: {status.goodput:.0%} of the {since} since the first start were new steps")
    if status.checkpoint is not None:
        lines.append(f"newest checkpoint: step {status.checkpoint}{where_deleted(run, status.checkpoint)}")
    if status.error:
        lines.append(f"error: {status.error}")
    if status.state == State.FAILED and status.attempt and status.attempt.failure:
        lines += _failure_lines(status.attempt.failure)
    if status.result is not None:
        lines.append(f"result: {json.dumps(status.result)}")
    lines.append(f"run directory: {run.path}")
    if is_ending:
        lines.append(
            f"job {status.job_id} is ending: in some seconds it is in the queue again, or here is what to type"
        )
    elif status.state in (State.INTERRUPTED, State.FAILED, State.CANCELLED):
        lines.append(f"to {'start it again' if silent else 'continue it'}: {how_to_continue(run, status)}")
    return lines


def _attempt_lines(attempt: Attempt, *, has_moved: bool, is_silent: bool) -> list[str]:
    seconds = (attempt.ended or time.time()) - attempt.started
    first = "?" if attempt.first_step is None else attempt.first_step
    last = "..." if attempt.last_step is None else attempt.last_step
    cause = ENDS.get(attempt.cause, attempt.cause) if attempt.cause else "running"
    begun = f"{first} (from memory)" if attempt.from_memory else first
    steps = f", steps {begun} to {last}" if attempt.has_loop else ""
    line = f"  attempt {attempt.id}: {cause}{steps}, {format_seconds(seconds)}, job {attempt.job_id}"
    lost = _lost(attempt.account, is_silent) if attempt.account else ""
    lines = [f"{line}; {lost}" if lost else line]
    if attempt.began == "in place" and attempt.restart is not None:
        lines.append(f"    restarted in place{_parts(attempt.restart)}")
    if has_moved and attempt.nodes:
        lines.append(f"    on {', '.join(attempt.nodes)}")
    if attempt.wanted_nodes > len(attempt.nodes) > 0:
        counted = f"{len(attempt.nodes)} of {attempt.wanted_nodes} nodes"
        lines.append(f"    on {counted}: the same samples in the same order, sums in another (not bit for bit)")
    if attempt.failure and attempt.failure.error:
        lines.append(f"    {attempt.failure.error.splitlines()[0]}")
    return lines


def _parts(restart: Restart) -> str:
    """`: notice 0.1 s, kill 0.1 s, ...`, as far as it is known."""
    known = [(name, seconds) for name, seconds in dataclasses.asdict(restart).items() if seconds is not None]
    return ": " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in known) if known else ""


def _lost(account: Account, is_silent: bool) -> str:
    """Where an attempt's time went, but for new steps; what took no second is left out.

    Of a command that reports nothing nobody knows when its start-up was over.
    """
    again = f"{account.repeated_steps} steps repeated"
    in_vain = f"{account.lost_steps} steps that no checkpoint has"
    spent = {
        "in the queue": account.queue,
        "start-up": 0.0 if is_silent else account.startup,
        again: account.repeated,
        in_vain: account.lost,
        "checkpoints": account.checkpoints,
        "until its end was noticed": account.ending,
    }
    parts = [f"{what} {seconds:.0f} s" for what, seconds in spent.items() if seconds >= 0.5]
    if account.repeated_steps and account.repeated < 0.5:
        parts.append(again)
    if account.lost_steps and account.lost < 0.5:
        parts.append(in_vain)
    return ", ".join(parts)


def _failure_lines(failure: Failure) -> list[str]:
    known = {"rank": failure.rank, "step": failure.step, "node": failure.node}
    lines = ["failed at: " + ", ".join(f"{what} {value}" for what, value in known.items() if value is not None)]
    if failure.samples:
        lines.append(f"samples of that rank's batch: {_shown(failure.samples)}")
    if failure.traceback:
        lines += ["", *failure.traceback.rstrip().splitlines(), ""]
    return lines


def _shown(samples: Sequence[int]) -> str:
    """The first ids of samples, and how many there are more."""
    shown, more = samples[:SAMPLES_SHOWN], len(samples) - SAMPLES_SHOWN
    return ", ".join(map(str, shown)) + (f" and {more} more (--json lists them)" if more > 0 else "")
