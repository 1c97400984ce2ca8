"""`--from RUN@STEP`: which checkpoint of which run is meant, and a copy of it that nothing happens to any more."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.checkpoint.store import Store
from jobkit.errors import CheckpointError, InputError, InvalidValue
from jobkit.log import log
from jobkit.run import records
from jobkit.run.choose import find_run
from jobkit.run.config import Config, StartFrom
from jobkit.run.differences import ABSENT, DECIDES, differences
from jobkit.run.experiment import LoadedConfig
from jobkit.run.given import as_typed, keys_of, values_of, without
from jobkit.run.identity import name_in
from jobkit.run.overrides import masked
from jobkit.run.records import GivenValues
from jobkit.run.rundir import RunDir
from jobkit.run.silent import is_silent

Load = Callable[[Sequence[str]], LoadedConfig]
"""Makes the config with some `key=value` put between the YAML and what was typed."""


@dataclass(frozen=True)
class Start:
    """The config of a run that starts from another, and where that comes from."""

    loaded: LoadedConfig
    parent: RunDir | None = None
    """The run that it starts from, which may be gone; None where none was named."""
    inherited: tuple[str, ...] = ()
    """The `key=value` that the other run was given, and which hold here."""


def with_start(
    load: Load, typed: Sequence[str], asked: str, *, weights_only: bool, runs_dir: Path, fresh: bool = False
) -> Start:
    """The config as that of a run that starts from `RUN` or `RUN@STEP`.

    What that run was given by its command line, its sweep or the run that it started from itself holds here, too, but
    for the keys of the `key=value` that are `typed`. Where a run has started so before, its step and values are taken,
    unless `fresh`; else without a step the newest that verifies. Raises InputError where there is no such run or
    checkpoint.
    """
    name, step = _split(asked)
    try:
        parent, problem = find_run(name, runs_dir), None
    except InputError as error:
        parent, problem = RunDir(runs_dir / name), error  # it may be gone: a run that has begun has what it needs
    plain = load([]).config
    if not fresh:
        own = set(keys_of(typed))
        for one in _begun(plain.name, runs_dir):
            start = one.start
            if (start.run, start.weights_only) != (parent.name, weights_only) or step not in (None, start.step):
                continue
            if not one.typed <= own:  # of a key that is not typed now the first run's value holds, not that one's
                continue
            with contextlib.suppress(InputError):  # that one was typed in another way
                values = without(typed, values_of(one.run.config(), one.inherited))
                found = _with_values(load, plain, parent, start, values)
                if _copies(RunDir(runs_dir / name_in(runs_dir, found.loaded.config))).has(start.step):
                    return found
    if problem is not None:
        raise problem
    step = _newest(parent) if step is None else step
    start = StartFrom(run=parent.name, step=step, weights_only=weights_only)
    before = given_to(parent)
    values = values_of(parent.config(), before.values) if before else {}
    begun = _with_values(load, plain, parent, start, without(typed, values))
    if added := [text for text in begun.inherited if text.startswith("+")]:
        text = "%s was given %s, which the YAML does not have: added; where it has another name now, set that"
        log.warning(text, parent.name, _shown(added))
    return begun


def given_to(run: RunDir) -> GivenValues | None:
    """What a run was given beside its YAML; None where an earlier jobkit has made it."""
    found = run.status().given
    return None if found is None else records.of(GivenValues, found)


def _with_values(load: Load, plain: Config, parent: RunDir, start: StartFrom, values: Mapping[str, Any]) -> Start:
    texts = as_typed(values, plain)
    try:
        loaded = load(texts)
    except InputError as error:  # not of what was typed: `plain` has that
        raise InputError(f"{error}; {parent.name} was given {_shown(texts)}: give another value") from None
    return Start(dataclasses.replace(loaded, config=_as(loaded.config, start)), parent, tuple(texts))


@dataclass(frozen=True)
class _Begun:
    """How a run has started from another."""

    start: StartFrom
    inherited: tuple[str, ...]
    """The keys that it has from there."""
    typed: frozenset[str]
    """Those that it was given itself; none where an earlier jobkit has made it."""
    run: RunDir = field(compare=False)


def _begun(name: str, runs_dir: Path) -> list[_Begun]:
    """The runs with a name in their config that have started from others, one of those that have done so in the same
    way; those of the highest steps first."""
    found: dict[_Begun, _Begun] = {}
    for folder in runs_dir.glob(f"{name}-*/start_from"):
        run = RunDir(folder.parent)
        with contextlib.suppress(InputError, OSError, TypeError):  # what is there may be damaged
            status = run.status()
            start = StartFrom(**status.start_from) if status.start_from else run.config().start_from
            given = records.of(GivenValues, status.given) if status.given else GivenValues()
            own = given.values.keys() - set(given.inherited)
            typed = frozenset(key for key in own if not key.startswith("start_from."))
            one = _Begun(start, tuple(given.inherited), typed, run)
            found.setdefault(one, one)
    return sorted(found.values(), key=lambda one: -one.start.step)


def check(config: Config, run: RunDir, parent: RunDir | None) -> None:
    """Raise InvalidValue where a run could not begin with what its config starts from; nothing is written.

    Says so where it has begun with another checkpoint than the one that is there now: its name is the same.

    `parent` is the run that the checkpoint is of, where it was named by the command line.
    """
    start = config.start_from
    if not start.run:
        return
    is_named, parent = parent is not None, parent or RunDir(run.path.parent / start.run)
    if (copies := _copies(run)).has(start.step):
        if _are_others(copies, _store(parent), start.step):
            text = "%s has begun with another checkpoint of step %d than %s has now: --fresh begins with that one"
            log.warning(text, run.name, start.step, parent.path)
        return
    if not parent.exists():
        raise InvalidValue("start_from.run", f"no run {start.run!r} in {run.path.parent}")
    if start.step not in (steps := _store(parent).steps()):
        problem = _no_step(parent, start.step, steps)
        raise InputError(f"--from: {problem}") if is_named else InvalidValue("start_from.step", problem)


def bring(config: Config, run: RunDir, parent: RunDir | None, given: GivenValues, code: str) -> str:
    """Have the checkpoint in the run's own directory; returns what to tell of it, empty where it is there already.

    `code` is the version of the code that the run has. Raises InputError, with nothing left of it, where it is damaged
    or was removed meanwhile, or where nothing is left to train.
    """
    start = config.start_from
    if not start.run or (copies := _copies(run)).has(start.step):
        return ""
    parent = parent or RunDir(run.path.parent / start.run)
    told = describe(config, parent, given)
    if parent.exists() and not start.weights_only and _has_nothing_left(config, parent, code):
        more = "let it have more steps, or take the weights alone, with --weights-only"
        raise InputError(
            f"{parent.name} has trained to its end at step {start.step}, and {run.name} is no longer: {more}"
        )
    try:
        copies.take_over(_store(parent), start.step)
    except (CheckpointError, FileNotFoundError) as error:
        raise InputError(f"step {start.step} of {parent.name} cannot be started from: {error}") from None
    return f"{run.name}: {told}"


def _has_nothing_left(config: Config, parent: RunDir, code: str) -> bool:
    """Whether a run computes the same as the one that it starts from, which has come to its end there."""
    status = parent.status()
    is_end = status.total_steps == config.start_from.step and status.code == code
    return is_end and not differences(parent.config(), config, DECIDES)


def describe(config: Config, parent: RunDir | None, given: GivenValues, besides: Collection[str] = ()) -> str:
    """What a run that starts from another takes, has as there, and has differently `besides` some keys, in a line.

    Empty where it starts from none, or that is gone.
    """
    if parent is None or not parent.exists():
        return ""
    start = config.start_from
    what = f"starts from {start}{_what(_store(parent), start)}"
    if given.inherited:
        what += f"; as there: {_shown(as_typed(values_of(config, given.inherited), config))}"
    changed = [one for one in differences(parent.config(), config, DECIDES) if one.key not in besides]
    if changed:
        what += f"; {', '.join(map(str, changed))}"
    if given_to(parent) is None:
        program = ("task", "command")
        of_yaml = [one for one in changed if one.key not in given.values and one.key not in program]
        kept = [one.key for one in of_yaml if one.before is not ABSENT]
        if texts := as_typed(values_of(parent.config(), kept), config):
            what += f"; to have it as there, type {_shown(texts)}"
    return what


def entry(config: Config) -> dict[str, Any]:
    """What the journal says of it."""
    return {"start_from": dataclasses.asdict(config.start_from)} if config.start_from.run else {}


def _what(copies: Store, start: StartFrom) -> str:
    """` (model, optimizer, loader)`: what is taken, as far as the checkpoint says."""
    taken = None
    with contextlib.suppress(CheckpointError, OSError):  # whoever takes it over says what is wrong with it
        taken = copies.manifest(start.step).extra.get("modules" if start.weights_only else "tracked")
    return f" ({', '.join(map(str, taken))})" if taken else ""


def _split(asked: str) -> tuple[str, int | None]:
    name, sign, step = asked.rpartition("@")
    if not sign:
        return asked, None
    if not name or not step.isdecimal():
        raise InputError(f"--from {asked}: expected RUN or RUN@STEP, as in digits-11f5f19c@300")
    return name, int(step)


def _shown(texts: Sequence[str]) -> str:
    """`key=value`s as others may see them, and as they can be typed."""
    return shlex.join(masked(text).removeprefix("+") for text in texts)


def _as(config: Config, start: StartFrom) -> Config:
    return dataclasses.replace(config, start_from=start)


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
