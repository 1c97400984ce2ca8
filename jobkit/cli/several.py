"""A verb on several runs: one after another, where what is wrong with one does not keep it from the rest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence

from jobkit.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, JobkitError
from jobkit.run.disk_errors import as_told
from jobkit.run.rundir import RunDir

_SEVERITY = (EXIT_FINISHED, EXIT_RESUMABLE, EXIT_FAILED, EXIT_BAD_INPUT)


def worst(codes: Iterable[int]) -> int:
    """The exit code of several: bad input before a failure before what can be continued before success."""
    return max(codes, key=lambda code: _SEVERITY.index(code) if code in _SEVERITY else 0, default=EXIT_FINISHED)


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json` of a verb that acts."""
    parser.add_argument(
        "--json", action="store_true", help="for programs: an object a line for each run, as it is then"
    )


def print_json(run: RunDir, **more: object) -> None:
    """How a run is after a verb has acted on it, in one line."""
    status = run.status()
    known = {"state": status.state, "step": status.step, "checkpoint": status.checkpoint}
    print(json.dumps({"run": run.name, "path": str(run.path), **known, **more}), flush=True)


def each(runs: Sequence[RunDir], act: Callable[[RunDir], int]) -> int:
    """The worst exit code of an action on each run; of a single one its error is raised, else printed."""
    if len(runs) == 1:
        return act(runs[0])
    codes = []
    for run in runs:
        try:
            codes.append(act(run))
        except (JobkitError, OSError) as error:
            told = as_told(error)
            print(f"error: {told}", file=sys.stderr)
            codes.append(told.exit_code)
    return worst(codes)
