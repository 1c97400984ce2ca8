"""Which runs a submission comes after: found by their names, checked, and told to Slurm."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jobkit.errors import InputError, InvalidValue, JobkitError
from jobkit.log import log
from jobkit.run import references
from jobkit.run.choose import find_run
from jobkit.run.command_line import to_type
from jobkit.run.dependencies import dependents, note_dependent, runs_before, verdict
from jobkit.run.events import Event
from jobkit.run.experiment import LoadedConfig
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission.options import with_dependency
from jobkit.submission.plan import LaunchPlan
from jobkit.supervisor.dependents import dependency_of


def with_whole_names(
    loaded: LoadedConfig, words: Sequence[str], runs_dir: Path, find: Callable[[str, Path], RunDir] = find_run
) -> LoadedConfig:
    """The config with whole names of the runs that it refers to and comes after; `words` are those of `--after`.

    A run comes after each run that it refers to. Raises InputError for a name that means no run, or several.
    """
    config = loaded.config

    def whole(key: str, word: str) -> str:
        try:
            run = find(word, runs_dir)
        except InputError as error:
            raise InvalidValue(key, str(error)) from None
        return run.name if run.path.parent == runs_dir else str(run.path)

    with loaded.places.locating_errors():
        config = references.with_names(config, whole)
        after = [whole("after", word) for word in config.after]
    after += [find(word, runs_dir).name for word in words]
    for _, text in references.texts_with_references(config):
        after += references.named_in(text)
    return dataclasses.replace(loaded, config=dataclasses.replace(config, after=list(dict.fromkeys(after))))


def check(plan: LaunchPlan) -> None:
    """Refuse a run that could never start. Raises InvalidValue."""
    own = RunDir(plan.run)
    has_begun = own.exists() and bool(own.status().attempts)
    for run in runs_before(own, plan.config.after):
        if not run.exists() and (has_begun or run.name in plan.expected):
            continue  # it has what it needs of that, or that comes first
        if not run.exists():
            raise InvalidValue("after", f"found {run.name}: there is no such run in {run.path.parent}")
        if _comes_after(run, own, set()):
            raise InvalidValue("after", f"found {run.name}: that one comes after this one, {own.name}; leave one out")
        status = run.status()
        if status.state == State.CANCELLED and not has_begun:
            raise InvalidValue("after", f"found {run.name}, which is cancelled: {to_type('resume', run.name)} first")
        if plan.scheduler == "slurm" and status.state.is_under_way and status.scheduler != "slurm":
            raise InvalidValue("after", f"found {run.name}, which is not on Slurm: submit both to one place")


def _comes_after(run: RunDir, other: RunDir, seen: set[Path]) -> bool:
    """Whether a run waits for another one, over however many."""
    if run.path == other.path:
        return True
    seen.add(run.path)
    with contextlib.suppress(JobkitError, OSError):
        before = [one for one in runs_before(run, run.config().after) if one.path not in seen]
        return any(_comes_after(one, other, seen) for one in before)
    return False


def prepared(plan: LaunchPlan) -> LaunchPlan:
    """The plan with what Slurm is to wait for, or as one whose job is held; the other runs get to know who waits for
    them."""
    run = RunDir(plan.run)
    found = verdict(run, plan.config.after)
    for other in runs_before(run, plan.config.after):  # finished ones, too: whoever removes them is to know
        with contextlib.suppress(OSError):  # another user's: the job itself looks, when it starts
            note_dependent(other, run)
    if plan.scheduler != "slurm" or not found.unfinished:
        return plan
    follows = found.are_under_way and dependency_of(found)
    if not follows:
        return dataclasses.replace(plan, is_held="hold" not in plan.parameters.get("additional_parameters", {}))
    return dataclasses.replace(plan, parameters=with_dependency(plan.parameters, follows))


def cancel_dependents(
    run: RunDir, cancel_all: Callable[[Sequence[RunDir]], Iterator[tuple[RunDir, Status | JobkitError | None]]]
) -> None:
    """Cancel what waits on Slurm for a run that was cancelled; what waits on this machine finds it out by itself."""
    for other, outcome in cancel_all([one for one in dependents(run) if _waits_on_slurm(one)]):
        try:
            if isinstance(outcome, JobkitError):
                raise outcome
            if outcome is not None and outcome.state == State.CANCELLED:
                other.record(Event.CANCELLED, error=f"it comes after {run.name}, which was cancelled")
        except (JobkitError, OSError) as error:
            log.warning("%s comes after %s, and could not be cancelled: %s", other.name, run.name, error)


def _waits_on_slurm(run: RunDir) -> bool:
    try:
        status = run.status()
    except OSError as error:
        log.warning("%s: whether it waits cannot be read: %s", run.name, error)
        return False
    return status.scheduler == "slurm" and status.state == State.QUEUED and not status.attempts
