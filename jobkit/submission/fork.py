"""--from RUN[@STEP]: a new run that begins with a checkpoint of another.

    submit.py: Fork.of(words) --at(plan)--> LaunchPlan of another run directory
    transaction, under the run's lock, before there is a job: Fork.bring --hard links--> checkpoints/ or start/
                                                                         --last--------> start.json
    ranks: Context reads start.json (loop/context.py)

Nothing that becomes of the other run matters once start.json is there.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.config.identity import run_name
from jobkit.config.yamlfile import read_yaml
from jobkit.errors import InputError, NoSuchRun
from jobkit.run import records
from jobkit.run.after import predecessors
from jobkit.run.files import foreign_owner, read_json, sync_file, sync_folder
from jobkit.run.journal import read_status
from jobkit.run.older import HINT
from jobkit.run.records import Origin
from jobkit.run.rundir import RunDir
from jobkit.run.runs import find, identity_of, runs_in, versions
from jobkit.run.secrets import masked
from jobkit.run.status import State
from jobkit.submission.plan import LaunchPlan
from jobkit.usage import program

OPTION = "--from"

COMPARED = ("task", "command", "params", "seed", "precision", "parallel")
"""Keys whose differences between the two runs are printed."""

_ABSENT = "-"


@dataclass(frozen=True)
class Fork:
    """Which checkpoint of which run a new run begins with.

    fork = Fork.of("digits-11f5f19c@300", weights_only=False, runs_dir=runs_dir)
    transaction.submit(fork.at(plan), folder, prepare=fork.bring)
    """

    parent: RunDir
    """It may be gone: a run that has begun has its own copy."""
    step: int | None
    """None: the newest checkpoint."""
    weights_only: bool

    @classmethod
    def of(cls, word: str, *, weights_only: bool, runs_dir: Path) -> Fork:
        """Return the Fork of RUN or RUN@STEP. Raises InputError."""
        name, sign, step = word.rpartition("@") if "@" in word else (word, "", "")
        if sign and not (name and step.isdecimal()):
            raise InputError(key=OPTION, found=word, allowed="RUN or RUN@STEP, as digits-11f5f19c@300")
        return cls(_run_of(name, runs_dir), int(step) if sign else None, weights_only)

    @property
    def text(self) -> str:
        """The start, as text for the hash of the new run."""
        step = "" if self.step is None else f"@{self.step}"
        return f"{self.parent.name}{step}{' weights' if self.weights_only else ''}"

    def at(self, plan: LaunchPlan) -> LaunchPlan:
        """Return the plan for the run that has this start in its hash."""
        return plan.at(RunDir(plan.run.path.parent / run_name(plan.config, self.text)))

    def bring(self, plan: LaunchPlan) -> None:
        """Have the checkpoint in the run's own directory, and say so. Does nothing where it was there before.

        Raises InputError where the other run has no such checkpoint.
        """
        run = plan.run
        if run.start_file.exists():
            return
        if run.journal_file.exists():
            raise InputError("it is gone, and with it what the run began with", hint="--fresh").at(run.start_file)
        steps = self._steps()
        self._refuse_an_end(plan, steps[0])
        awaited = {other.path for other in predecessors(run, plan.config.after)}
        if self.step is None and self.parent.path in awaited and read_status(self.parent).state != State.FINISHED:
            words = f"{self.parent.name} is not finished: step {steps[0]}, its newest of now, is not its last"
            raise InputError(words, key=OPTION, hint=f"`{program('wait')} {self.parent.name}` first, or name the step")
        folder = run.start_folder if self.weights_only else run.checkpoints
        for step in steps:  # the other run may delete its oldest while it trains on
            shutil.rmtree(folder, ignore_errors=True)  # of a submission that was killed before there was a job
            source = self.parent.checkpoint(step)
            try:
                foreign = _link(source, folder / source.name)
            except FileNotFoundError:
                continue
            start = Origin(run=self.parent.name, path=str(self.parent.path), step=step, weights_only=self.weights_only)
            records.write(run.start_file, start)
            print(f"{run.name} {self.describe(plan, step)}{foreign}", file=sys.stderr)
            return
        raise InputError(f"{self.parent.name} has deleted it meanwhile", key=OPTION, found=self.text, hint="try again")

    def describe(self, plan: LaunchPlan, step: int) -> str:
        """Return a line about the checkpoint that the run begins with, and about differences in the config."""
        weights = " with the weights" if self.weights_only else ""
        words = f"starts{weights} from step {step} of {self.parent.name}"
        changed = [f"{key} {masked(before, key)} -> {masked(now, key)}" for key, before, now in self._differences(plan)]
        return f"{words}: {', '.join(changed)}" if changed else words

    def newest(self) -> int:
        """Return the step that a submission of now would take. Raises InputError."""
        return self._steps()[0]

    def _steps(self) -> list[int]:
        """The steps that may be taken, the best first."""
        parent = self.parent
        if not parent.exists():
            raise NoSuchRun(key=OPTION, found=parent.name, allowed=f"a run in {parent.path.parent}")
        if read_status(parent).is_older:
            raise InputError(f"an older jobkit made {parent.name}, with other checkpoints", key=OPTION, hint=HINT)
        steps = parent.durable_steps()
        if self.step is None and steps:
            return steps[::-1]
        if self.step in steps:
            return [self.step]
        problem = "no complete checkpoint" if self.step is None else f"no complete checkpoint of step {self.step}"
        hint = ""
        if not steps and read_yaml(parent.config_file)[0].get("command"):
            hint = "a command has checkpoints of jobkit's where its program calls jobkit.init"
        elif not steps and parent.final.exists():
            hint = f"its final weights are there: jobkit.open_run({str(parent.path)!r}).weights()"
        allowed = ", ".join(map(str, steps))
        raise InputError(f"{parent.name} has {problem}", key=OPTION, allowed=allowed and f"one of {allowed}", hint=hint)

    def _refuse_an_end(self, plan: LaunchPlan, step: int) -> None:
        """Refuse the last checkpoint of a finished run for a run that is no longer."""
        status = read_status(self.parent)
        last = max((attempt.ended.last_step or 0 for attempt in status.attempts if attempt.ended), default=None)
        is_end = status.state == State.FINISHED and step == last and not self.weights_only
        if is_end and not list(self._differences(plan)):
            problem = f"{self.parent.name} ended at step {step}, and nothing is changed: nothing is left to train"
            raise InputError(problem, key=OPTION, hint="params.steps=... for more steps, or --weights-only")

    def _differences(self, plan: LaunchPlan) -> Iterator[tuple[str, Any, Any]]:
        """Yield (key, the other run's value, the value here), as config.yaml has them: expressions stay hidden."""
        before, now = (
            dict(_leaves({key: values.get(key) for key in COMPARED}, ""))
            for values in (read_yaml(self.parent.config_file)[0], plan.loaded.written)
        )
        for key in [*now, *(key for key in before if key not in now)]:
            if before.get(key, _ABSENT) != now.get(key, _ABSENT):
                yield key, before.get(key, _ABSENT), now.get(key, _ABSENT)


def _leaves(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _leaves(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item


def _run_of(name: str, runs_dir: Path) -> RunDir:
    """The run that is meant; also one that was removed since, by its whole name or where runs have begun with it."""
    problem = InputError(key=OPTION, found=name, allowed="one run")
    try:
        runs = find([name], runs_dir)
    except NoSuchRun as error:
        if re.fullmatch(r"[^/]+-[0-9a-f]{8}(-\d+)?", name):
            return RunDir(runs_dir / name)
        runs, problem = [], error
    except InputError as error:
        # The same command again: by now the name is also the name of the run that the first one made.
        others = [run.name for run in find([f"{name}-*"], runs_dir) if not run.start_file.exists()]
        configs = {re.sub(r"(-[0-9a-f]{8})-\d+$", r"\1", other) for other in others}
        if len(configs) > 1:
            raise
        runs, problem = [run for config in configs for run in versions(runs_dir, config)[-1:]], error
    if all(run.start_file.exists() for run in runs):
        runs = _removed(name, runs_dir) or runs
    if len(runs) != 1:
        raise problem
    return runs[0]


def _removed(name: str, runs_dir: Path) -> list[RunDir]:
    """The removed runs of this name that other runs have begun with."""
    starts = filter(None, (run.start() for run in runs_in(runs_dir)))
    parents = {RunDir(start.path).path for start in starts if identity_of(start.run)[:-9] == name}
    return [RunDir(path) for path in parents if path.parent == runs_dir and not path.exists()]


def _link(source: Path, target: Path) -> str:
    """Make a checkpoint's files those of a folder too; copies on another disk, or of another user's files.

    Returns words about another user's pickles. Raises FileNotFoundError where the checkpoint goes away meanwhile.
    """
    owner = foreign_owner(source)
    unfinished = target.with_name(f".{target.name}.from")
    unfinished.mkdir(parents=True)
    for parent, folders, files in os.walk(source):
        copy = unfinished / Path(parent).relative_to(source)
        for name in folders:
            (copy / name).mkdir()
        for name in files:
            _link_file(Path(parent, name), copy / name, may_link=owner is None)
        sync_folder(copy)
    manifest = read_json(source / "manifest.json")  # still there: nothing was missed
    if manifest is None:
        raise FileNotFoundError(source)
    unfinished.rename(target)
    sync_folder(target.parent)
    if owner is None or not (manifest.get("pickled") or manifest.get("files")):
        return ""
    return f"; it holds pickled objects of {owner}, which can run code when they are read"


def _link_file(source: Path, target: Path, *, may_link: bool) -> None:
    if may_link:
        try:
            os.link(source, target)
            return
        except FileNotFoundError:
            raise
        except OSError:  # another disk, or one without links
            pass
    shutil.copyfile(source, target)
    sync_file(target)
