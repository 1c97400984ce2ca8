"""How a rank ended: one recorder for all ways to run, which writes the rank's RankReport as its last act.

    program() --result or exception--> end_of() --> ends/<attempt>/<rank>.json + exit code --> supervisor
                Stopped, of the loop                                             75

A rank that is killed leaves no RankReport, nor does a program that took the rank's place (`command:`): there the exit
code of the process says it. task.py, script.py and __main__.py record by it.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from jobkit.disk import is_full, write_probe
from jobkit.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_RESUMABLE,
    CheckpointError,
    InputError,
    JobkitError,
    LostLease,
    NoRoom,
    Stopped,
    UsageError,
)
from jobkit.log import log
from jobkit.loop.rank import Rank
from jobkit.run import records
from jobkit.run.files import as_plain, is_there
from jobkit.run.records import RankReport
from jobkit.weather import chain_of, nature_of, place_of
from jobkit.wire.pages import Phase

MAX_TRACEBACK = 8000
"""Characters that are kept: the journal and status.json hold them, and are read again and again."""


def run_recorded(rank: Rank, program: Callable[[], Any]) -> int:
    """Run a rank's program, write its RankReport, print its error, and return its exit code."""
    return recorded(rank, program)[0]


def recorded(rank: Rank, program: Callable[[], Any]) -> tuple[int, RankReport | None]:
    """The same, and the RankReport; None where another attempt has taken the run over."""
    result: Any = None
    error: BaseException | None = None
    try:
        result = program()
    except LostLease as lost:
        log.warning("%s", lost)
        return EXIT_RESUMABLE, None
    except BaseException as raised:
        error = explained(rank, raised)
    end = end_of(rank, error, result)
    record(rank, end)
    if end.kind == "failed" and error is not None:
        _print(error)
    if end.kind == "stopped" or end.disk:  # the RankReport may not have fit on the disk: the exit code says it too
        return EXIT_RESUMABLE, end
    code = error.code if isinstance(error, SystemExit) else EXIT_FAILED
    return EXIT_FINISHED if end.kind == "finished" else code if isinstance(code, int) else EXIT_FAILED, end


def explained(rank: Rank, error: BaseException) -> BaseException:
    """Return an error, or a user's mistake that is known by it and by where the loop is."""
    if isinstance(error, StopIteration) and rank.page.read().phase is Phase.ENDING:
        return UsageError(
            "the epochs of ctx.epochs are over, and next() asked for another batch: give ctx.epochs as many epochs as "
            "the steps need, or take ctx.loader, which has no end, and ctx.boundary: docs/adopting.md"
        )
    return error


def record(rank: Rank, end: RankReport) -> None:
    """Write a rank's RankReport; a full disk is no reason to end in another way.

    The rank's page says it too: a disk may show the file late to other nodes. A process that the rank has forked, and
    that an exception takes out of the training function, writes nothing.
    """
    if not rank.is_here:
        return
    if rank.page.read().phase in (Phase.STEPPING, Phase.OUTSIDE):
        rank.beat(rank.page.read().step, Phase.ENDING)
    try:
        rank.run.ends_folder(rank.attempt).mkdir(parents=True, exist_ok=True)
        records.write(rank.run.end_file(rank.attempt, rank.rank), end)
    except OSError as problem:
        log.warning("the end of this rank could not be written down: %s", problem)


def end_of(rank: Rank, error: BaseException | None, result: Any) -> RankReport:
    """The RankReport of a rank whose program returned `result`, or raised `error`."""
    beat = rank.page.read()
    facts: dict[str, Any] = {
        "rank": rank.rank,
        "attempt": rank.attempt,
        "time": time.time(),
        "step": beat.step if beat.step >= 0 else None,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "node": os.environ.get("SLURMD_NODENAME"),
        "seen": _seen(rank),
    }
    # A stop may have been swallowed, by a `finally: return` or an `except BaseException`: it is a stop nevertheless.
    causes = list(chain_of(error, hidden=True))
    if (error is None and beat.phase is Phase.SAVING) or any(isinstance(item, Stopped) for item in causes):
        return RankReport(kind="stopped", **facts)
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == EXIT_RESUMABLE):
        return RankReport(kind="stopped", **facts)
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        is_shown = rank.rank == 0 and isinstance(result, dict)
        return RankReport(kind="finished", result=as_plain(result) if is_shown else None, **facts)
    return RankReport(
        kind="failed",
        error=_in_a_line(error),
        traceback=None if _is_said(error) else "".join(traceback.format_exception(error))[-MAX_TRACEBACK:],
        final=isinstance(error, (UsageError, InputError, CheckpointError)) or getattr(error, "final", False),
        nature=nature_of(error),
        signature=place_of(error),
        out_of_memory=out_of_memory(error),
        samples=getattr(error, "samples", None),
        # A cache in a full home is an error as any: the run directory may have room.
        disk=any(isinstance(item, NoRoom) for item in causes)
        or (is_full(error) and is_full(write_probe(rank.run.path))),
        **facts,
    )


def _in_a_line(error: BaseException) -> str:
    """Return the type and the words of an error. Of a bug that holds a traceback, as a worker's, the last line; of any
    other its first: the traceback has all of them."""
    words = str(error).strip()
    if "Traceback (most recent call last):" in words:
        return words.splitlines()[-1]
    where = place_of(error).partition(" at ")[2] if isinstance(error, UsageError) else ""  # it has no traceback
    said = f"{words} ({where})" if where else words if _is_said(error) else words.partition(chr(10))[0]
    return f"{type(error).__name__}: {said}".rstrip(": ")


def out_of_memory(error: BaseException) -> str | None:
    """`host` or `GPU`, whichever was too small; None if memory is not the error. torch is not imported for it."""
    for kind in type(error).__mro__:
        if kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch"):
            return "GPU"
    # torch's allocator on the CPU raises a plain RuntimeError.
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error):
        return "host"
    return None


def _seen(rank: Rank) -> list[int]:
    """The ranks whose RankReport lies there already: the error of this rank may only be a consequence of theirs."""
    folder = rank.run.ends_folder(rank.attempt)
    names = [file.stem for file in folder.glob("*.json")] if is_there(folder) else []
    return sorted(int(name) for name in names if name.isdigit())


def _is_said(error: BaseException) -> bool:
    """Return whether the error's own words are all that a user needs."""
    return isinstance(error, (JobkitError, SystemExit))


def _print(error: BaseException) -> None:
    """Show an error in the rank's log: a user's mistake in a line, a bug with its traceback."""
    if _is_said(error):
        print(f"error: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
