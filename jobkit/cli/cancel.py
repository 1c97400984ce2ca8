"""jobkit cancel RUN ...: stop runs for good; a running one leaves a checkpoint.

    its job waits in Slurm's queue    scancel, wait until it is gone, journal `cancelled` under the run's lock
    its job is gone                   journal `cancelled` under the lock
    its job runs                      a Request: supervisor/loop.py reads it, agent/children.py stops the ranks
    its setup lines run               the same Request, then scancel, or a signal to them
    a sweep's loop runs here          a file beside the loop's lock: the loop starts nothing more

A supervisor alone writes the journal while its job lives, so that the third way ends with the second at worst.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from jobkit.agent import processes
from jobkit.cli.arguments import add_runs, chosen, confirmed, way_out, worst
from jobkit.disk import Looks
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, NoSuchRun
from jobkit.log import log
from jobkit.run.files import user_name
from jobkit.run.journal import Journal, known_status
from jobkit.run.records import Cancelled
from jobkit.run.rundir import RunDir
from jobkit.run.runs import runs_dir_of, sweep_cancel_file, sweep_file, sweep_lock
from jobkit.run.status import State
from jobkit.run.view import View, view, views
from jobkit.slurm import jobs
from jobkit.supervisor import notify
from jobkit.usage import show_examples, to_continue, to_type

PATIENCE_SECONDS = 180.0
"""How long a supervisor may take: its ranks get 90 s after the last progress of a save, and it may be starting."""

KILLED_SECONDS = 30.0
"""The same where the ranks are killed."""

START_SECONDS = 15.0
"""How long a job that has begun nothing may take to hear of the cancel: its supervisor imports. Then its setup lines
are ended."""

LOOK_SECONDS = 0.1
ASK_SECONDS = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, asks=True)
    parser.add_argument("--no-grace", action="store_true", help="kill the ranks at once, without a checkpoint")
    show_examples(parser, {"digits-11f5f19c": "one run", "'digits*' -y": "several, without being asked"})


def run(arguments: argparse.Namespace) -> int:
    """Cancel, wait for the checkpoints, and print how each run ended. A run that is over is no mistake."""
    codes, runs_dir = [], runs_dir_of(arguments.runs_dir)
    try:
        runs = confirmed(arguments)
    except NoSuchRun:  # of a sweep that has not made its first run yet, the loop is all that there is to stop
        if len(arguments.names) == 1 and _stop_sweeps(arguments.names, runs_dir):
            return EXIT_FINISHED
        raise
    if _stop_sweeps(arguments.names, runs_dir):
        runs = chosen(arguments)  # and those that have started since
    for code, line in cancel(runs, grace=not arguments.no_grace):
        print(line, flush=True)
        codes.append(code)
    return worst(codes)


def _stop_sweeps(words: Sequence[str], runs_dir: Path) -> list[Path]:
    """Let the sweeps that run on this machine start nothing more; returns their files."""
    files = [file for word in words if (file := sweep_file(word, runs_dir)) and sweep_lock(file).is_held()]
    for file in files:
        sweep_cancel_file(file).touch()
        print(f"{file.name} starts nothing more", flush=True)
    return files


def cancel(runs: Sequence[RunDir], *, grace: bool = True) -> Iterator[tuple[int, str]]:
    """Ask all runs to end before one is waited for; yield an exit code and a line for each, as it becomes known."""
    waiting: list[View] = []
    queued: list[str] = []
    for now in views(runs):
        if now.is_over and now.state != State.LOST:
            yield EXIT_FINISHED, f"{now.run.name} is {now.state} already: nothing to cancel"
        elif now.status.state == State.QUEUED and not now.answered and not now.elsewhere and grace:
            yield EXIT_FAILED, f"{now.run.name} was not cancelled: {now.words}"
        else:
            waiting.append(now)
            if now.is_pending:
                queued.append(str(now.job_id))
            elif now.state != State.LOST:
                now.run.ask("cancel", now.status, None if grace else 0.0)
    if queued:
        jobs.cancel(*queued)  # one command for all of them
    if waiting:
        log.info("waiting until %s", "the ranks have saved and ended" if grace else "the ranks have ended")
    deadline, ask_at, unfinished = time.monotonic() + (PATIENCE_SECONDS if grace else KILLED_SECONDS), 0.0, [-1]
    looks, ask_supervisor_until = Looks(), time.monotonic() + (START_SECONDS if grace else 0.0)
    while waiting and time.monotonic() < deadline:
        is_due = time.monotonic() >= ask_at
        if is_due:
            ask_at = time.monotonic() + ASK_SECONDS
            before_that, unfinished = unfinished, [view.run.unfinished_bytes() for view in waiting]
            if grace and unfinished != before_that:  # a large model saves
                deadline = time.monotonic() + PATIENCE_SECONDS
        # A controller that is away takes 9 s to say so: what the supervisor journals is not to wait for that.
        read = [(before, looks.at(known_status, before.run)) for before in waiting]
        over = [before for before, status in read if status and ((is_due and before.answered) or status.is_over)]
        for before, now in zip(over, looks.at(views, [before.run for before in over]) or (), strict=False):
            is_ours = now.status.person_submission == before.status.person_submission
            if now.is_over and is_ours:
                journaled = looks.at(_journal_cancel, now)  # under the lock: another command may have been first
                if journaled is None:
                    continue
                now = journaled
                is_ours = now.status.person_submission == before.status.person_submission
            if not is_ours:
                waiting.remove(before)
                yield EXIT_FINISHED, f"{now.run.name} was stopped, and is {now.state}: another command continued it"
            elif now.is_over:
                waiting.remove(before)
                yield EXIT_FINISHED, _outcome(now)
            elif now.is_pending or (now.status.state == State.QUEUED and time.monotonic() >= ask_supervisor_until):
                _end_job(now, signal.SIGTERM if grace else signal.SIGKILL)
        time.sleep(LOOK_SECONDS)
    for before in waiting:
        if grace or before.answered:
            yield EXIT_FAILED, _unanswered(before.run)
        else:  # its cluster may be gone for good; a job of it that lives is fenced off by the next submission
            yield EXIT_FINISHED, _outcome(_journal_cancel(before, is_unheard=True))


def _end_job(now: View, number: int) -> None:
    """End a job without ranks: it is in the queue again, or its setup lines run, and no supervisor hears a request."""
    if now.job is not None:
        jobs.cancel(now.job.job_id)
        return
    for pid in processes.with_variables(f"JOBKIT_TOKEN={now.status.token}"):
        with suppress(ProcessLookupError):
            os.killpg(os.getpgid(pid), number)


def _journal_cancel(now: View, *, is_unheard: bool = False) -> View:
    """Journal the cancel of a run whose job is gone without a word, or whose attempt ended otherwise meanwhile.

    Slurm is not asked again: a job of the same token that was gone does not come back.
    """
    with now.run.submit_lock():
        journal = Journal(now.run)
        before = journal.status
        is_gone = (now.state == State.LOST or is_unheard) and not before.is_over
        if before.token == now.status.token and (is_gone or before.state == State.INTERRUPTED):
            journal.append(Cancelled(user=user_name(), reason=f"cancelled by {user_name()}"))
    notify.tell(now.run, str(before.token), before)
    return View(now.run, journal.status, None, answered=True)


def _outcome(now: View) -> str:
    run, status = now.run, now.status
    if now.state != State.CANCELLED:
        return f"{run.name} is {now.state}: it ended before it could be cancelled"
    if not status.attempts:
        return f"{run.name} cancelled before it had begun"
    last = max((a.ended.last_step or 0 for a in status.attempts if a.ended is not None), default=0)
    step = run.durable_step()
    kept = "it has no checkpoint" if step is None else f"the checkpoint of step {step} is kept"
    again = to_continue(run.path, status.submitted)
    return f"{run.name} cancelled at step {max(last, step or 0)}; {kept}; to continue it: {again}"


def _unanswered(run: RunDir) -> str:
    """The next command of a person for a supervisor that does not answer."""
    now, lease = view(run), run.lease()
    submitted = now.status.submitted
    if not now.answered:
        return f"{run.name} is still {now.standing}; {way_out(now)}"
    is_local = submitted is None or submitted.scheduler == "local"
    job = f"scancel {now.job_id}"
    if is_local:
        job = f"kill {lease.pid} on {lease.host}" if lease is not None else to_type("cancel", run.path, "--no-grace")
    return f"{run.name} is still {now.state}: it was asked to stop; to end its job: {job}; its output: {run.job_log}"
