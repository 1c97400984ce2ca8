"""Following a run from outside: rank 0's output, the progress bar, and what Ctrl-C means."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator

from jobkit.display import Display
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.launch import job
from jobkit.run import status as states
from jobkit.run.files import read_json
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status

POLL_SECONDS = 0.2
ASK_SCHEDULER_SECONDS = 10.0

_OVER = (states.FINISHED, states.FAILED, states.CANCELLED)


class Tail:
    """The lines that rank 0 of each attempt has added to its output since the last call."""

    def __init__(self, run: RunDir, rank: int = 0, from_end: bool = False) -> None:
        self.run = run
        self.rank = rank
        self.positions: dict[int, int] = {}
        if from_end and (attempt := run.status().attempt):
            file = run.rank_log(attempt.id, rank)
            self.positions[attempt.id] = file.stat().st_size if file.exists() else 0

    def lines(self, attempt: int) -> list[str]:
        """Whole lines of that attempt not returned before."""
        file = self.run.rank_log(attempt, self.rank)
        try:
            with file.open("rb") as stream:
                stream.seek(self.positions.get(attempt, 0))
                text = stream.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self.positions[attempt] = self.positions.get(attempt, 0) + len(whole)
        return whole.decode(errors="replace").splitlines()


def follow_local(run: RunDir, controller: subprocess.Popen[bytes]) -> int:
    """Show a local run until its controller ends. Ctrl-C or SIGTERM: checkpoint and stop; a second one kills.

    Returns the exit code: 0 finished, 1 failed, 75 interrupted but resumable.
    """
    display, tail, stops = Display(run.name), Tail(run), 0
    with _counting_stops() as asked:
        while controller.poll() is None:
            if len(asked) > stops:
                stops = len(asked)
                controller.send_signal(signal.SIGTERM)
                display.say(
                    "stopping: writing a checkpoint ... (once more kills without one)" if stops == 1 else "killing"
                )
            _refresh(run, run.status(), display, tail)
            time.sleep(POLL_SECONDS)
    _refresh(run, run.status(), display, tail)
    display.close()
    status = job.current_status(run)
    announce_end(run, status, display)
    return exit_code(status)


def follow_slurm(run: RunDir) -> int:
    """Show a run on Slurm until it is over, through its requeues. Ctrl-C leaves it running."""
    display, tail, asked_at = Display(run.name), Tail(run), 0.0
    shown = None
    try:
        while True:
            status = run.status()
            if time.monotonic() - asked_at > ASK_SCHEDULER_SECONDS:
                asked_at, status = time.monotonic(), job.current_status(run)
            if (status.state, len(status.attempts)) != shown:
                shown = (status.state, len(status.attempts))
                display.say(f"{run.name}: {status.state} (job {status.job_id}, attempt {len(status.attempts)})")
            _refresh(run, status, display, tail)
            if status.state in _OVER or (status.state == states.INTERRUPTED and not job.is_alive(run, status)):
                display.close()
                announce_end(run, status, display)
                return exit_code(status)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        display.close()
        display.say(f"no longer following; the job goes on. To stop it: python -m jobkit cancel {run.name}")
        return EXIT_FINISHED


def _refresh(run: RunDir, status: Status, display: Display, tail: Tail) -> None:
    if not status.attempt:
        return
    for line in tail.lines(status.attempt.id):
        display.say(line)
    progress = read_json(run.progress_file)
    if isinstance(progress, dict) and progress.get("attempt") == status.attempt.id:
        display.show(progress)


def announce_end(run: RunDir, status: Status, display: Display) -> None:
    """How the run stands now, and what to type next."""
    steps = f"step {status.step}" + (f"/{status.total_steps}" if status.total_steps else "")
    if status.state == states.FINISHED:
        display.say(f"finished at {steps}: {status.result if status.result is not None else ''}".rstrip(": "))
        display.say(f"run directory: {run.path}")
    elif status.state == states.FAILED:
        attempt = status.attempt
        display.say(f"failed at {steps}: {status.error}")
        if attempt:
            display.say(f"traceback: {run.rank_log(attempt.id, 0, 'err')} and its neighbours")
        display.say(_safe(status))
    else:
        display.say(f"{status.state} at {steps}. {_safe(status)}")


def _safe(status: Status) -> str:
    kept = (
        "There is no checkpoint yet"
        if status.checkpoint is None
        else f"The checkpoint of step {status.checkpoint} is safe"
    )
    return f"{kept}; the same command continues the run:\n  {status.how_to_continue}"


def exit_code(status: Status) -> int:
    """0 finished, 1 failed, 75 anything that the same command continues."""
    return {states.FINISHED: EXIT_FINISHED, states.FAILED: EXIT_FAILED}.get(status.state, EXIT_RESUMABLE)


@contextlib.contextmanager
def _counting_stops() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying from them."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda received, _: asked.append(received)) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
