"""python -m jobkit.submit EXP.yaml: load, plan, check, start once, follow. `jobkit submit` is the same program.

    words --config/load.py--> Loaded --submission/plan.py--> LaunchPlan --submission/transaction.py--> exit code
    --sweep --config/points.py--> points --submission/sweep.py--> a plan each, one job array

Nothing heavy is imported before it is needed: `--help` takes a tenth of a second, a submission little more than sbatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, InputError, JobkitError
from jobkit.usage import enter_folder, exit_code, program, show_examples, to_continue, to_type

if TYPE_CHECKING:
    from jobkit.config.load import Loaded, Source
    from jobkit.config.points import Point
    from jobkit.run.rundir import RunDir
    from jobkit.submission.fork import Fork
    from jobkit.submission.plan import LaunchPlan, Target
    from jobkit.submission.transaction import Outcome, Which

DESCRIPTION = (
    "Run the experiment of a YAML on this machine or a Slurm cluster; the same command continues it. Exit codes: 0 "
    "finished or submitted, 1 the run failed, 2 the input is wrong and nothing was started, 75 interrupted: the same "
    "command continues the run."
)
EXAMPLES = {
    "toy.yaml params.lr=3e-4 seed=1": "a run with other values, or continue it",
    "toy.yaml --dry-run": "what it would do",
    "toy.yaml --cluster h100 --follow": "the entry h100 of `clusters:`, and stay with the run",
    "toy.yaml --from toy-11f5f19c@300 params.lr=1e-3": "a new run that goes on from a checkpoint of another",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """How a command stays with the run that it starts."""

    detach: bool = False
    """On this machine: return at once."""
    follow: bool = False
    """Stay with a run that the command does not have in the foreground."""
    as_json: bool = False
    """Print one object for programs, and return at once."""
    notify: str | None = None
    """A command for the ends of the run; None keeps the one that an earlier submission gave."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line of `jobkit submit` and `python -m jobkit.submit`."""
    parser.add_argument("experiment", type=Path, metavar="EXP.yaml", help="what to train")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values to set, as in params.lr=3e-4; +params.x=1 adds one"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--local", action="store_true", help="on this machine (default where there is no sbatch)")
    place.add_argument("--cluster", metavar="NAME", help="slurm, or a name under `clusters:` (default: slurm if there)")
    parser.add_argument("--dry-run", action="store_true", help="print the config and the script; write nothing")
    parser.add_argument("--fresh", action="store_true", help="a new run, even though one of this config exists")
    add_sweep(parser)
    parser.add_argument(
        "--after", action="append", default=[], metavar="RUN", help="start once this run is finished; may be repeated"
    )
    parser.add_argument(
        "--from", dest="start", metavar="RUN[@STEP]", help="a new run that begins with a checkpoint of another"
    )
    parser.add_argument("--weights-only", action="store_true", help="with --from: its weights alone, from step 0")
    add_follow_options(parser)
    parser.add_argument(
        "--runs-dir", type=Path, metavar="DIR", help="where runs live (default: $JOBKIT_RUNS or ./runs)"
    )
    parser.description = DESCRIPTION
    show_examples(parser, EXAMPLES)


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Define the options that make many runs of a YAML."""
    points = parser.add_mutually_exclusive_group()
    points.add_argument(
        "--sweep",
        nargs="+",
        action="extend",
        metavar="key=v1,v2",
        help="a run for each value: 'seed=range(4)', 'params.lr=log(1e-4,1,5)'",
    )
    points.add_argument("--sweep-file", type=Path, metavar="CSV", help="a line of keys, then a line a run")
    parser.add_argument("--max-running", type=_count, metavar="N", help="at most so many runs of the sweep at once")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 1 or more")
    return int(text)


def add_follow_options(parser: argparse.ArgumentParser) -> None:
    """Define --detach, --follow, --json and --notify, which `jobkit resume` has too."""
    parser.add_argument("--detach", action="store_true", help="on this machine: in the background, return at once")
    parser.add_argument("--follow", action="store_true", help="on Slurm: stay, and show output and progress")
    parser.add_argument(
        "--json", action="store_true", help="for programs: start, print {run, dir, state, job_id, ...} and return"
    )
    parser.add_argument(
        "--notify",
        metavar="COMMAND",
        help="run it in a shell, with JOBKIT_TEXT, when the run ends; kept until another is given, '' for none",
    )


def follow_options(arguments: argparse.Namespace) -> FollowOptions:
    """Return what the options say. Raises InputError for two that exclude each other."""
    if arguments.follow and (arguments.detach or arguments.json):
        other = "--detach" if arguments.detach else "--json"
        raise InputError(f"{other} returns at once", key="--follow", hint="give one of them")
    return FollowOptions(
        detach=arguments.detach or arguments.json,
        follow=arguments.follow,
        as_json=arguments.json,
        notify=arguments.notify,
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the submission that the command line says; returns the exit code."""
    from jobkit.config.load import read_source
    from jobkit.run.runs import runs_dir_of
    from jobkit.submission import after
    from jobkit.submission.plan import target

    options, runs_dir, fork = follow_options(arguments), runs_dir_of(arguments.runs_dir), _fork_of(arguments)
    source = read_source(arguments.experiment, arguments.overrides)
    for note in source.notes:
        print(note, file=sys.stderr)
    if arguments.sweep or arguments.sweep_file or source.sweep is not None:
        from jobkit.config.points import points

        if (listed := points(source, arguments.sweep, arguments.sweep_file)) is not None:
            return _sweep(arguments, source, listed, options, fork)
    if arguments.max_running:
        raise InputError("there is no sweep", key="--max-running", hint="see --sweep and --sweep-file")
    loaded = source.loaded()
    loaded = after.resolve(loaded, arguments.after, runs_dir)
    place = target(loaded.config, local=arguments.local, cluster=arguments.cluster)
    plan = plan_of(loaded, runs_dir, place)
    if fork is not None:
        plan = fork.at(plan)
    if arguments.dry_run:
        return _dry_run(plan, fork)
    return _start(plan, Path.cwd(), "new" if arguments.fresh else "newest", options, fork)


def _fork_of(arguments: argparse.Namespace) -> Fork | None:
    """Return the start that --from and --weights-only ask for."""
    if arguments.start is None:
        if arguments.weights_only:
            raise InputError("it says what to take of another run", key="--weights-only", hint="--from RUN names that")
        return None
    from jobkit.run.runs import runs_dir_of
    from jobkit.submission.fork import Fork

    runs_dir = runs_dir_of(arguments.runs_dir)
    return Fork.of(arguments.start, weights_only=arguments.weights_only, runs_dir=runs_dir)


def resume(run: RunDir, options: FollowOptions) -> int:
    """Continue a run as it was last submitted: its config, its code, its place. Returns the exit code.

    The config that others could have written is refused before it is read.
    """
    from jobkit.config.load import load
    from jobkit.run.journal import read_status
    from jobkit.submission import after, checks
    from jobkit.submission.plan import target

    checks.refuse_foreign(run)
    status = read_status(run)
    checks.refuse_older(run, status)
    submitted = status.submitted
    if submitted is not None and submitted.launcher is not None:
        raise InputError(f"jobkit does not start its ranks: {to_continue(run.path, submitted)}", key=run.name)
    loaded = after.resolve(load(run.config_file, is_own=True), (), run.path.parent, may_be_gone=bool(status.attempts))
    place = target(loaded.config, local=False, cluster=submitted.entry if submitted is not None else None)
    enter_folder(submitted)
    return _start(plan_of(loaded, run.path.parent, place, run.code).at(run), None, "this", options)


def plan_of(loaded: Loaded, runs_dir: Path, place: Target, folder: Path | None = None) -> LaunchPlan:
    """Return the checked plan of a config. `folder` has the code; without it the current folder."""
    from jobkit.submission import checks
    from jobkit.submission.plan import make_plan

    try:
        plan = make_plan(loaded, runs_dir, place)
        notes = checks.check(plan, folder or Path.cwd())
    except InputError as error:
        raise loaded.locate(error) if error.key and not error.key.startswith("-") else error from None
    for note in notes:
        print(note, file=sys.stderr)
    return plan


def _start(plan: LaunchPlan, code: Path | None, which: Which, options: FollowOptions, fork: Fork | None = None) -> int:
    """Start the run of a plan, and stay with it where that is wanted; returns the exit code."""
    from jobkit.disk import may_return
    from jobkit.run.status import State
    from jobkit.submission import transaction
    from jobkit.submission.follow import follow, follow_local
    from jobkit.submission.signals import Signals
    from jobkit.supervisor import notify

    with Signals() as signals:
        outcome = transaction.submit(
            plan, code, which=which, job_exists=signals.job_exists, prepare=_preparation(options, fork)
        )
        if not outcome.started and not outcome.before.is_over:
            notify.keep(outcome.run, options.notify)
        try:
            if options.as_json:
                return _print_json(outcome)
            _announce(outcome)
            if outcome.process is not None and not options.detach:
                return follow_local(outcome.run, outcome.process, signals)
        except OSError as error:
            if not (outcome.started and may_return(error)):
                raise
            seen = to_type("status", outcome.run.path)
            raise JobkitError(
                f"{outcome.run.name} has started; its output cannot be shown: {error}; see {seen}"
            ) from error
    return follow(outcome.run) if options.follow and outcome.before.state != State.FINISHED else EXIT_FINISHED


def _preparation(options: FollowOptions, fork: Fork | None) -> Callable[[LaunchPlan], None]:
    """Return the function that prepares the directory of each run that starts, before there is a job."""
    from jobkit.run import secrets
    from jobkit.supervisor import notify

    said: set[str] = {""}

    def prepare(plan: LaunchPlan) -> None:
        if not plan.run.journal_file.exists() and (line := secrets.warning(plan.loaded.written["params"])) not in said:
            said.add(line)  # once for a sweep
            print(line, file=sys.stderr)
        if fork is not None:
            fork.bring(plan)
        notify.keep(plan.run, options.notify)

    return prepare


def _sweep(
    arguments: argparse.Namespace, source: Source, points: list[Point], options: FollowOptions, fork: Fork | None
) -> int:
    """Submit the runs of a sweep, or show them; returns the exit code."""
    from jobkit.run.runs import runs_dir_of
    from jobkit.run.secrets import masked_word
    from jobkit.submission import after, local_sweep, sweep
    from jobkit.submission.plan import target
    from jobkit.submission.signals import Signals

    if arguments.fresh:
        raise InputError(
            "a sweep is the set of its runs", key="--fresh", hint="--fresh with one point makes its run anew"
        )
    runs_dir = runs_dir_of(arguments.runs_dir)
    loaded = [(" ".join(masked_word(word) for word, _ in point), source.loaded(point)) for point in points]
    config = loaded[0][1].config
    if config.after or arguments.after:
        loaded = [(words, after.resolve(point, arguments.after, runs_dir)) for words, point in loaded]
    place = target(config, local=arguments.local, cluster=arguments.cluster)
    is_here = place.scheduler == "local"
    if options.follow and not is_here:
        raise InputError(
            "it shows one run", key="--follow", hint=f"see `{program('wait')}` and `{program('list')} --watch`"
        )
    start = fork.text if fork is not None else ""
    plans = sweep.plan(loaded, lambda first: plan_of(first, runs_dir, place), start)
    planned = sweep.Sweep.of(list(plans.values()))
    if arguments.dry_run:
        print(f"sweep {planned.name}: {len(planned.plans)} runs on {place.name}")
        print("\n".join(f"{plan.run.name}  {words}" for plan, words in zip(planned.plans, plans, strict=True)))
        return EXIT_FINISHED
    with Signals() as signals:
        if is_here:
            return local_sweep.submit(
                planned,
                Path.cwd(),
                arguments.max_running,
                signals,
                prepare=_preparation(options, fork),
                detach=options.detach,
                as_json=options.as_json,
            )
        outcome = sweep.submit(planned, Path.cwd(), arguments.max_running, _preparation(options, fork))
    if options.as_json:
        import json

        print(json.dumps(outcome.as_json()))
        return outcome.say_left()
    print(f"sweep {planned.name}: {outcome.counts()}")
    limit = f", at most {arguments.max_running} at once" if arguments.max_running else ""
    for job, count in outcome.jobs:
        print(f"job {job}: {count} task(s){limit}")
    print(f"{program('list')} {planned.name}   shows them", file=sys.stderr)
    return outcome.say_left()


def _dry_run(plan: LaunchPlan, fork: Fork | None) -> int:
    from jobkit.config import yamlfile
    from jobkit.run import secrets
    from jobkit.submission import sbatch

    print(f"{yamlfile.dump(secrets.masked(plan.loaded.written))}---\n{plan.describe()}")
    if fork is not None and not plan.run.start_file.exists():
        print(f"it {fork.describe(plan, fork.newest())}")
    if plan.target.scheduler == "slurm":
        print(f"---\n{sbatch.SlurmExecutor(plan).script()}")
    return EXIT_FINISHED


def _announce(outcome: Outcome) -> None:
    """Print the outcome of the submission, and the next command."""
    from jobkit.run.status import State

    run, before = outcome.run, outcome.before
    if outcome.started:
        step = run.durable_step()
        if before.status.attempts:
            kept = f" from step {step}" if step is not None else ""  # a `command:` keeps its own state
            print(f"continuing {run.name} ({before.state}){kept}", file=sys.stderr)
        now = f"job {outcome.job_id}" if outcome.process is None else f"process {outcome.process.pid}"
    elif before.state == State.FINISHED:
        print(f"already finished: {run.path}")
        print("for a new run of the same config: the same command with --fresh", file=sys.stderr)
        return
    else:
        now = f"already {before.state}: {before.words}"
    print(f"{now}\nrun directory {run.path}", flush=True)
    print(f"{to_type('logs', run.path, '-f')}   shows its output", file=sys.stderr)


def _print_json(outcome: Outcome) -> int:
    import json

    values = {
        "run": outcome.run.name,
        "dir": str(outcome.run.path),
        "state": "queued" if outcome.started else outcome.before.state,
        "started": outcome.started,
        "job_id": outcome.job_id,
        "result": outcome.before.status.result,
    }
    print(json.dumps(values), flush=True)
    return EXIT_FINISHED


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jobkit submit`, under the exit code of an interrupted run for Ctrl-C."""
    from jobkit.cli.main import run_verb

    words = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: run_verb(["submit", *words]), interrupted=EXIT_RESUMABLE)


if __name__ == "__main__":
    sys.exit(main())
