"""jobkit rewind RUN --step N: go back within a run, keeping what came after as a branch."""

from __future__ import annotations

import argparse
from pathlib import Path

from jobkit.cli.arguments import add_run, chosen_run
from jobkit.errors import EXIT_FINISHED, InputError
from jobkit.run.command_line import to_type
from jobkit.run.usage import show_examples
from jobkit.submission.rewind import rewind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the checkpoint to continue from")
    parser.add_argument(
        "--skip-samples",
        metavar="IDS",
        help="ids that the loader leaves out from there on, as 3,17,40, or @FILE that has them",
    )
    show_examples(
        parser,
        "toy --step 200 --skip-samples 417,88  back to step 200, and leave two samples out",
    )


def run(arguments: argparse.Namespace) -> int:
    """Go back, and say how the run continues."""
    skipped = None if arguments.skip_samples is None else _ids(arguments.skip_samples)
    found = chosen_run(arguments)
    done = rewind(found, arguments.step, skipped)
    print(f"{found.name}: back at step {arguments.step}; what came after it is kept in {done.branch}")
    if skipped is not None:
        print(f"{len(skipped)} sample(s) are left out from there on")
    print(f"to continue it: {to_type('resume', found.name)}")
    return EXIT_FINISHED


def _ids(text: str) -> list[int]:
    """The sample ids of the option, each once; InputError for what is none."""
    given = text
    if text.startswith("@"):
        try:
            given = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--skip-samples {text}: {getattr(error, 'strerror', None) or error}") from None
    words = given.replace(",", " ").split()
    if wrong := next((word for word in words if not word.isdecimal()), None):
        raise InputError(f"--skip-samples {text[:40]}: found {wrong!r}, expected ids as in 3,17,40, or @FILE")
    return sorted(set(map(int, words)))
