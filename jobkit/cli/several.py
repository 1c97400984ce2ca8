"""A verb on several runs: one after another, where what is wrong with one does not keep it from the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from jobkit.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, JobkitError
from jobkit.run.disk_errors import as_told
from jobkit.run.rundir import RunDir

_SEVERITY = (EXIT_FINISHED, EXIT_RESUMABLE, EXIT_FAILED, EXIT_BAD_INPUT)


def worst(codes: Iterable[int]) -> int:
    """The exit code of several: bad input before a failure before what can be continued before success."""
    return max(codes, key=lambda code: _SEVERITY.index(code) if code in _SEVERITY else 0, default=EXIT_FINISHED)


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
