"""From a YAML and `key=value` words to a Config: the only code that walks the tree of config values.

    user's file of clusters ─┐
    YAML ─ demo ─ overrides ─┴─> interpolation (OmegaConf) ─> Loaded: .config   all values, for the submission
                                                                      .written  what config.yaml holds
    config.yaml of a run ─ read_resolved ─> Config                    (supervisor, ranks: the environment is read again)

`${oc.env:X}` stays an expression in config.yaml, so that a secret in the environment is never on the disk. `${run_dir}`
stays a text until a rank knows its directory (`with_run_dir`). Every error is an InputError with file, line and key.
The submission, a rank and every command that reads a config call it.
"""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from jobkit.config import overrides as overriding
from jobkit.config.interpolation import RUN_DIR, KeyPath, resolve
from jobkit.config.overrides import keys_below, with_value
from jobkit.config.schema import ALL, AUTO, DROPPED, PARALLEL_WORDS, SECTIONS, Config, seed_of
from jobkit.config.strict import build
from jobkit.config.yamlfile import COMMAND_LINE, KeyLocations, read_yaml
from jobkit.errors import InputError, nearest
from jobkit.log import log


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A config, and how it came to be.

    A submission that changes the config (`auto` as a number) keeps the rest: `dataclasses.replace(loaded, config=...)`.
    """

    config: Config
    places: KeyLocations
    notes: list[str]
    """Lines for the user."""
    expressions: dict[KeyPath, tuple[str, Any]]
    """The values that config.yaml holds as an expression: the expression, and its present value."""

    @property
    def written(self) -> dict[str, Any]:
        """The content of config.yaml, for `yamlfile.dump`."""
        values = {**dataclasses.asdict(self.config), "seed": self.config.random_seed}
        for path, (expression, value) in self.expressions.items():
            try:
                parent: Any = reduce(operator.getitem, path[:-1], values)  # type: ignore[arg-type]
                if parent[path[-1]] == value:
                    parent[path[-1]] = expression
            except (KeyError, TypeError):  # an option that is null, a short form: written without the expression
                continue
        return values

    def locate(self, error: InputError) -> InputError:
        """The error of a later check, with file and line of its key."""
        return self.places.locate(error)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A YAML with demo and `key=value`, before interpolation: what all points of a sweep have in common.

    source = read_source(Path("toy.yaml"), ["params.steps=100"])
    source.loaded([("params.lr=.01", "points.csv:2, column 1")]).config.params
    """

    values: dict[str, Any]
    places: KeyLocations
    notes: list[str]
    typed: list[str]
    """The keys that the command line sets."""
    sweep: Any
    """The value under `sweep:`, unchecked; None without such a key."""
    is_own: bool = False
    """True for a run's own config.yaml, which another jobkit may have written: keys that this one lacks are ignored."""

    def loaded(self, words: Sequence[tuple[str, str]] = ()) -> Loaded:
        """The config with `key=value` words of a point, each with its place for errors. Raises InputError."""
        values, typed = self.values, list(self.typed)
        places = KeyLocations(self.places.file, dict(self.places.by_key))
        with places.locating():
            for text, place in words:
                values, keys = overriding.apply(text, values, place)
                places.by_key |= dict.fromkeys(keys, (place, None))
                typed += keys
            if not self.is_own:
                _refuse_dropped(values)
            resolved, expressions = _resolved(values)
            _refuse_sections_in_params(resolved.get("params"))
            config = _config(resolved, places.file if self.is_own else None)
        clusters = {name: _options_of(name, entry, typed) for name, entry in config.clusters.items()}
        config = dataclasses.replace(config, clusters=clusters)
        return Loaded(config=config, places=places, notes=self.notes, expressions=expressions)


def load(path: Path, overrides: Sequence[str] = (), program: Sequence[str] = (), *, is_own: bool = False) -> Loaded:
    """The config of a YAML: demo, then `key=value` of the command line, then interpolation and checks.

    `program` is the `command:` of a YAML that has neither that nor a `task:`; `is_own`: see Source. Raises InputError
    with file, line and key.
    """
    return dataclasses.replace(read_source(path, overrides, program), is_own=is_own).loaded()


def read_source(path: Path, overrides: Sequence[str] = (), program: Sequence[str] = ()) -> Source:
    """The values of a YAML for `load`, which points of a sweep may change. Raises InputError."""
    (users, users_places), (values, places) = read_user_file(), read_yaml(path)
    places.by_key = users_places.by_key | places.by_key
    notes, typed = [], []
    with places.locating():
        sweep, demo = values.pop("sweep", None), values.pop("demo", None)
        if demo is not None and (variable := _variable_without(demo)):
            values = with_value(values, [], {key: value for key, value in demo.items() if key != "unless_env"})
            notes.append(f"{variable} is not set: using the small recipe (`demo:` in {path})")
            places.by_key |= {
                key.removeprefix("demo."): place for key, place in places.by_key.items() if key.startswith("demo.")
            }
        entries = values.get("clusters", {})
        if isinstance(entries, dict):  # else the schema refuses it
            values["clusters"] = {**users.get("clusters", {}), **entries}
        for text in overrides:
            values, keys = overriding.apply(text, values)
            places.by_key |= dict.fromkeys(keys, (COMMAND_LINE, None))
            typed += keys
        if program and not (values.get("task") or values.get("command")):
            values["command"] = list(program)
    return Source(values=values, places=places, notes=notes, typed=typed, sweep=sweep)


def read_resolved(path: Path) -> Config:
    """The Config in a run's config.yaml, with the present values of the environment.

    Raises InputError; for a variable that is not set it names the variable. Raises OSError where the disk is away.
    """
    values, places = read_yaml(path)
    with places.locating():
        return _config(resolve(values)[0], path)


def with_run_dir(value: Any, run_dir: Path) -> Any:
    """A value of `params` or `command` with the path in the place of `${run_dir}`."""
    if isinstance(value, str):
        return value.replace(RUN_DIR, str(run_dir))
    if isinstance(value, Mapping):
        return {key: with_run_dir(item, run_dir) for key, item in value.items()}
    return [with_run_dir(item, run_dir) for item in value] if isinstance(value, list) else value


# The user's own file


def user_file_path() -> Path:
    """The user's own file: $JOBKIT_CONFIG, else jobkit/config.yaml below $XDG_CONFIG_HOME or ~/.config."""
    if path := os.environ.get("JOBKIT_CONFIG"):
        return Path(path)
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 - a user may have no home
    return Path(base, "jobkit", "config.yaml")


@dataclass(frozen=True, kw_only=True)
class _UserFile:
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_user_file() -> tuple[dict[str, Any], KeyLocations]:
    """The user's own file, with `clusters` for all projects. Empty if there is none."""
    path = user_file_path()
    if not os.path.exists(path):  # noqa: PTH110 - that one raises in a home of another user's
        return {}, KeyLocations(path)
    values, places = read_yaml(path)
    with places.locating():
        _refuse_dropped(values)
        build(_UserFile, values)
    return values, places


# Steps on the way to a Config


def _variable_without(demo: Any) -> str:
    """The variable of `unless_env` if it is not set, so that the demo applies; else an empty text."""
    variable = demo.get("unless_env") if isinstance(demo, dict) else None
    if not isinstance(variable, str):
        raise InputError(key="demo", found=demo, allowed="a mapping with `unless_env: NAME`, an environment variable")
    return "" if os.environ.get(variable) else variable


def _resolved(values: dict[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, tuple[str, Any]]]:
    """What `resolve` returns, with a number for `${seed}` also where nobody wrote one."""
    if values.get("seed", AUTO) != AUTO:
        return resolve(values)
    resolved, expressions = resolve({**values, "seed": 0})
    if seed := seed_of(resolved.get("params")):
        resolved, expressions = resolve({**values, "seed": seed})
    return {**resolved, "seed": AUTO}, expressions


def _config(values: dict[str, Any], kept_file: Path | str | None = None) -> Config:
    """The Config of resolved values, with its short forms written out. Raises InputError.

    Of a run's `own` file unknown keys are no error: no person typed them.
    """
    unknown: list[str] = []
    config = build(Config, _in_full(values), unknown=None if kept_file is None else unknown)
    if unknown:
        log.info("%s: not keys of this jobkit, and ignored: %s", kept_file, ", ".join(unknown))
    if config.task and config.command:
        raise InputError("there is a task as well; a run has one of them", key="command")
    if not (config.task or config.command):
        raise InputError("missing; it is required (or command: [python, train.py])", key="task")
    return config


def _in_full(values: dict[str, Any]) -> dict[str, Any]:
    """`parallel: zero3` as a mapping, numbers of a command as texts, `after: RUN` as a list, and GPUs for ranks of
    which there are as many as GPUs."""
    command, after, word = values.get("command"), values.get("after"), values.get("parallel")
    if isinstance(command, str):
        raise InputError(key="command", found=command, allowed=f"a list: [{', '.join(command.split())}]")
    if isinstance(command, list):
        values = {**values, "command": [str(part) if type(part) in (int, float) else part for part in command]}
    if isinstance(after, str):
        values = {**values, "after": [after]}
    resources = values.get("resources")
    if isinstance(resources, dict) and resources.get("tasks_per_node") == AUTO:
        values = {**values, "resources": {"gpus_per_task": AUTO, **resources}}
    if not isinstance(word, str):
        return values
    if word not in PARALLEL_WORDS:
        allowed = f"{', '.join(PARALLEL_WORDS)}, or a mapping of data, tensor, pipeline"
        raise InputError(key="parallel", found=word, allowed=allowed, hint=nearest(word, PARALLEL_WORDS))
    return {**values, "parallel": {word: ALL} if word in ("tensor", "pipeline") else {"data": word}}


def _refuse_dropped(values: Mapping[str, Any]) -> None:
    for key in keys_below(values):
        if key in DROPPED:
            raise InputError("no longer a key", key=key, hint=DROPPED[key])


def _refuse_sections_in_params(params: Any) -> None:
    """Refuse `resources:` and the like that were indented under `params:`, where they have no effect."""
    for name, keys in SECTIONS.items():
        inner = params.get(name) if isinstance(params, Mapping) else None
        if isinstance(inner, Mapping) and any(key in keys for key in inner):
            hint = "put it at the beginning of a line; a param of your own needs another name"
            raise InputError(f"{name} has no effect below params", key=f"params.{name}", hint=hint)


def _options_of(cluster: str, entry: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """A cluster's entry without options that are null, and without `resources` that were typed: these hold wherever the
    run goes."""
    names = {key.removeprefix("resources.") for key in typed if key.startswith("resources.")}
    return {
        name: value
        for name, value in entry.items()
        if value is not None and (str(name).replace("-", "_") not in names or f"clusters.{cluster}.{name}" in typed)
    }
