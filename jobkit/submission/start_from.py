"""`--from RUN@STEP`: which checkpoint of which run is meant, and a copy of it that nothing happens to any more."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobkit.checkpoint.store import Store
from jobkit.errors import CheckpointError, InputError, InvalidValue
from jobkit.log import log
from jobkit.run.choose import find_run
from jobkit.run.config import Config, StartFrom
from jobkit.run.differences import DECIDES, differences
from jobkit.run.events import Event
from jobkit.run.identity import name_in
from jobkit.run.rundir import RunDir
from jobkit.run.silent import is_silent


def with_start(
    config: Config, asked: str, *, weights_only: bool, runs_dir: Path, fresh: bool = False
) -> tuple[Config, RunDir]:
    """`config` as that of a run that starts from `RUN` or `RUN@STEP`, and the run that is meant.

    Without a step it is that of a run which has started so before, unless `fresh`; else the newest that verifies.
    Raises InputError where there is no such run or checkpoint.
    """
    name, step = _split(asked)
    config = dataclasses.replace(config, start_from=StartFrom(run="any", weights_only=weights_only))
    try:
        parent = find_run(name, runs_dir)
    except InputError:
        start = StartFrom(run=name, step=step or 0, weights_only=weights_only)
        if step is None or not _has_copy(_as(config, start), runs_dir):
            raise
        return _as(config, start), RunDir(runs_dir / name)  # it may be gone: the new run has what it needs
    start = StartFrom(run=parent.name, step=step or 0, weights_only=weights_only)
    if step is None:
        known = [] if fresh else [one for one in _steps_so_far(parent) if _has_copy(_at(config, start, one), runs_dir)]
        step = known[0] if known else _newest(parent)
    return _at(config, start, step), parent


def check(config: Config, run: RunDir, parent: RunDir | None) -> None:
    """Raise InvalidValue where a run could not begin with what its config starts from; nothing is written.

    Says so where it has begun with another checkpoint than the one that is there now: its name is the same.

    `parent` is the run that the checkpoint is of, where it was named by the command line.
    """
    start = config.start_from
    if not start.run:
        return
    parent = parent or RunDir(run.path.parent / start.run)
    if (copies := _copies(run)).has(start.step):
        if _are_others(copies, _store(parent), start.step):
            text = "%s has begun with another checkpoint of step %d than %s has now: --fresh begins with that one"
            log.warning(text, run.name, start.step, parent.path)
        return
    if not parent.exists():
        raise InvalidValue("start_from.run", f"no run {start.run!r} in {run.path.parent}")
    if start.step not in (steps := _store(parent).steps()):
        raise InvalidValue("start_from.step", f"{_no_step(parent, start.step, steps)}")


def bring(config: Config, run: RunDir, parent: RunDir | None) -> str:
    """Have the checkpoint in the run's own directory; returns what to tell of it, empty where it is there already.

    Raises InputError, with nothing left of it, where it is damaged or was removed meanwhile.
    """
    start = config.start_from
    if not start.run or (copies := _copies(run)).has(start.step):
        return ""
    parent = parent or RunDir(run.path.parent / start.run)
    try:
        copies.take_over(_store(parent), start.step)
    except (CheckpointError, FileNotFoundError) as error:
        raise InputError(f"step {start.step} of {parent.name} cannot be started from: {error}") from None
    changed = ", ".join(map(str, differences(parent.config(), config, DECIDES)))
    return f"{run.name}: starts from {start}{_what(copies, start)}{f'; {changed}' if changed else ''}"


def entry(config: Config) -> dict[str, Any]:
    """What the journal says of it."""
    return {"start_from": dataclasses.asdict(config.start_from)} if config.start_from.run else {}


def _what(copies: Store, start: StartFrom) -> str:
    """` (model, optimizer, loader)`: what is taken, as far as the checkpoint says."""
    taken = copies.manifest(start.step).extra.get("modules" if start.weights_only else "tracked")
    return f" ({', '.join(map(str, taken))})" if taken else ""


def _split(asked: str) -> tuple[str, int | None]:
    name, sign, step = asked.rpartition("@")
    if not sign:
        return asked, None
    if not name or not step.isdecimal():
        raise InputError(f"--from {asked}: expected RUN or RUN@STEP, as in digits-11f5f19c@300")
    return name, int(step)


def _as(config: Config, start: StartFrom) -> Config:
    return dataclasses.replace(config, start_from=start)


def _at(config: Config, start: StartFrom, step: int) -> Config:
    return _as(config, dataclasses.replace(start, step=step))


def _has_copy(config: Config, runs_dir: Path) -> bool:
    """Whether there is a run that has started so."""
    return _copies(RunDir(runs_dir / name_in(runs_dir, config))).has(config.start_from.step)


def _steps_so_far(parent: RunDir) -> list[int]:
    """The steps of all checkpoints that a run has ever had, the newest first."""
    with contextlib.suppress(OSError):
        journalled = {int(one["step"]) for one in parent.journal.read() if one["event"] == Event.CHECKPOINT}
        return sorted(journalled.union(_store(parent).steps()), reverse=True)
    return _store(parent).steps()


def _are_others(copies: Store, now: Store, step: int) -> bool:
    """Whether two checkpoints of a step are there, and are not the same: the run was trained anew, or is another's."""
    with contextlib.suppress(CheckpointError, OSError):
        return copies.manifest(step).files != now.manifest(step).files
    return False


def _newest(parent: RunDir) -> int:
    """The step of the newest checkpoint that verifies."""
    store = _store(parent)
    for step in store.steps():
        if not store.verify(step):
            return step
    raise InputError(f"--from {parent.name}: {_no_step(parent, None, store.steps())}")


def _no_step(parent: RunDir, step: int | None, steps: Sequence[int]) -> str:
    of = "" if step is None else f" of step {step}"
    if is_silent(parent, parent.status()):
        return f"{parent.name} has no checkpoint{of}: its command calls no jobkit.init, so jobkit keeps none"
    there = ", ".join(map(str, sorted(steps)))
    known = f" (it has: {there})" if steps and step is not None else ", or none that is whole" if steps else ""
    return f"{parent.name} has no checkpoint{of}{known}"


def _store(run: RunDir) -> Store:
    return Store(run.checkpoints, missing_seconds=0)


def _copies(run: RunDir) -> Store:
    return Store(run.start_from, missing_seconds=0)
