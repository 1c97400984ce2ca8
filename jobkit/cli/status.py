"""jobkit status RUN ...: how runs stand, attempt by attempt, and what to type next.

View (journal and scheduler), Progress, accounts --describe--> lines for a person, or --json for programs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from typing import Any

from jobkit.agent.devices import turns
from jobkit.cli.arguments import absent, add_runs, chosen
from jobkit.display import outside_a_step
from jobkit.duration import format_seconds
from jobkit.errors import EXIT_FINISHED
from jobkit.run import records
from jobkit.run.accounting import Account, accounts, goodput
from jobkit.run.after import waits_for
from jobkit.run.files import json_text, read_json
from jobkit.run.older import HINT
from jobkit.run.records import AttemptEnded, Progress
from jobkit.run.runs import verified_file
from jobkit.run.secrets import masked_status
from jobkit.run.status import Attempt, State
from jobkit.run.tail import Tail
from jobkit.run.view import View, views
from jobkit.usage import show_examples, to_continue, to_type

SAMPLES_SHOWN = 8
"""How many ids of a failed rank's batch are printed: a person looks one or two up."""

SLOW_FACTOR, SLOW_SHARE = 1.5, 0.1
"""A slow rank needs this many times the median rank's time, and this part of a step more than it."""

LINES_OF_LOG = 10
"""How much is shown of the output of a job that could not begin, as for a `setup` line that fails."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="for programs: status.json, the view and the progress")
    show_examples(parser, {"toy": "attempts, why they ended, where the time went"})


def run(arguments: argparse.Namespace) -> int:
    """Print how each run stands, after its scheduler was asked."""
    seen = views(chosen(arguments))
    absent(arguments)
    if arguments.json:
        values = [_values(view) for view in seen]
        print(json_text(values[0] if len(values) == 1 else values))
    else:
        print("\n\n".join("\n".join(describe(view, view.run.progress(), time.time())) for view in seen))
    return EXIT_FINISHED


def _values(view: View) -> dict[str, Any]:
    progress = view.run.progress()
    spent = accounts(view.status, progress, time.time())
    return {
        **masked_status(view.status.as_dict()),
        "run": view.run.name,
        "path": str(view.run.path),
        "state": view.state,
        "words": view.words,
        "job_id": view.job_id,
        "answered": view.answered,
        "checkpoint": view.run.durable_step(),
        "start": records.plain(start) if (start := view.run.start()) is not None else None,
        "progress": records.plain(progress) if progress is not None else None,
        "slow_ranks": slow_ranks(view, progress),
        "verified": verified(view),
        "accounts": [dataclasses.asdict(account) for account in spent],
        "goodput": goodput(spent),
    }


def slow_ranks(view: View, progress: Progress | None) -> list[dict[str, Any]]:
    """Return {rank, node, seconds, median} of the ranks of a running attempt that hold the others up."""
    began = view.status.attempt.began if view.status.attempt is not None else None
    if began is None or view.is_over or progress is None or progress.attempt != began.attempt:
        return []
    seconds = progress.rank_seconds or []
    median = statistics.median_low(seconds) if seconds else 0.0  # of two ranks the faster one
    least = max(SLOW_FACTOR * median, median + SLOW_SHARE / (progress.steps_per_second or math.inf))
    nodes = began.nodes or [began.host]
    return [
        {"rank": rank, "node": nodes[rank * len(nodes) // len(seconds)], "seconds": value, "median": median}
        for rank, value in enumerate(seconds)
        if value > least
    ]


def verified(view: View) -> dict[str, Any] | None:
    """Return {time, equal, nondeterministic} of the last `jobkit verify` of the run's code and values; None if there
    was none."""
    submitted = view.status.submitted
    code = submitted.code if submitted is not None else None
    value = read_json(verified_file(view.run.path.parent, code, view.run.name))
    return value if isinstance(value, dict) else None


def describe(view: View, progress: Progress | None, now: float) -> list[str]:
    """Return the status in lines for a person; the last line names the next command."""
    status, run, state = view.status, view.run, view.state
    newest = status.attempt
    if progress is not None and (newest is None or progress.attempt != newest.number):
        progress = None
    spent = accounts(status, progress, now)
    running = progress if status.open_attempt is not None and not view.is_over else None
    outside = outside_a_step(running, now) if running is not None else ""
    steps = _steps(spent, progress, outside) if status.rewound is None else f", step {status.rewound}"
    lines = [f"{run.name}: {state}{steps}"]
    if view.words:
        lines.append(f"  {view.words}")
    if waiting := waits_for(run, status):
        lines.append(f"  it starts once these are finished: {waiting}")
    if state == State.QUEUED and view.job is None and (turn := turns().get(str(run.path))):
        lines.append(f"  it waits for devices of this machine: {turn}")
    if (view.is_pending or state == State.LOST) and run.failed_starts.exists():
        lines.append("  the last start of its job began no attempt; the end of its output:")
        lines += [f"    {line}" for line in Tail().read(run.job_log, to_the_end=True)[-LINES_OF_LOG:]]
    for attempt, account in zip(status.attempts, spent, strict=True):
        lines += _attempt_lines(attempt, account, is_running=attempt is status.open_attempt and not view.is_over)
    if status.excluded_nodes:
        lines.append(f"excluded nodes: {', '.join(status.excluded_nodes)} (this run failed on them)")
    for slow in slow_ranks(view, progress):
        times = f"{slow['seconds']:.3g} s a step before it waits for others, the median rank {slow['median']:.3g} s"
        lines.append(f"slow: rank {slow['rank']} on {slow['node']} needs {times}")
    lines += [f"warning: {warning}" for warning in (progress.warnings if progress is not None else [])]
    share = goodput(spent)
    if share is not None:
        since = format_seconds(spent[-1].until - spent[0].began)
        lines.append(f"goodput: {share:.0%} of the {since} since the first start were new steps")
    if (word := verified(view)) is not None:
        age = format_seconds(max(0.0, now - word["time"]))
        outcome = "equal" if word["equal"] else "it differs after interruptions"
        outcome = "two straight runs of it differ" if word.get("nondeterministic") else outcome
        lines.append(f"its code and params were verified {age} ago: {outcome}")
    if (start := run.start()) is not None:
        lines.append(f"began with {'the weights of ' * start.weights_only}step {start.step} of {start.run}")
    step = run.durable_step()
    if step is not None:
        lines.append(f"newest checkpoint: step {step}")
    ended = newest.ended if newest is not None else None
    is_failure = ended is not None and (state == State.FAILED or (state == State.INTERRUPTED and ended.gave_up))
    if is_failure and ended is not None:
        lines += _failure_lines(ended)
    if status.result is not None:
        lines.append(f"result: {json.dumps(status.result)}")
    lines.append(f"run directory: {run.path}")
    if status.is_older:
        lines.append(f"it cannot be continued{f'; {HINT}' if run.final.exists() else ''}")
    elif state in (State.INTERRUPTED, State.FAILED, State.CANCELLED, State.LOST):
        is_ours = status.submitted is None or status.submitted.launcher is None
        how = "to continue it, with the code as it was submitted" if is_ours else "to continue it"
        if is_ours and state == State.FAILED:
            how = "once that is mended: the command that submitted it; with the code and the YAML as they were"
        lines.append(f"{how}: {to_continue(run.path, status.submitted)}")
    if is_failure or not view.is_over:
        lines.append(f"its output: {to_type('logs', run.path, *[] if view.is_over else ['-f'])}")
    return lines


def _steps(spent: list[Account], progress: Progress | None, outside: str) -> str:
    steps = [account.last_step for account in spent if account.last_step is not None]
    if progress is None or progress.step is None:
        return f", step {steps[-1]}" if steps else ""
    total = f" of {progress.total_steps}" if progress.total_steps else ""
    speed = f"{progress.steps_per_second:.3g} steps/s" if progress.steps_per_second else ""
    return ", ".join(filter(None, [f", step {max(progress.step, *steps[-1:], 0)}{total}", outside or speed]))


def _attempt_lines(attempt: Attempt, account: Account, *, is_running: bool) -> list[str]:
    began, ended = attempt.began, attempt.ended
    if ended is not None:
        cause = ended.cause.replace("_", " ")
    else:
        cause = "running" if is_running else "its end is not recorded"
    steps = "" if account.first_step is None else f", steps {account.first_step} to {account.last_step}"
    spent = {"in the queue" if began.nodes else "until the start": account.queue}
    if account.first_step is not None:  # a `command:` does not say when its start is over
        spent |= {"starting": account.starting, "ending": account.ending}
    parts = [f"{seconds:.0f} s {part}" for part, seconds in spent.items() if seconds >= 0.5]
    where = f" on {', '.join(began.nodes)}" if began.nodes else ""
    lines = [f"  attempt {attempt.number} ({began.how}): {cause}{steps}, {format_seconds(account.seconds)}{where}"]
    if account.repeated_steps:
        parts.append(f"{account.repeated_steps} steps repeated{_compared(ended)}")
    if parts:
        lines.append(f"    {', '.join(parts)}")
    if ended is not None and ended.error:
        places = {"node": ended.node, "step": ended.step}  # the error names the rank
        place = ", ".join(f"{name} {value}" for name, value in places.items() if value not in (None, "local"))
        lines.append(f"    {place}{': ' if place else ''}{ended.error.splitlines()[0]}")
    return lines


def _compared(ended: AttemptEnded | None) -> str:
    """Return the comparison of an attempt's repeated steps with their first run, in words."""
    if ended is None or not ended.compared:
        return ""
    if ended.differs_at is not None:
        return f", and step {ended.differs_at} logged other values than before: `jobkit verify` finds the reason"
    return f", {ended.compared} compared, equal"


def _failure_lines(ended: AttemptEnded) -> list[str]:
    lines = []
    if ended.samples:
        more = len(ended.samples) - SAMPLES_SHOWN
        shown = ", ".join(map(str, ended.samples[:SAMPLES_SHOWN]))
        lines.append(f"samples of that rank's batch: {shown}" + (f" and {more} more (--json)" if more > 0 else ""))
    return [*lines, "", *ended.traceback.rstrip().splitlines(), ""] if ended.traceback else lines
