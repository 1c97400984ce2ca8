"""jobkit report RUN...: one HTML page about runs, which needs nothing else to be opened."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jobkit.cli.arguments import add_selection, chosen_runs, runs_dir
from jobkit.errors import EXIT_FINISHED, InputError, SchedulerError
from jobkit.run.files import write_atomic
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.run.usage import show_examples
from jobkit.submission.observer import observe_all

FILE = "report.html"
"""What the page is called, in the run's directory, or in the runs directory for several."""


MOST_RUNS = 60
"""A page of more would take a browser seconds to draw, and nobody could tell the curves apart."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"(default: {FILE} in the run's directory, or beside them)"
    )
    parser.add_argument("--open", action="store_true", help="show it in the web browser of this machine")
    show_examples(
        parser,
        "digits-11f5f19c --open  one run",
        "digits/s1 -o lr.html  the runs of a sweep, side by side",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print where it is."""
    found = chosen_runs(arguments)
    if not found:
        return EXIT_FINISHED
    if len(found) > MOST_RUNS:
        raise InputError(f"{len(found)} runs are meant, and a page has room for {MOST_RUNS}: choose fewer by --where")
    file = arguments.output or ((found[0].path if len(found) == 1 else runs_dir(arguments)) / FILE)
    if file.is_dir():
        raise InputError(f"-o {file}: that is a folder; give a file, as in -o {file / FILE}")
    from jobkit.report.page import collect, page  # here: jinja2 and protobuf take longer than other verbs do in all

    html = page([collect(run, status) for run, status in _now(found)])
    try:
        if file.exists() and not file.is_file():  # /dev/stdout: to be written to, not replaced
            file.write_text(html, encoding="utf-8")
            return EXIT_FINISHED
        write_atomic(file, html, durable=False)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}; give another file with -o") from None
    print(file.absolute())
    if arguments.open:
        _show(file.absolute())
    return EXIT_FINISHED


def _now(runs: Sequence[RunDir]) -> list[tuple[RunDir, Status]]:
    """Runs as they are now, by one question to Slurm; as their files say where it does not answer."""
    recorded = []
    for run in runs:
        try:
            recorded.append((run, run.status()))
        except OSError as error:
            if len(runs) == 1:
                raise
            print(f"{run.name} is left out: {error.filename}: {error.strerror}", file=sys.stderr)
    try:
        return list(zip([run for run, _ in recorded], observe_all(recorded), strict=True))
    except SchedulerError as error:
        print(f"{error}; the page shows what the run directories say", file=sys.stderr)
        return recorded


def _show(file: Path) -> None:
    import webbrowser

    if not webbrowser.open(file.as_uri()):
        print("this machine has no web browser; copy the file to one that has: it needs nothing else", file=sys.stderr)
