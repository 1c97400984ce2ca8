"""jobkit report RUN...: one HTML file with results, curves, images, attempts, failures and config of runs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from jobkit.cli.arguments import add_runs, chosen
from jobkit.errors import EXIT_FINISHED, InputError
from jobkit.run.files import write_atomic
from jobkit.run.view import views
from jobkit.usage import show_examples

FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    where = f"default: {FILE} in the run's directory, or in the runs directory for several"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    show_examples(parser, {"toy": "the page of a run", "'toy*' -o toys.html": "runs side by side, a chart a tag"})


def run(arguments: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    from jobkit.report.page import page  # Jinja and TensorBoard's records, which --help needs not

    runs = chosen(arguments)
    file = arguments.output or (runs[0].path if len(runs) == 1 else runs[0].path.parent) / FILE
    file = (file / FILE if file.is_dir() else file).absolute()
    if not file.parent.is_dir():
        raise InputError(key="-o", found=str(file), allowed="a file in a folder that exists")
    write_atomic(file, page(views(runs), time.time()).encode(errors="backslashreplace"), durable=False)
    print(file)
    if arguments.open:
        import webbrowser

        webbrowser.open(file.as_uri())
    return EXIT_FINISHED
