"""python -m jobkit.submit EXP.yaml: parse, plan, launch, follow."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit import pipeline, sweep
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, InputError, JobkitError
from jobkit.run.usage import Parser, exit_code, program, show_examples

if TYPE_CHECKING:
    import subprocess

    from jobkit.run import grid
    from jobkit.run.config import StartFrom
    from jobkit.run.experiment import Experiment, LoadedConfig
    from jobkit.run.records import GivenValues
    from jobkit.run.rundir import RunDir
    from jobkit.submission.plan import Turn
    from jobkit.submission.start_from import Start
    from jobkit.submission.submit import Outcome

DESCRIPTION = "Run the experiment of a YAML on this machine or a Slurm cluster; the same command continues it."
EXAMPLES = (
    "toy.yaml params.lr=3e-4 seed=1             a run with other values, or continue it",
    "toy.yaml --dry-run                         what it would do",
    "toy.yaml --sweep params.lr=1e-3,3e-3 seed=0,1   four runs",
    "toy.yaml --from toy-11f5f19c params.steps=600   go on from another run's newest checkpoint",
    "sample.yaml --after toy-11f5f19c           start when that run is finished",
)
EXIT_CODES = (
    "Exit codes: 0 finished or submitted, 1 the run failed, 2 the input is wrong and nothing was started, "
    "75 interrupted: the same command continues the run."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `jobkit submit`, which is the same program."""
    parser.add_argument("experiment", type=Path, metavar="EXP.yaml", help="what to train")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values to set, as in params.lr=3e-4; +params.x=1 adds one"
    )
    where = parser.add_argument_group("where and when it runs")
    place = where.add_mutually_exclusive_group()
    place.add_argument("--local", action="store_true", help="on this machine (default where there is no sbatch)")
    place.add_argument("--cluster", metavar="NAME", help="slurm, or a name under `clusters:` (default: slurm if there)")
    where.add_argument("--runs-dir", type=Path, metavar="DIR", help="where runs live (default: $JOBKIT_RUNS or ./runs)")
    where.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="RUN",
        help="start when another run is finished, through its requeues and resumptions; may be repeated",
    )
    where.add_argument("--queue", action="store_true", help="local: wait for CPU slots, too, as for devices")
    where.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="local: before your own runs of a lower one (default: 0), which make room with a checkpoint",
    )
    begin = parser.add_argument_group("how it begins")
    begin.add_argument(
        "--from",
        dest="start_from",
        metavar="RUN[@STEP]",
        help="begin with a checkpoint of another run (default: its newest) and go on from there",
    )
    begin.add_argument(
        "--weights-only", action="store_true", help="with --from: take the weights alone, and begin at step 0"
    )
    begin.add_argument("--fresh", action="store_true", help="a new run, even though one with this config exists")
    begin.add_argument("--demo", action=argparse.BooleanOptionalAction, help="force the YAML's `demo:` on or off")
    says = parser.add_argument_group("what the command does and says")
    says.add_argument("--dry-run", action="store_true", help="print the resolved config and the script; start nothing")
    says.add_argument(
        "--check-model", action="store_true", help="with --dry-run: try how the task's model is spread over ranks"
    )
    says.add_argument("--detach", action="store_true", help="local: in the background, print where it runs and return")
    says.add_argument("--follow", action="store_true", help="slurm: stay, and show output and progress")
    says.add_argument(
        "--notify", metavar="COMMAND", help="run this when a run has finished or failed; JOBKIT_TEXT says what it did"
    )
    says.add_argument(
        "--json", action="store_true", help="for programs: one object {run, path, state, ...}; local: as --detach"
    )
    sweep.add_arguments(parser)
    pipeline.add_arguments(parser)
    show_examples(parser, *EXAMPLES, text=EXIT_CODES)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Parse the command line and run it; a JobkitError becomes its message and exit code.

    `prog` is how the command was typed, where not as this module.
    """
    return exit_code(lambda: _run_as_typed(argv, prog or program("submit")), interrupted)


def _run_as_typed(argv: Sequence[str] | None, prog: str) -> int:
    parser = Parser(prog=prog, description=DESCRIPTION)
    add_arguments(parser)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        options = [word for word in unknown if word.startswith("-")] or unknown
        hint = _meant_to_set(options[0], [*arguments.overrides, *unknown], arguments, parser.options)
        parser.error(f"unrecognized arguments: {' '.join(options)}{hint}")
    return run(arguments)


def _meant_to_set(option: str, words: Sequence[str], arguments: argparse.Namespace, options: Sequence[str]) -> str:
    """What to type where an option was meant to set a value of the YAML."""
    from jobkit.run.config import SECTIONS
    from jobkit.run.experiment import read_experiment
    from jobkit.run.overrides import of_option

    try:
        values = read_experiment(arguments.experiment, arguments.demo).values
    except JobkitError:
        return ""
    hint = of_option(option, words, options, values, SECTIONS)
    return hint.replace("clusters.slurm.", f"clusters.{arguments.cluster}.") if arguments.cluster else hint


def interrupted() -> int:
    """Say that a signal came in time; returns the exit code."""
    print("interrupted before there was a job: nothing was started", file=sys.stderr)
    return EXIT_RESUMABLE


def run(arguments: argparse.Namespace) -> int:
    """One submission, as the command line says; returns the exit code."""
    from jobkit import slurm
    from jobkit.log import configure
    from jobkit.run.config import SECTIONS
    from jobkit.run.experiment import read_experiment
    from jobkit.run.given import given_values
    from jobkit.run.overrides import refuse_other_forms
    from jobkit.run.runs import default_runs_dir
    from jobkit.submission.plan import Turn

    configure()
    if arguments.json and (arguments.follow or arguments.dry_run):
        raise InputError(
            f"--json: one object is printed, and nothing of --{'follow' if arguments.follow else 'dry-run'}"
        )
    if arguments.detach and arguments.follow:
        raise InputError("--detach and --follow: one returns at once, the other stays; give one of them")
    experiment = read_experiment(arguments.experiment, arguments.demo)
    stage_names = experiment.pipeline if isinstance(experiment.pipeline, dict) else ()
    of_stages: dict[str, list[str]] = {name: [] for name in stage_names}
    refuse_other_forms(arguments.overrides, experiment.values, SECTIONS | of_stages)
    for note in experiment.notes:
        print(note, file=sys.stderr)
    cluster = "local" if arguments.local else arguments.cluster or ("slurm" if slurm.available() else "local")
    runs_dir = (arguments.runs_dir or default_runs_dir()).absolute()
    if (stages := pipeline.stages_wanted(arguments, experiment)) is not None:
        return pipeline.run(arguments, experiment, stages, cluster, runs_dir, partial(_continuing, arguments), start)
    if (points := sweep.points_of(arguments, experiment)) is not None:
        begin = _begin_of_points(arguments, experiment, points, runs_dir)
        return sweep.run(arguments, experiment, points, cluster, runs_dir, partial(_continuing, arguments), begin)
    begun = _with_start(experiment, arguments, runs_dir)
    loaded, parent = begun.loaded, begun.parent
    own = given_values(loaded.config, arguments.overrides, begun.inherited)
    arguments.overrides[:0] = begun.inherited  # for the command that continues the run
    if arguments.dry_run:
        return _dry_run(begun, own, cluster, runs_dir, arguments.fresh, arguments.check_model)
    if arguments.check_model:
        raise InputError("--check-model starts nothing: give --dry-run too, and submit without both")
    return start(
        loaded,
        cluster,
        runs_dir,
        command=_continuing(arguments, start=_words_of_start(loaded.config.start_from, parent, runs_dir)),
        fresh=arguments.fresh,
        parent=parent,
        given=own,
        detach=arguments.detach or arguments.json,
        follow=arguments.follow,
        turn=Turn(queues=arguments.queue, priority=arguments.priority),
        notify=arguments.notify,
        as_json=arguments.json,
    )


def start(
    loaded: LoadedConfig,
    cluster: str,
    runs_dir: Path,
    *,
    command: str,
    detach: bool,
    follow: bool,
    fresh: bool = False,
    parent: RunDir | None = None,
    given: GivenValues | None = None,
    turn: Turn | None = None,
    notify: str | None = None,
    as_json: bool = False,
    started: list[tuple[RunDir, subprocess.Popen[bytes]]] | None = None,
) -> int:
    """Submit a config from the current folder, and stay with its run where that is wanted; returns the exit code.

    `command` is what to type here to continue the run; `parent`, `given` and `notify` as in
    `jobkit.submission.submit.submit`. What was started on this machine is added to `started`, with its supervisor.
    """
    from jobkit.submission.signals import signals_of_a_submission
    from jobkit.submission.submit import submit
    from jobkit.worker.startup.jobkit_snapshot import leave

    leave(os.environ)  # of the run in which this may be typed: what is started here has a snapshot of its own
    with signals_of_a_submission() as asked:
        with loaded.places.locating_errors():
            outcome = submit(
                loaded.config,
                cluster,
                source=Path.cwd(),
                runs_dir=runs_dir,
                command=command,
                fresh=fresh,
                foreground=not detach,
                parent=parent,
                given=given,
                turn=turn,
                notify=notify,
                of_environment=loaded.of_environment,
            )
        supervisor = outcome.started.supervisor if outcome.started is not None else None
        if supervisor is not None and started is not None:
            started.append((outcome.run, supervisor))
        if supervisor is not None and not detach:
            from jobkit.submission.follow import follow_local

            _announce(outcome)
            return follow_local(outcome.run, supervisor, asked)
    if as_json:
        return _print_json(outcome)
    return _report(outcome, loaded.config.after, command, follow=follow and not asked)


def _print_json(outcome: Outcome) -> int:
    """What the submission did, for programs."""
    import json

    _announce(outcome)
    status = outcome.run.status()
    found = {
        "run": outcome.run.name,
        "path": str(outcome.run.path),
        "state": status.state,
        "job_id": status.job_id,
        "cluster": status.cluster,
        "started": outcome.started is not None,
        "unapplied": list(outcome.unapplied),
    }
    print(json.dumps(found))
    return EXIT_FINISHED


def _with_start(experiment: Experiment, arguments: argparse.Namespace, runs_dir: Path, point: grid.Point = ()) -> Start:
    """The config with what `--from`, or the YAML's `start_from`, says; `point` is of a sweep."""
    from jobkit.submission.chains import with_whole_names
    from jobkit.submission.start_from import Start, with_start

    typed = [*arguments.overrides, *(one.text for one in point)]

    def load(inherited: Sequence[str]) -> LoadedConfig:
        loaded = experiment.config([*inherited, *arguments.overrides], point)
        return with_whole_names(loaded, arguments.after, runs_dir)

    if arguments.start_from is not None:
        options = {"weights_only": arguments.weights_only, "runs_dir": runs_dir, "fresh": arguments.fresh}
        return with_start(load, typed, arguments.start_from, **options)
    if arguments.weights_only:
        raise InputError("--weights-only says what is taken of another run: give --from RUN[@STEP] too")
    loaded = load([])
    start = loaded.config.start_from
    if not start.run:
        return Start(loaded)
    asked, options = f"{start.run}@{start.step}", {"weights_only": start.weights_only, "runs_dir": runs_dir}
    try:
        return dataclasses.replace(with_start(load, typed, asked, fresh=arguments.fresh, **options), parent=None)
    except InputError:
        if (runs_dir / start.run).exists():
            raise
        return Start(loaded)  # what is looked at later says that it is not there


def _begin_of_points(
    arguments: argparse.Namespace, experiment: Experiment, points: Sequence[grid.Point], runs_dir: Path
) -> Callable[[grid.Point], Start]:
    """What gives each point of a sweep its config, and what that has as in the run that it starts from.

    All start from the one checkpoint that `--from` or the YAML says, or each from that which the sweep says.
    """
    from jobkit.run.choose import find_run
    from jobkit.submission.chains import with_whole_names
    from jobkit.submission.start_from import Start

    if arguments.start_from is None and any(one.text.startswith("start_from.") for point in points for one in point):
        return lambda point: _with_start(experiment, arguments, runs_dir, point)
    inherited = _start_all(arguments, experiment, points, runs_dir)
    find = cache(find_run)  # the points may name one run

    def begin(point: grid.Point) -> Start:
        own = inherited[_keys_of(point)]
        loaded = experiment.config([*own, *arguments.overrides], point)
        return Start(with_whole_names(loaded, arguments.after, runs_dir, find), inherited=own)

    return begin


def _start_all(
    arguments: argparse.Namespace, experiment: Experiment, points: Sequence[grid.Point], runs_dir: Path
) -> dict[frozenset[str], tuple[str, ...]]:
    """Let all runs of a sweep start from the one checkpoint that `--from` says.

    Returns what they have as there: by the keys that they set themselves, which a table may leave empty.
    """
    from jobkit.run.given import given_values, keys_of
    from jobkit.run.rundir import RunDir
    from jobkit.submission.start_from import describe

    inherited: dict[frozenset[str], tuple[str, ...]] = {}
    firsts = {_keys_of(point): point for point in reversed(points)}
    chosen: dict[str, Any] = {}
    for keys, point in reversed(firsts.items()):
        begun = _with_start(experiment, arguments, runs_dir, point)
        inherited[keys] = begun.inherited
        if not (start := begun.loaded.config.start_from).run:
            continue
        if begun.parent is not None:
            if begun.parent.path.parent != runs_dir:
                raise InputError(f"--from {arguments.start_from}: for a sweep, a run in {runs_dir}")
            arguments.start_from = f"{start.run}@{start.step}"  # for the others, too
            chosen = {"run": start.run, "step": start.step, "weights_only": str(start.weights_only).lower()}
        words = [one.text for one in point]
        own = given_values(begun.loaded.config, [*arguments.overrides, *words], begun.inherited)
        if told := describe(begun.loaded.config, RunDir(runs_dir / start.run), own, keys_of(words)):
            which = "each" if len(firsts) == 1 else f"each with {', '.join(sorted(keys))}"
            print(f"{which} {told}", file=sys.stderr)
    arguments.overrides += [f"start_from.{key}={value}" for key, value in chosen.items()]
    return inherited


def _keys_of(point: grid.Point) -> frozenset[str]:
    from jobkit.run.given import keys_of

    try:
        return frozenset(keys_of(one.text for one in point))
    except InputError:  # which its config tells, with the place
        return frozenset()


def _continuing(
    arguments: argparse.Namespace, more: Sequence[str] = (), *, before: Sequence[str] = (), start: Sequence[str] = ()
) -> str:
    """The command that continues the run: this one, without what belongs to this submission alone, and masked.

    `more` are further overrides and options, `before` overrides that come first, `start` options that say what the run
    starts from.
    """
    from jobkit.run import overrides
    from jobkit.run.command_line import this_python

    typed = [*before, *arguments.overrides, *more, *(["--no-sweep"] if arguments.no_sweep else [])]
    shown = [overrides.masked(word) if "=" in word else word for word in typed]
    words = [this_python(), "-m", "jobkit.submit", str(arguments.experiment), *shown]
    words += ["--local"] if arguments.local else ["--cluster", arguments.cluster] if arguments.cluster else []
    words += [] if arguments.demo is None else ["--demo" if arguments.demo else "--no-demo"]
    words += [word for name in arguments.after for word in ("--after", name)]
    words += ["--queue"] if arguments.queue else []
    words += ["--priority", str(arguments.priority)] if arguments.priority else []
    words += ["--runs-dir", str(arguments.runs_dir)] if arguments.runs_dir else []
    return shlex.join([*words, *start])


def _words_of_start(start: StartFrom, parent: RunDir | None, runs_dir: Path) -> list[str]:
    """The options that say what a run starts from: the other by its whole name, and the step that was the newest."""
    if parent is None:
        return []
    name = start.run if parent.path.parent == runs_dir else parent.path
    return ["--from", f"{name}@{start.step}", *(["--weights-only"] if start.weights_only else [])]


def _dry_run(begun: Start, given: GivenValues, cluster: str, runs_dir: Path, fresh: bool, checks_model: bool) -> int:
    from jobkit.run.left_unfinished import left_unfinished
    from jobkit.run.rundir import RunDir
    from jobkit.submission import inputs, start_from
    from jobkit.submission.model_check import check_model, describe
    from jobkit.submission.observer import observe
    from jobkit.submission.partition_check import refuse_impossible
    from jobkit.submission.plan import make_plan
    from jobkit.submission.submit import check, choose_run

    loaded = begun.loaded
    with loaded.places.locating_errors():
        inputs.check(loaded.config, runs_dir)
        run = choose_run(loaded.config, runs_dir, fresh)
        plan = make_plan(run.path, loaded.config, cluster)
        check(plan, Path.cwd())
        start_from.check(loaded.config, run, begun.parent)
        refuse_impossible(plan)
        found = check_model(plan.config, Path.cwd()) if checks_model else []
    start = loaded.config.start_from
    if start.run and (told := start_from.describe(plan.config, begun.parent or RunDir(runs_dir / start.run), given)):
        print(f"{run.name}: {told}", file=sys.stderr)
    if not fresh and (told := left_unfinished(run, plan.config, observe)):
        print(told, file=sys.stderr)
    print(f"{plan.config.masked_yaml()}---\n{plan.describe()}")
    if plan.scheduler == "slurm":
        from jobkit.submission.sbatch import script

        print(f"---\n{script(plan.masked())}")
    if checks_model:
        print("---", *describe(found, plan.config), sep="\n")
    return EXIT_FINISHED


def _announce(outcome: Outcome) -> None:
    before = outcome.status
    if outcome.begins:
        print(outcome.begins, file=sys.stderr)
    if outcome.started is not None and before.attempts:
        from jobkit.run.silent import is_silent

        kept = f" from step {before.checkpoint}" if before.checkpoint is not None else ""
        name = outcome.run.name
        does = f"starting {name} again" if is_silent(outcome.run, before) else f"continuing {name}"
        print(f"{does} ({before.state}){kept}", file=sys.stderr)
    if changed := [line for line in outcome.code_changes if line not in outcome.outputs]:
        print(f"the code changed since it was last submitted: {', '.join(changed[:8])}", file=sys.stderr)
    if outcome.outputs:
        written = ", ".join(line[2:] for line in outcome.outputs[:8])
        print(
            f"written beside the code while the run trained: {written}; if these are its outputs, let it write them "
            "to ${run_dir}/outputs, else they count as code, and another run writes over them",
            file=sys.stderr,
        )


def _report(outcome: Outcome, after: Sequence[str], command: str, follow: bool) -> int:
    """Say what the submission did, and stay with the run where that was asked for; `after` is the config's."""
    from jobkit.run.status import State

    run, status = outcome.run, outcome.status
    _announce(outcome)
    if outcome.started is not None:
        where = f"{'process' if outcome.started.supervisor else 'job'} {outcome.started.job_id}"
        print(f"{where}\nrun directory {run.path}", flush=True)
        from jobkit.run.command_line import to_type

        if standing := _standing(run, after, is_local=outcome.started.supervisor is not None):
            print(f"queued: {standing}", file=sys.stderr)
        print(f"{to_type('logs', '-f', run.name)}   shows its output", file=sys.stderr)
    elif status.state == State.FINISHED:
        print(f"already finished{status.at_steps}: {run.path}")
        if outcome.changed_inputs:
            print(f"changed since it finished: {', '.join(outcome.changed_inputs)}", file=sys.stderr)
        from jobkit.run.secrets import MASK

        again = "the same command, with" if MASK in command else command  # what is not shown has to be typed
        print(f"for a new run of the same config: {again} --fresh")
    else:
        where = f"{'job' if status.scheduler == 'slurm' else 'process'} {status.job_id} ({status.cluster})"
        state = State.QUEUED if status.state == State.HELD else status.state
        print(f"already {state}: {where}\nrun directory {run.path}", flush=True)
        from jobkit.run.command_line import to_follow_or_stop

        print(to_follow_or_stop(run.name, has_logs=not status.launcher), file=sys.stderr)
        for note in (_note(outcome), _unapplied(outcome)):
            if note:
                print(note, file=sys.stderr)
    if not follow or (status.state == State.FINISHED and outcome.started is None):
        return EXIT_FINISHED
    from jobkit.submission.follow import follow_slurm

    return follow_slurm(run)


def _standing(run: RunDir, after: Sequence[str], *, is_local: bool) -> str:
    """What the run waits for that jobkit itself knows: other runs, or its place in the line of this machine."""
    from jobkit.submission.observer import line_here, runs_before_now

    before = runs_before_now(run, after)
    if before.unfinished:
        return f"after {before.text}"
    found = line_here().find(run.path, os.getuid()) if is_local else None
    return str(found) if found is not None and found.text else ""


def _note(outcome: Outcome) -> str:
    """What else there is to know of a run that is under way already."""
    from jobkit.run.status import State
    from jobkit.submission.observer import can_be_asked

    status = outcome.status
    if outcome.released:
        return f"the job was held ({status.waits_for}): released"
    if status.state == State.HELD:
        return f"the job is held ({status.waits_for}): scontrol release {status.job_id}"
    if status.scheduler == "slurm" and not can_be_asked(status):
        from jobkit.run.command_line import to_type

        gone = f"if that is gone: {to_type('cancel', outcome.run.name)}, then the same command"
        where = status.slurm_cluster or "a cluster that an earlier jobkit did not write down"
        return f"the job is on {where}, which cannot be asked from here; {gone}"
    return ""


def _unapplied(outcome: Outcome) -> str:
    """What a run that is under way keeps, though something else was asked for, and what to type to change that."""
    code = ["the code of its submission"] if outcome.code_changes else []
    kept = ", ".join([*outcome.unapplied, *code])
    if not kept:
        return ""
    from jobkit.run.command_line import to_type

    return f"its job keeps {kept}; to apply it: {to_type('cancel', outcome.run.name)}, then the same command"


if __name__ == "__main__":
    sys.exit(main())
