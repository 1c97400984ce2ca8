"""What the tools share that turn a data set into files in parallel: the processes, what is broken, the exit codes.

A file appears whole or not at all, so the same command continues: what is there already is not made again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jobkit.run.files import write_atomic

SHOWN = 20
"""Broken files named on the screen; all of them are in the report."""
EXIT_CODES = (
    "Exit codes: 0 done, what cannot be read left out; 1 failed midway; 2 wrong input, nothing was done; "
    "130 interrupted."
)

Item = TypeVar("Item")
Result = TypeVar("Result")


class Failure(Exception):
    """What ends a tool with one line and an exit code: 2 for input that is wrong, 1 for what failed midway."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Done:
    """What became of some files: how many were made, how many were there, and which cannot be read, and why."""

    made: int = 0
    kept: int = 0
    broken: list[tuple[Path, str]] = field(default_factory=list)

    def __add__(self, other: Done) -> Done:
        return Done(self.made + other.made, self.kept + other.kept, self.broken + other.broken)

    def __len__(self) -> int:
        return self.made + self.kept + len(self.broken)


def reason(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def in_processes(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    initialize: Callable[..., None] | None = None,
    *arguments: object,
) -> Generator[Result, None, None]:
    """function(item) of each item, in their order, from `workers` processes that call initialize(*arguments) first.

    Where this is left early, by Ctrl-C or an error, the processes end at once.
    """
    context = multiprocessing.get_context("spawn")
    before = multiprocessing.active_children()
    pool = ProcessPoolExecutor(workers, context, partial(_begin, initialize), arguments)
    try:
        # Ctrl-C reaches every process of the terminal. The workers inherit the block, so it is this one's to act upon.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        results = pool.map(partial(_call, function), items)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield from results
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in before:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_ending = threading.Event()
"""In a worker: it has been told to end, and takes up nothing more of what waits for it."""


def _begin(initialize: Callable[..., None] | None, *arguments: object) -> None:
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initialize is not None:
        initialize(*arguments)


def _end(*_: object) -> None:
    _ending.set()
    raise SystemExit  # so that a file that is being written is taken away again


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # it was killed, and would be waited for, with the memory of a GPU


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    try:
        if _ending.is_set():
            raise SystemExit
        return function(item)
    except SystemExit:
        if _ending.is_set():  # all is tidied up; the pool would take this for a result, and the worker for one to wait
            os._exit(1)
        raise


def progress(results: Generator[Done, None, None], what: str, total: int, console: Console) -> Done:
    """The sum of all results, under a progress bar."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    together = Done()
    with closing(results), Progress(*columns, console=console) as shown:
        bar = shown.add_task(what, total=total)
        for done in results:
            together += done
            shown.advance(bar, len(done))
    return together


def check_writable(folder: Path) -> None:
    """Make a folder; Failure where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable.{os.getpid()}"
        write_atomic(probe, b"", durable=False)
        with suppress(FileNotFoundError):  # another one's, of the same number on another machine
            probe.unlink()
    except OSError as error:
        raise Failure(f"{error.filename or folder}: cannot be written: {error.strerror}") from None


def weights_in(folder: Path, *others: str) -> list[Path]:
    """The files of a model's weights, and those of other suffixes."""
    return sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", *others))


def _interrupt(*_: object) -> None:
    """Take Ctrl-C once: another one, while what is under way is ended, would leave some of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def as_lines(texts: Iterable[object]) -> bytes:
    """UTF-8, a line each; the bytes of a file's name stay, whatever they are."""
    return "".join(f"{text}\n" for text in texts).encode(errors="surrogateescape")


def main(tool: str, prepare: Callable[[Console], tuple[Done, Path, Path]]) -> int:
    """Exit code of a program that does `prepare`: what was done, the folder that it is in, and where to list what is
    broken; KeyboardInterrupt, Failure and OSError end it with a line."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if sys.stdout is not None:  # as of a cron job that closes it
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a path may be no text

    def fail(code: int, message: str) -> int:
        print(f"{tool}: {message}", file=sys.stderr)
        return code

    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
        done, folder, report = prepare(console)
        lines = [f"{path}: {why}" for path, why in done.broken]
        if lines:
            write_atomic(report, as_lines(lines), durable=False)
        else:
            report.unlink(missing_ok=True)  # of an earlier run
    except KeyboardInterrupt:
        return fail(130, "interrupted; the same command continues")
    except Failure as error:
        return fail(error.code, str(error))
    except BrokenProcessPool:
        return fail(1, "a worker was killed, perhaps for memory; the same command with fewer --workers continues")
    except OSError as error:
        return fail(1, f"{error.filename or tool}: {error.strerror or error}; the same command continues")

    for line in lines[:SHOWN]:
        print(f"broken: {line}", file=sys.stderr)
    print(f"{folder}: {done.made:,} made, {done.kept:,} already there, {len(lines):,} broken", end="")
    print(f" (all listed in {report})" if lines else "")
    return 0
