"""jobkit verify EXP.yaml | RUN[@STEP]: prove that interruptions change no bit of a training, or name what they change.

straight run, interrupted run --traces--> equal (0) | the first difference, by step and kind (1)
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.config.identity import run_name
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, InputError
from jobkit.run.files import leaves
from jobkit.run.journal import read_status
from jobkit.run.locks import Lock
from jobkit.run.rundir import RunDir
from jobkit.run.runs import find, runs_dir_of, verified_file
from jobkit.run.status import State
from jobkit.usage import enter_folder, show_examples

if TYPE_CHECKING:
    from jobkit.config.load import Loaded

MIN_STEPS = 6
"""With fewer there is no place for an interruption."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="EXP.yaml|RUN[@STEP]", help="an experiment, or a run from a checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to set, as for submit")
    parser.add_argument("--steps", type=int, default=20, metavar="K", help="steps of each run (default: 20)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--local", action="store_true", help="on this machine (default where there is no sbatch)")
    place.add_argument("--cluster", metavar="NAME", help="slurm, or a name under `clusters:`")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks, on one node (default: those of the YAML)")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="where runs live ($JOBKIT_RUNS or ./runs)")
    parser.add_argument("--json", action="store_true", help="for programs: {equal, lines, difference, ...}")
    show_examples(
        parser,
        {
            "toy.yaml --local": "20 steps, straight and interrupted",
            "toy@100": "from the checkpoint of step 100 of a run on, with its own code",
        },
    )


def run(arguments: argparse.Namespace) -> int:
    """Verify, and print the report."""
    from jobkit.config.load import load
    from jobkit.submission import checks
    from jobkit.submission.plan import make_plan, target
    from jobkit.verify import runs
    from jobkit.verify.forgotten import as_json

    if arguments.ranks is not None and arguments.ranks < 1:
        raise InputError(key="--ranks", found=arguments.ranks, allowed="1 or more")
    if arguments.steps < MIN_STEPS:
        raise InputError(key="--steps", found=arguments.steps, allowed=f"{MIN_STEPS} or more")
    runs_dir = runs_dir_of(arguments.runs_dir)
    is_experiment = arguments.what.endswith((".yaml", ".yml"))
    source, step = (None, 0) if is_experiment else _run_and_step(arguments.what, runs_dir, arguments.steps)
    if source is not None:
        checks.refuse_foreign(source)
    file = Path(arguments.what) if source is None else source.config_file
    loaded = shortened(file, arguments.overrides)
    submitted = read_status(source).submitted if source is not None else None
    entry = submitted.entry if submitted is not None and not arguments.local else None
    place = target(loaded.config, local=arguments.local, cluster=arguments.cluster or entry)
    if arguments.ranks is not None:
        place = runs.with_ranks(place, arguments.ranks)
    plan = make_plan(loaded, runs_dir, place)
    for line in [] if arguments.json else checks.check(plan, Path.cwd() if source is None else source.code):
        print(line, file=sys.stderr)
    folder = Path.cwd() if source is None else source.code.resolve()
    enter_folder(submitted)
    verification = runs.Verification(
        loaded=loaded,
        folder=folder,
        runs_dir=runs_dir / ".verify" / (plan.run.name if source is None else source.name),
        target=place,
        steps=arguments.steps,
        say=lambda line: None if arguments.json else print(line, flush=True),
        prepare=lambda run: _copy_checkpoint(source, step, run) if source is not None else None,
        first=step,
        ranks=arguments.ranks,
        shows=sys.stderr.isatty() and not arguments.json,
    )
    with Lock(runs_dir / ".verify" / f"{verification.runs_dir.name}.lock"):  # another one would delete these runs
        report = verification.run()
        code = folder if source is not None else next((verification.runs_dir / ".code").glob("[0-9a-f]*"))
    if source is not None and not arguments.overrides:
        name = source.name
    else:  # without `verify.params`, as the run is submitted
        name = run_name(load(file, arguments.overrides).config)
    runs.note(verified_file(runs_dir, code.name, name), report)
    if arguments.json:
        difference = report.difference
        words = None if difference is None else {"kind": difference.kind, "name": difference.name}
        items = [as_json(item, verification.code) for item in report.found]
        print(json.dumps({**vars(report), "difference": words, "found": items}))
    else:
        print("\n".join(report.lines))
    return EXIT_FINISHED if report.equal else EXIT_FAILED


def shortened(file: Path, overrides: Sequence[str]) -> Loaded:
    """Return the config with `verify.params` over `params`, wherever the YAML refers to them; typed ones come last."""
    from jobkit.config.load import load

    loaded = load(file, overrides)
    changed = [f"{key}={json.dumps(value)}" for key, value in leaves(loaded.config.verify.params, "params.")]
    return load(file, [*changed, *overrides])


def _run_and_step(word: str, runs_dir: Path, steps: int) -> tuple[RunDir, int]:
    """Return the run, and the step of the checkpoint, that RUN[@STEP] means.

    Without @STEP that is the newest checkpoint after which the run has so many steps; step 0 where there is none.
    """
    name, _, text = word.partition("@")
    (run, *_) = find([name], runs_dir)
    progress, status = run.progress(), read_status(run)
    total = progress.total_steps if progress is not None else None
    if status.state == State.FINISHED:  # ctx.epochs knows no number of steps before
        total = max((attempt.ended.last_step or 0 for attempt in status.attempts if attempt.ended), default=total)
    usable = [step for step in run.durable_steps() if total is None or step + MIN_STEPS <= total]
    if text and (not text.isdigit() or int(text) not in usable):
        words = ", ".join(map(str, usable)) or "none; without @STEP it begins at step 0"
        raise InputError(
            key="RUN@STEP", found=word, allowed=f"a checkpoint of {run.name} before its last {MIN_STEPS} steps: {words}"
        )
    if text:
        return run, int(text)
    return run, max((step for step in usable if total is None or step + steps <= total), default=0)


def _copy_checkpoint(source: RunDir, step: int, run: RunDir) -> None:
    if step:
        shutil.copytree(source.checkpoint(step), run.checkpoint(step))
