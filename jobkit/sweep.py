"""python -m jobkit.submit EXP.yaml --sweep params.lr=.003,.01: the runs of a sweep, and what a person is told of it."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import EXIT_FINISHED, InputError, JobkitError
from jobkit.run.command_line import to_type
from jobkit.run.usage import AXIS_FORMS

if TYPE_CHECKING:
    from jobkit.run import grid
    from jobkit.run.experiment import Experiment
    from jobkit.run.rundir import RunDir
    from jobkit.submission.start_from import Start
    from jobkit.submission.sweep import Point, SweepOutcome

FREE_SECTIONS = ("resources", "clusters", "checkpoint", "retry", "watchdog", "inputs", "check", "device", "backend")
"""Keys that do not tell one sweep from another: a run moves between machines."""

SHOWN_PROGRESS = 50
"""From how many runs on a bar shows how many are prepared: fewer take a moment."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a sweep."""
    group = parser.add_argument_group("sweeps")
    group.add_argument(
        "--sweep", nargs="+", action="extend", metavar="key=v1,v2", help=f"a run for each combination: key={AXIS_FORMS}"
    )
    group.add_argument("--sweep-file", type=Path, metavar="FILE", help="a CSV: a line of keys, then a line a run")
    group.add_argument("--no-sweep", action="store_true", help="one run, though the YAML has `sweep:`")
    group.add_argument("--max-running", type=int, metavar="N", help="how many of the runs may train at once")
    group.add_argument("--first", action="store_true", help="the first run has to be finished before the others start")
    group.add_argument("--prune", action="store_true", help="cancel the runs that the sweep no longer wants")


def points_of(arguments: argparse.Namespace, experiment: Experiment) -> list[grid.Point] | None:
    """The points that a command line and a YAML ask for; None where they ask for one run. Raises InputError."""
    from jobkit.run import grid  # not above: `--help` needs nothing of it

    parts = []
    if arguments.sweep:
        parts.append(grid.grid_of_words(arguments.sweep))
    if arguments.sweep_file:
        parts.append(grid.points_of_table(arguments.sweep_file))
    if parts and arguments.no_sweep:
        raise InputError("--no-sweep: --sweep or --sweep-file is there, too; give one of them")
    if not parts and experiment.sweep is not None and not arguments.no_sweep:
        with experiment.places.locating_errors():
            parts.append(grid.grid_of_yaml(experiment.sweep, experiment.places.of))
    if not parts:
        _refuse_options_of_sweeps(arguments)
        return None
    if arguments.max_running is not None and arguments.max_running < 1:
        raise InputError(f"--max-running: found {arguments.max_running}, expected 1 or more")
    for option in ("fresh", "follow", "check_model"):
        if getattr(arguments, option):
            raise InputError(f"--{option.replace('_', '-')} is for one run, and this is a sweep (--no-sweep: one run)")
    _refuse_values_given_twice(arguments.overrides, parts)
    return [tuple(itertools.chain(*combination)) for combination in itertools.product(*parts)]


def _refuse_values_given_twice(overrides: Sequence[str], parts: Sequence[Sequence[grid.Point]]) -> None:
    """Refuse a key that has values in two places: one of them would have no effect."""
    seen = {_key_of(text): text for text in overrides}
    for points in parts:
        keys = {_key_of(given.text) for point in points for given in point}
        if twice := sorted(keys & set(seen)):
            found = seen[twice[0]]
            raise InputError(
                f"{found}: the sweep has values of its own for {twice[0]}; leave one out (--no-sweep: one run)"
            )
        seen |= {key: key for key in keys}


def _key_of(text: str) -> str:
    return text.partition("=")[0].lstrip("+")


def _refuse_options_of_sweeps(arguments: argparse.Namespace) -> None:
    options = {"--max-running": arguments.max_running, "--first": arguments.first, "--prune": arguments.prune}
    for option, value in options.items():
        if value is not None and value is not False:
            raise InputError(f"{option} is for a sweep: --sweep, --sweep-file, or `sweep:` in the YAML")


def run(
    arguments: argparse.Namespace,
    experiment: Experiment,
    points: Sequence[grid.Point],
    cluster: str,
    runs_dir: Path,
    continuing: Callable[..., str],
    begin: Callable[[grid.Point], Start],
) -> int:
    """Submit a sweep and say what that did; returns the exit code.

    `continuing` makes the command that continues what some words, after the YAML's path, stand for; `begin` gives the
    config of a point.
    """
    from jobkit.run import sweeps
    from jobkit.run.given import given_values
    from jobkit.submission import sweep as submission
    from jobkit.submission.plan import Turn
    from jobkit.submission.signals import signals_of_a_submission
    from jobkit.worker.startup.jobkit_snapshot import leave

    leave(os.environ)  # of the run in which this may be typed: what is started here has a snapshot of its own
    no_sweep = ["--no-sweep"] if experiment.sweep is not None else []
    wanted = []
    for point in points:
        begun, words = begin(point), [given.text for given in point]
        own = given_values(begun.loaded.config, [*arguments.overrides, *words], begun.inherited)
        command = continuing([*words, *no_sweep], before=begun.inherited)
        wanted.append(submission.Point(begun.loaded, command, own))
    turn = Turn(queues=arguments.queue, priority=arguments.priority)
    planned = submission.plan_sweep(wanted, cluster, runs_dir, turn)
    source = Path.cwd()
    needed = submission.check_sweep(planned, source)
    name = next(iter(planned.values()))[0].loaded.config.name
    if arguments.dry_run:
        return _dry_run(planned, points)
    if arguments.first:
        planned = submission.first_before_the_rest(planned)
    with signals_of_a_submission() as asked:
        with _progress() as on_prepared:
            outcome = submission.submit_sweep(
                planned,
                needed,
                key=_key(arguments, experiment),
                name=name,
                command=continuing(_words(arguments)),
                source=source,
                runs_dir=runs_dir,
                max_running=arguments.max_running,
                notify=arguments.notify,
                on_prepared=on_prepared,
            )
        _report(outcome, arguments)
        if outcome.runner is None or arguments.detach or arguments.json:
            return EXIT_FINISHED
        from jobkit.submission.follow_several import follow_sweep

        return follow_sweep(sweeps.at(runs_dir / sweeps.FOLDER / outcome.sweep), outcome.runs, asked)


def _key(arguments: argparse.Namespace, experiment: Experiment) -> str:
    """What tells this sweep from others of its name: which file has its points, or which axes were typed."""
    from jobkit.run import sweeps

    axes = sorted(word.partition("=")[0] for word in arguments.sweep or ())
    table = [str(arguments.sweep_file.absolute())] if arguments.sweep_file else []
    fixed = sorted(text for text in arguments.overrides if not text.lstrip("+").startswith(FREE_SECTIONS))
    return sweeps.key_of(str(experiment.places.path.absolute()), *axes, "table", *table, "fixed", *fixed)


def _words(arguments: argparse.Namespace) -> list[str]:
    """The options by which the sweep is submitted again."""
    words = ["--sweep", *arguments.sweep] if arguments.sweep else []
    words += ["--sweep-file", str(arguments.sweep_file)] if arguments.sweep_file else []
    return words + (["--max-running", str(arguments.max_running)] if arguments.max_running else [])


def _report(outcome: SweepOutcome, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(outcome.as_dict()), flush=True)
    else:
        print("\n".join(_lines(outcome, arguments.max_running)), flush=True)
    if outcome.with_other_code:
        _tell_other_code(outcome)
    if outcome.former:
        _tell_former(outcome.former, outcome, prune=arguments.prune)
    if not arguments.json:
        print(f"{to_type('list', outcome.sweep)}   shows them", file=sys.stderr)


def _lines(outcome: SweepOutcome, max_running: int | None) -> Iterator[str]:
    """What became of the runs, and where those are that were started."""
    counts = ", ".join(f"{count} {word}" for word, count in outcome.counts.items())
    shared = ", one code snapshot" if outcome.jobs else ""
    yield f"sweep {outcome.sweep}: {len(outcome.runs)} runs ({counts}){shared}"
    if outcome.jobs:
        started = sum(outcome.counts.get(word, 0) for word in ("new", "continued"))
        limit = f", at most {max_running} at once" if max_running else ""
        after = f", after job {', '.join(outcome.jobs_before)}" if outcome.jobs_before else ""
        what = f"job {', '.join(outcome.jobs)}: {started} task(s)"
        if not outcome.is_on_slurm:
            what = f"process {outcome.jobs[0]} starts {started} run(s) in turn"
        yield f"{what}{limit}{after}"
    if outcome.limited:
        yield f"job {', '.join(outcome.limited)}: at most {outcome.limit} at once from now on; what trains goes on"


def _tell_other_code(outcome: SweepOutcome) -> None:
    """Say which runs do not have the code as it is now."""
    from jobkit.run.status import State

    kept = ", ".join(f"{count} {state}" for state, count in outcome.with_other_code.items())
    is_under_way = any(state != State.FINISHED for state in outcome.with_other_code)
    again = f"; to apply it to what is under way: {to_type('cancel', outcome.sweep)}, then the same command"
    print(
        f"the code changed since: {', '.join(outcome.code_changes[:8])}; {kept} keep that of their submission"
        f"{again if is_under_way else ''}",
        file=sys.stderr,
    )


def _tell_former(former: Sequence[RunDir], outcome: SweepOutcome, *, prune: bool) -> None:
    """Say which runs are no longer wanted, and with `prune` cancel them."""
    from jobkit.run.choose import some_names

    if not prune:
        states = ", ".join(f"{run.name} ({outcome.states[run.name]})" for run in former[:5])
        more = " ..." if len(former) > 5 else ""
        print(f"no longer wanted: {states}{more}; the same command with --prune cancels them", file=sys.stderr)
        return
    from jobkit.submission.cancel import cancel_all

    print(f"no longer wanted, and cancelled: {some_names(former)}", file=sys.stderr)
    for _, outcome_of_one in cancel_all(former):
        if isinstance(outcome_of_one, JobkitError):
            print(f"error: {outcome_of_one}", file=sys.stderr)


def _dry_run(planned: Mapping[str, tuple[Point, object]], points: Sequence[grid.Point]) -> int:
    """Print which runs the sweep has, and start nothing."""
    by_run = {name: point.command for name, (point, _) in planned.items()}
    for name, command in by_run.items():
        print(f"{name}  {command}")
    same = len(points) - len(by_run)
    print(f"{len(by_run)} run(s)" + (f"; {same} of {len(points)} points are one run with another" if same else ""))
    return EXIT_FINISHED


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A function that shows how many runs are prepared, on a terminal and where there are many."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("preparing", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=total >= SHOWN_PROGRESS)
