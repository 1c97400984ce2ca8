"""Following a run from outside: rank 0's output, the progress bar, and what Ctrl-C means."""

from __future__ import annotations

import signal
import subprocess
import time

from jobkit.display import Display
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.run.tail import Tail
from jobkit.submission import job

POLL_SECONDS = 0.2
"""How often the run's files are read: a progress bar that moves at once."""

ASK_SCHEDULER_SECONDS = 10.0
"""Many followers share one slurmctld, which answers one request at a time; the run's own files say the rest sooner."""

_OVER = (State.FINISHED, State.FAILED, State.CANCELLED)


def follow_local(run: RunDir, supervisor: subprocess.Popen[bytes], asked: list[int]) -> int:
    """Show a local run until its supervisor ends. A signal in `asked`: checkpoint and stop; a second one kills.

    Returns the exit code: 0 finished, 1 failed, 75 interrupted but resumable.
    """
    display, tail = Display(run.name), Tail()
    stops, told = 0, 0
    while supervisor.poll() is None:
        if len(asked) > stops:
            stops = len(asked)
            supervisor.send_signal(signal.SIGTERM if stops == 1 else signal.SIGINT)
            display.say("stopping: writing a checkpoint ... (once more kills without one)" if stops == 1 else "killing")
        status = run.status()
        _refresh(run, status, display, tail)
        told = _say_restarts(status, told, display)
        time.sleep(POLL_SECONDS)
    _refresh(run, run.status(), display, tail)
    display.close()
    status = job.update_status(run)
    announce_end(run, status, display)
    return exit_code(status)


def follow_slurm(run: RunDir) -> int:
    """Show a run on Slurm until it is over, through its requeues. Ctrl-C leaves it running."""
    display, tail, asked_at = Display(run.name), Tail(), 0.0
    shown = None
    try:
        while True:
            status = run.status()
            over = status.state in _OVER
            if time.monotonic() - asked_at > ASK_SCHEDULER_SECONDS and not over:
                asked_at = time.monotonic()
                try:
                    status = job.update_status(run)
                    over = not job.is_active(run, status)
                except SchedulerError as error:
                    display.say(f"{error}; still following")
            if (status.state, len(status.attempts)) != shown:
                shown = (status.state, len(status.attempts))
                display.say(f"{run.name}: {status.state} (job {status.job_id}, attempt {len(status.attempts)})")
            _refresh(run, status, display, tail)
            if over:
                display.close()
                announce_end(run, status, display)
                return exit_code(status)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        display.close()
        display.say(f"no longer following; the job goes on. To stop it: python -m jobkit cancel {run.name}")
        return EXIT_FINISHED


def _say_restarts(status: Status, told: int, display: Display) -> int:
    """Say why attempts ended that others followed, from number `told` on; returns how many there are."""
    followed = status.attempts[:-1]
    for attempt in followed[told:]:
        why = (attempt.failure and attempt.failure.error) or attempt.cause
        display.say(f"attempt {attempt.id} ended: {why}; it goes on from step {attempt.durable_step}")
    return max(told, len(followed))


def _refresh(run: RunDir, status: Status, display: Display, tail: Tail) -> None:
    if not status.attempt:
        return
    for line in tail.read(run.rank_log(status.attempt.id, 0), whole_lines=True).splitlines():
        display.say(line)
    progress = run.progress()
    if progress is not None and progress.attempt == status.attempt.id:
        display.show(progress)


def announce_end(run: RunDir, status: Status, display: Display) -> None:
    """How the run stands now, and what to type next."""
    if status.state == State.FINISHED:
        at = f" at {status.steps}" if status.total_steps else ""  # without a loop there are no steps
        display.say(f"finished{at}: {status.result if status.result is not None else ''}".rstrip(": "))
        display.say(f"run directory: {run.path}")
    elif status.state == State.FAILED:
        attempt = status.attempt
        display.say(f"failed at {status.steps}: {status.error}")
        if attempt:
            display.say(f"tracebacks: {run.logs(attempt.id)}/rank_*.err")
        display.say(_safe(status))
    else:
        why = status.attempt.failure.error if status.attempt and status.attempt.failure else None
        display.say(f"{status.state} at {status.steps}{f': {why}' if why else ''}. {_safe(status)}")


def _safe(status: Status) -> str:
    kept = (
        "There is no checkpoint yet"
        if status.checkpoint is None
        else f"The checkpoint of step {status.checkpoint} is safe"
    )
    return f"{kept}; the same command continues the run:\n  {status.how_to_continue}"


def exit_code(status: Status) -> int:
    """0 finished, 1 failed, 75 anything that the same command continues."""
    return {State.FINISHED: EXIT_FINISHED, State.FAILED: EXIT_FAILED}.get(status.state, EXIT_RESUMABLE)
