"""python -m jobkit.submit EXP.yaml with `pipeline:`: a run for each stage, which start one after the other."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, InputError, JobkitError, nearest

if TYPE_CHECKING:
    import subprocess

    from jobkit.run.experiment import Experiment, LoadedConfig
    from jobkit.run.rundir import RunDir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The option of a pipeline."""
    parser.add_argument("--stage", metavar="NAME", help="of a YAML with `pipeline:` one stage (default: all, in order)")


def stages_wanted(arguments: argparse.Namespace, experiment: Experiment) -> list[str] | None:
    """The stages that a command line asks for, in the file's order; None where the YAML has none. Raises InputError."""
    stage = arguments.stage
    if experiment.pipeline is None:
        if stage is not None:
            raise InputError(f"--stage {stage}: {experiment.places.path} has no `pipeline:`")
        return None
    from jobkit.run.experiment import stages_of

    names = list(stages_of(experiment))
    if stage is not None and stage not in names:
        raise InputError(f"--stage {stage}: no such stage{nearest(stage, names)} (there are: {', '.join(names)})")
    if experiment.sweep is not None:
        raise InputError(f"{experiment.places.of('sweep')}: there is a pipeline as well; a file has one of them")
    for option in ("sweep", "sweep_file", "first", "prune", "max_running"):
        if (found := getattr(arguments, option)) is not None and found is not False:
            raise InputError(f"--{option.replace('_', '-')} is for a sweep, and this is a pipeline")
    for option in ("start_from", "weights_only", "check_model", "follow"):
        if getattr(arguments, option):
            raise InputError(f"--{option.removeprefix('start_').replace('_', '-')} is for one run, not for a pipeline")
    return names if stage is None else [stage]


def run(
    arguments: argparse.Namespace,
    experiment: Experiment,
    wanted: Sequence[str],
    cluster: str,
    runs_dir: Path,
    continuing: Callable[[Sequence[str]], str],
    start: Callable[..., int],
) -> int:
    """Submit the stages in order, all of them checked before the first; returns the exit code.

    `continuing` makes the command that continues a stage, `start` submits one run.
    """
    from jobkit.run.given import given_values
    from jobkit.submission.plan import Turn, make_plan
    from jobkit.submission.signals import hand_over, is_told_to_stop, signals_of_a_submission
    from jobkit.submission.submit import check, choose_run

    stages = _loaded(arguments, experiment, runs_dir)
    runs = {name: choose_run(loaded.config, runs_dir, arguments.fresh) for name, loaded in stages.items()}
    expected = [runs[name].name for name in wanted]
    turn = Turn(queues=arguments.queue, priority=arguments.priority)
    for name in wanted:
        with stages[name].places.locating_errors():
            made = make_plan(runs[name].path, stages[name].config, cluster)
            plan = dataclasses.replace(made, expected=expected, turn=turn)
            check(plan, Path.cwd())
        if arguments.dry_run:
            print(f"{plan.config.masked_yaml()}---\n{plan.describe()}\n---")
    if arguments.dry_run:
        return EXIT_FINISHED
    started: list[tuple[RunDir, subprocess.Popen[bytes]]] = []
    submitted: list[str] = []
    with signals_of_a_submission() as asked:
        try:
            for name in wanted:
                print(f"stage {name}:", file=sys.stderr)
                code = start(
                    stages[name],
                    cluster,
                    runs_dir,
                    command=continuing(["--stage", name]),
                    fresh=arguments.fresh,
                    given=given_values(stages[name].config, _overrides_of(name, arguments.overrides, stages)),
                    detach=True,
                    follow=False,
                    turn=turn,
                    notify=arguments.notify,
                    as_json=arguments.json,
                    started=started,
                )
                if code != EXIT_FINISHED:
                    _say_submitted(submitted)
                    return code
                submitted.append(f"stage {name}")
                hand_over()
                if is_told_to_stop(asked):
                    break
        except KeyboardInterrupt:
            if not submitted:
                raise
            asked.append(signal.SIGINT)
        except (JobkitError, OSError):
            _say_submitted(submitted)
            raise
        if len(submitted) < len(wanted):
            print(f"interrupted: nothing was submitted after {submitted[-1]}", file=sys.stderr, flush=True)
        if not started or arguments.detach or arguments.json:
            return EXIT_FINISHED if len(submitted) == len(wanted) else EXIT_RESUMABLE
        from jobkit.submission.follow_several import follow_runs

        return follow_runs(f"pipeline {experiment.values['name']}", started, asked)


def _say_submitted(stages: Sequence[str]) -> None:
    """Say which stages there are of a pipeline of which one cannot be submitted."""
    if stages:
        print(f"submitted before that: {', '.join(stages)}; the same command submits the rest", file=sys.stderr)


def _loaded(arguments: argparse.Namespace, experiment: Experiment, runs_dir: Path) -> dict[str, LoadedConfig]:
    """The configs of all stages, with whole names of the runs that they come after: stages before them, or others."""
    from jobkit.run.choose import find_run
    from jobkit.run.config import SECTIONS
    from jobkit.run.experiment import stages_of
    from jobkit.submission.chains import with_whole_names
    from jobkit.submission.submit import choose_run

    stages = stages_of(experiment)
    made: dict[str, RunDir] = {}
    loaded: dict[str, LoadedConfig] = {}

    def find(word: str, where: Path) -> RunDir:
        if word in made:
            return made[word]
        if word in stages:
            raise InputError(f"stage {word} does not come before this one in the file")
        return find_run(word, where)

    for text in arguments.overrides:
        first = text.removeprefix("+").partition(".")[0]
        if first not in (*stages, *SECTIONS) and (hint := nearest(first, stages)):
            raise InputError(f"command line: {text}: there is no such stage{hint}")
    for name, stage in stages.items():
        own = stage.config(_overrides_of(name, arguments.overrides, stages))
        loaded[name] = with_whole_names(own, arguments.after, runs_dir, find)
        made[name] = choose_run(loaded[name].config, runs_dir, arguments.fresh)
    return loaded


def _overrides_of(stage: str, overrides: Sequence[str], stages: Collection[str]) -> list[str]:
    """Of what was typed, what is for a stage: `train.params.lr=0.1` for one, `seed=3` for all."""
    own = []
    for text in overrides:
        sign = "+" if text.startswith("+") else ""
        first, dot, rest = text.removeprefix("+").partition(".")
        if dot and first in stages:
            if first == stage:
                own.append(f"{sign}{rest}")
        else:
            own.append(text)
    return own
