"""jobkit resume RUN ...: continue runs as they were last submitted, from any folder."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

from jobkit import submit
from jobkit.cli.arguments import absent, add_runs, confirmed, for_each, worst
from jobkit.errors import InputError
from jobkit.run.rundir import RunDir
from jobkit.usage import show_examples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, asks=True)
    submit.add_follow_options(parser)
    show_examples(parser, {"toy": "the run of this name", "'digits*' -y --detach": "several, in the background"})


def run(arguments: argparse.Namespace) -> int:
    """Submit each run's own config again, with its own code. Several runs here go into the background."""
    runs = confirmed(arguments)
    options = submit.follow_options(arguments)
    if len(runs) > 1:
        if options.follow:
            raise InputError("it shows one run", key="--follow", found=f"{len(runs)} runs", hint="see `logs -f`")
        options = dataclasses.replace(options, detach=True)
    folder = Path.cwd()

    def one_run(run: RunDir) -> int:
        try:
            return submit.resume(run, options)
        finally:
            os.chdir(folder)  # the submission goes to the run's own

    return worst([for_each(runs, one_run), *absent(arguments)])
