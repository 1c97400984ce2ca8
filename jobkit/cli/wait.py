"""jobkit wait RUN ...: return when the runs are over, with the exit code of the worst."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence

from jobkit.cli.arguments import add_selection, chosen_runs, time_length
from jobkit.cli.several import worst
from jobkit.errors import EXIT_FAILED, SchedulerError
from jobkit.run import notify, user_command
from jobkit.run.command_line import to_type
from jobkit.run.duration import format_seconds
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.run.usage import show_examples
from jobkit.submission.ending import exit_code
from jobkit.submission.observer import ASK_SECONDS, is_active, observe_all

EXIT_TIMED_OUT = 124
"""As of timeout(1): some runs went on."""

LOOK_SECONDS = 0.5
"""How often the files of the runs are read; Slurm is asked every ASK_SECONDS, once for all of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument("--any", action="store_true", help="return when the first of them is over")
    parser.add_argument(
        "--timeout", type=time_length, metavar="2h", help=f"wait no longer; then the exit code is {EXIT_TIMED_OUT}"
    )
    parser.add_argument("--json", action="store_true", help="for programs: an object a line, as each run ends")
    parser.add_argument(
        "--notify", metavar="COMMAND", help="run this as each run ends; JOBKIT_TEXT in its environment says how"
    )
    show_examples(
        parser,
        "latest  until the newest run is over",
        "'toy*' --timeout 2h --notify 'echo $JOBKIT_TEXT'  several, and a command as each ends",
        text="Exit code: of the worst run: 1 failed, 75 stopped otherwise (it can be continued), 0 finished; "
        f"{EXIT_TIMED_OUT} when the time was over.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Wait, and print a line for each run as it ends. Ctrl-C ends the waiting alone."""
    until = None if arguments.timeout is None else time.monotonic() + arguments.timeout
    found, codes, threads = chosen_runs(arguments), [], []
    for run, status in ended(found, until):
        if run is None:
            break
        codes.append(_code(run, status))
        print(json.dumps(_plain(run, status)) if arguments.json else _line(run, status), flush=True)
        if arguments.notify:
            event = notify.end_of(status) or str(status.state)
            variables = notify.variables(run.name, run.path, event, status)
            threads.append(user_command.start(arguments.notify, variables, None, "."))
        if arguments.any:
            break
    for thread in threads:
        thread.join()
    left = len(found) - len(codes)
    if left and not (arguments.any and codes):
        print(f"{left} of {len(found)} run(s) went on after {format_seconds(arguments.timeout)}", file=sys.stderr)
        return EXIT_TIMED_OUT
    return worst(codes)


def ended(runs: Sequence[RunDir], until: float | None) -> Iterator[tuple[RunDir | None, Status]]:
    """Each run and its status as soon as nothing more will happen to it by itself; no run when the time is over.

    `until` is by the monotonic clock.
    """
    left, ask_at, told = list(runs), 0.0, ""
    while left:
        looked = [(run, run.status()) for run in left]
        over = {run.path: status for run, status in looked if status.state in _FINAL}
        others = [(run, status) for run, status in looked if run.path not in over]
        on_slurm = [pair for pair in others if pair[1].scheduler == "slurm"]
        asked = [pair for pair in others if pair not in on_slurm]
        if time.monotonic() >= ask_at:
            asked, ask_at = others, time.monotonic() + ASK_SECONDS
        try:
            observed = zip(asked, observe_all(asked), strict=True)
            over |= {run.path: status for (run, _), status in observed if not is_active(run, status)}
        except SchedulerError as error:
            if str(error) != told:
                print(f"{error}; still waiting", file=sys.stderr)
            told = str(error)
        for run in [run for run in left if run.path in over]:
            left.remove(run)
            yield run, over[run.path]
        if until is not None and time.monotonic() >= until:
            yield None, Status()
            return
        if left:
            time.sleep(LOOK_SECONDS)


_FINAL = (State.FINISHED, State.FAILED, State.CANCELLED)


def _code(run: RunDir, status: Status) -> int:
    return exit_code(status.state) if run.exists() else EXIT_FAILED


def _line(run: RunDir, status: Status) -> str:
    if not run.exists():
        return f"{run.name}: its run directory is gone"
    what = f"probably {status.probably}" if status.probably else str(status.state)
    why = f": {status.error.splitlines()[0]}" if status.error else ""
    hint = "" if status.state == State.FINISHED else f"; {to_type('status', run.name)}"
    return f"{run.name}: {what}{status.at_steps}{why}{hint}"


def _plain(run: RunDir, status: Status) -> dict[str, object]:
    return {
        "run": run.name,
        "path": str(run.path),
        "state": status.state,
        "exit_code": _code(run, status),
        "step": status.step,
        "result": status.result,
        "error": status.error,
    }
