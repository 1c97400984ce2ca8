"""From a YAML and `key=value` words to a Config: the only code that walks the tree of config values.

    user's file of clusters ─┐
    YAML ─ demo ─ overrides ─┴─> interpolation (OmegaConf) ─> Loaded: .config   all values, for the submission
                                                                      .written  what config.yaml holds
    config.yaml of a run ─ read_resolved ─> Config                    (supervisor, ranks: the environment is read again)

`${oc.env:X}` stays an expression in config.yaml, so that a secret in the environment is never on the disk. `${run_dir}`
stays a text until a rank knows its directory (`with_run_dir`). Every error is an InputError with file, line and key.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.errors import InputError, nearest
from jobkit.run import overrides as overriding
from jobkit.run.interpolation import RUN_DIR, KeyPath, at, resolve
from jobkit.run.overrides import COMMAND_LINE, refuse_bare_none, with_value
from jobkit.run.schema import ALL, AUTO, DROPPED, PARALLEL_WORDS, SECTIONS, Config
from jobkit.run.strict import build
from jobkit.run.yamlfile import Document, read_yaml


@dataclass
class Places:
    """Where each value of a config was written: the file and line in front of every error about it."""

    path: Path
    by_key: dict[str, tuple[Path | str, int | None]] = field(default_factory=dict)

    def add(self, place: Path | str, lines: Mapping[str, int | None], below: str = "") -> None:
        """Note the lines of keys at a place; `below` is a prefix that the loader takes away, as `demo.`."""
        self.by_key |= {key[len(below) :]: (place, line) for key, line in lines.items() if key.startswith(below)}

    def locate(self, error: InputError) -> InputError:
        """The error with the file and line of its key, or of the nearest key above it that somebody wrote."""
        key = error.key
        while key and key not in self.by_key:
            key = key.rpartition(".")[0]
        return error.at(*self.by_key.get(key, (self.path, None)))


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A config, and how it came to be.

    A submission that changes the config (`auto` as a number) keeps the rest: `dataclasses.replace(loaded, config=...)`.
    """

    config: Config
    places: Places
    notes: list[str] = field(default_factory=list)
    """Lines for the user."""
    sweep: Any = None
    """The value under `sweep:`, unchecked; None without such a key."""
    typed: list[str] = field(default_factory=list)
    """Dotted keys that the command line or a point of a sweep has set."""
    expressions: dict[KeyPath, tuple[str, Any]] = field(default_factory=dict)
    """The values that config.yaml holds as an expression: the expression, and its present value."""

    @property
    def written(self) -> dict[str, Any]:
        """The content of config.yaml, for `yamlfile.dump`."""
        values = dataclasses.asdict(self.config)
        for path, (expression, value) in self.expressions.items():
            parent = at(values, path[:-1])
            if at(values, path) == value and parent is not None:
                parent[path[-1]] = expression
        return values

    def locate(self, error: InputError) -> InputError:
        """The error of a later check, with file and line of its key."""
        return self.places.locate(error)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A YAML that was read once, for the many configs of a sweep."""

    values: dict[str, Any]
    """Its demo is merged where that applies; `sweep:` and `demo:` are taken out."""
    places: Places
    notes: list[str]
    sweep: Any

    def load(self, overrides: Sequence[str] = (), point: Sequence[str] = (), place: str = COMMAND_LINE) -> Loaded:
        """The config with the `key=value` of the command line, then those of a sweep's point, written at `place`."""
        values, typed = self.values, []
        places = Places(self.places.path, dict(self.places.by_key))
        words = [(text, COMMAND_LINE) for text in overrides] + [(text, place) for text in point]
        try:
            for text, where in words:
                override = overriding.parse(text, where)
                typed += override.keys
                places.add(where, dict.fromkeys(override.keys))
                values = overriding.apply(override, values)
            resolved, expressions = resolve(values)
            _refuse_sections_in_params(resolved.get("params"))
            config = _config(resolved)
        except InputError as error:
            raise places.locate(error) from None
        clusters = {name: _options_of(name, entry, typed) for name, entry in config.clusters.items()}
        return Loaded(
            config=dataclasses.replace(config, clusters=clusters),
            places=places,
            notes=self.notes,
            sweep=self.sweep,
            typed=typed,
            expressions=expressions,
        )


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """The config of a YAML: demo, then overrides, then interpolation and checks.

    Raises InputError with file, line and key.
    """
    return read_experiment(path).load(overrides)


def read_experiment(path: Path) -> Experiment:
    """The experiment in a YAML, with the clusters of the user's own file. Raises InputError."""
    user_file, document, places = read_user_file(), read_yaml(path), Places(path)
    places.add(user_file_path(), {**user_file.lines})
    places.add(path, {**document.lines})
    values, notes = dict(document.value), []
    try:
        refuse_bare_none(document.bare_none)
        sweep, demo = values.pop("sweep", None), values.pop("demo", None)
        if demo is not None and (variable := _variable_without(demo)):
            values = with_value(values, [], {key: value for key, value in demo.items() if key != "unless_env"})
            notes.append(f"{variable} is not set: using the small recipe (`demo:` in {path})")
            places.add(path, {**document.lines}, below="demo.")
        entries = values.get("clusters", {})
        if isinstance(entries, dict):  # else the schema refuses it
            values["clusters"] = {**user_file.value.get("clusters", {}), **entries}
    except InputError as error:
        raise places.locate(error) from None
    return Experiment(values=values, places=places, notes=notes, sweep=sweep)


def read_resolved(path: Path) -> Config:
    """The Config in a run's config.yaml, with the present values of the environment.

    Raises InputError; for a variable that is not set it names the variable.
    """
    document, places = read_yaml(path), Places(path)
    places.add(path, {**document.lines})
    try:
        return _config(resolve(document.value)[0])
    except InputError as error:
        raise places.locate(error) from None


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
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "jobkit" / "config.yaml"


@dataclass(frozen=True, kw_only=True)
class _UserFile:
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    notify: str = ""


def read_user_file() -> Document:
    """The user's own file: `clusters` for all projects, and `notify`, a command. Empty if there is none."""
    path = user_file_path()
    if not path.exists():
        return Document({})
    document, places = read_yaml(path), Places(path)
    places.add(path, {**document.lines})
    try:
        refuse_bare_none(document.bare_none)
        build(_UserFile, document.value)
    except InputError as error:
        raise places.locate(error) from None
    return document


# Demo


def _variable_without(demo: Any) -> str:
    """The variable of `unless_env` if it is not set, so that the demo applies; else an empty text."""
    if not isinstance(demo, dict):
        raise InputError(key="demo", found=demo, allowed="a mapping")
    variable = demo.get("unless_env")
    if not isinstance(variable, str):
        raise InputError(key="demo.unless_env", found=variable, allowed="the name of an environment variable")
    return "" if os.environ.get(variable) else variable


# Config


def _config(values: dict[str, Any]) -> Config:
    """The Config of resolved values, with its short forms written out. Raises InputError."""
    config = build(Config, _in_full(values), dropped=DROPPED)
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
        is_number = [isinstance(part, int | float) and not isinstance(part, bool) for part in command]
        texts = [str(part) if number else part for part, number in zip(command, is_number, strict=True)]
        values = {**values, "command": texts}
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


def _refuse_sections_in_params(params: Any) -> None:
    """Refuse `resources:` and the like that were indented under `params:`, where they have no effect."""
    for name, keys in SECTIONS.items():
        inner = params.get(name) if isinstance(params, Mapping) else None
        if isinstance(inner, Mapping) and any(key in keys for key in inner):
            hint = "put it at the beginning of a line; a param of your own needs another name"
            raise InputError(f"{name} has no effect below params", key=f"params.{name}", hint=hint)


def _options_of(cluster: str, entry: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """A cluster's entry without options that are false or null, and without `resources` that were typed: these hold
    wherever the run goes."""
    names = {key.removeprefix("resources.") for key in typed if key.startswith("resources.")}
    return {
        name: value
        for name, value in entry.items()
        if value is not None
        and value is not False
        and (str(name).replace("-", "_") not in names or f"clusters.{cluster}.{name}" in typed)
    }
