"""jobkit rm RUN ...: remove runs, or their checkpoints."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from jobkit.cli.arguments import add_selection, chosen_runs, confirm, found_runs, is_filtered, runs_dir, time_length
from jobkit.cli.columns import age_text
from jobkit.cli.several import each
from jobkit.errors import EXIT_FINISHED
from jobkit.run import choose, shared_code
from jobkit.run.rundir import RunDir
from jobkit.run.usage import show_examples
from jobkit.submission import removal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser, asks=True)
    parser.add_argument(
        "--checkpoints-only",
        action="store_true",
        help="keep the journal, the logs, the curves and final/; the run can only be started from its beginning then",
    )
    parser.add_argument(
        "--older", type=time_length, metavar="30d", help="only runs of which nothing was heard for so long"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be removed, and how large it is")
    show_examples(
        parser,
        "'toy*' --state failed --dry-run  what would be removed",
        "digits/s1 --checkpoints-only  keep all but the checkpoints of a sweep's runs",
        "--older 30d  what nobody has touched",
    )


def run(arguments: argparse.Namespace) -> int:
    """Remove them, unless one of them lives: then none."""
    found = _chosen(arguments)
    removal.refuse_live(found)
    if not arguments.checkpoints_only:
        for line in removal.refuse_needed(found):
            print(line, file=sys.stderr)
    if arguments.dry_run:
        return _dry_run(found, arguments.checkpoints_only)
    is_short = any(choose.is_short(word, runs_dir(arguments)) for word in arguments.run_names)
    confirm(found, arguments, also_one=is_short)
    for folder in {one.path.parent for one in found}:
        removal.clear_aside(folder)
    if arguments.checkpoints_only:
        return each(found, _remove_checkpoints)
    versions: dict[Path, set[str]] = {}
    code = each(found, lambda one: _remove(one, versions))
    for folder, of_runs in versions.items():
        shared_code.remove_unused(folder, of_runs)
    return code


def _chosen(arguments: argparse.Namespace) -> list[RunDir]:
    """The runs that are meant: `--older` alone means all that are; where none is named, only this user's own."""
    is_all = arguments.older is not None and not (arguments.run_names or is_filtered(arguments))
    found = [one.open() for one in found_runs(arguments)] if is_all else chosen_runs(arguments)
    if not arguments.run_names:  # in a folder that several users have
        own = [one for one in found if removal.other_owner(one) is None]
        if others := len(found) - len(own):
            print(f"{others} run(s) of other users are left", file=sys.stderr)
        found = own
    return found if arguments.older is None else _older(found, arguments.older)


def _older(runs: list[RunDir], seconds: float) -> list[RunDir]:
    """Those of which nothing was journalled for so long."""
    left = [one for one in runs if _age(one) >= seconds]
    if runs and not left:
        print(f"none of {len(runs)} run(s) is older than {age_text(seconds)}: nothing to do", file=sys.stderr)
    return left


def _age(run: RunDir) -> float:
    try:
        return time.time() - run.journal.path.stat().st_mtime
    except OSError:
        return 0.0


def _dry_run(runs: list[RunDir], checkpoints_only: bool) -> int:
    total = 0
    for one in runs:
        found = _size(one, checkpoints_only)
        total += found
        print(f"{one.name}  {bytes_text(found)}  ({one.status().state}, {age_text(_age(one))} old)")
    what = "the checkpoints of " if checkpoints_only else ""
    print(f"{what}{len(runs)} run(s), {bytes_text(total)}; nothing was removed")
    return EXIT_FINISHED


def _remove(run: RunDir, versions: dict[Path, set[str]]) -> int:
    """Remove a run, and add to `versions` which shared snapshots of code it had."""
    found = _size(run, checkpoints_only=False)
    versions.setdefault(run.path.parent, set()).update(removal.remove(run))
    print(f"{run.name} removed, {bytes_text(found)}", flush=True)
    return EXIT_FINISHED


def _remove_checkpoints(run: RunDir) -> int:
    found = _size(run, checkpoints_only=True)
    removal.remove_checkpoints(run)
    print(f"{run.name}: checkpoints removed, {bytes_text(found)}", flush=True)
    return EXIT_FINISHED


def _size(run: RunDir, checkpoints_only: bool) -> int:
    return sum(removal.size(path) for path in removal.part_of(run, checkpoints_only=checkpoints_only))


def bytes_text(size: int) -> str:
    """`512 B`, `30.1 MB`: as disks are counted, in powers of 1000."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
