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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import InputError, closest, nearest
from jobkit.run.schema import ALL, AUTO, DROPPED, PARALLEL_WORDS, SECTIONS, Config
from jobkit.run.strict import build
from jobkit.run.yamlfile import Document, bare_none_in, parse_value, read_yaml

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMMAND_LINE = "command line"

KEYS_SHOWN = 12
"""How many keys of `params` a refusal lists."""

_KEY = r"[A-Za-z_][\w.\-]*(\[\d+\])?"
_RUN_DIR = "${run_dir}"

Path_ = tuple[str | int, ...]


class Places:
    """Where each value of a config was written: the file and line in front of every error about it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, tuple[Path | str, int | None]] = {}

    def add(self, place: Path | str, lines: Mapping[str, int] | Iterable[str], below: str = "") -> None:
        """Note the keys that were written at a place; `below` is the prefix that the loader takes away, as `demo.`."""
        for key in lines:
            if key.startswith(below):
                line = lines[key] if isinstance(lines, Mapping) else None
                self._places[key.removeprefix(below)] = (place, line)

    def copy(self) -> Places:
        """Equal places, to which overrides can be added."""
        places = Places(self._path)
        places._places = dict(self._places)
        return places

    def locate(self, error: InputError) -> InputError:
        """The error with the file and line of its key, or of the nearest key above it that somebody wrote."""
        key = re.sub(r"\[(\d+)\]", r".\1", error.key)
        while key and key not in self._places:
            key = key.rpartition(".")[0]
        return error.at(*self._places.get(key, (self._path, None)))


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
    expressions: dict[Path_, tuple[str, Any]] = field(default_factory=dict)
    """The values that config.yaml holds as an expression: the expression, and its present value."""

    @property
    def written(self) -> dict[str, Any]:
        """The content of config.yaml, for `yamlfile.dump`."""
        values = dataclasses.asdict(self.config)
        for path, (expression, value) in self.expressions.items():
            parent = _at(values, path[:-1])
            if _at(values, path) == value and parent is not None:
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
        from omegaconf import OmegaConf

        places, typed = self.places.copy(), []
        merged = OmegaConf.create(self.values)
        try:
            for text, where in [*((text, COMMAND_LINE) for text in overrides), *((text, place) for text in point)]:
                override = parse_override(text, where)
                typed += list(_keys(override.key, override.value))
                places.add(where, typed)
                _apply(override, merged)
            resolved, expressions = _resolve(merged)
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
    document, own, own_file = read_yaml(path), read_user_file(), user_file_path()
    places = Places(path)
    places.add(own_file, own.lines)
    places.add(path, document.lines)
    values, notes = dict(document.values), []
    try:
        _refuse_bare_none(document)
        sweep, demo = values.pop("sweep", None), values.pop("demo", None)
        if demo is not None and (variable := _variable_without(demo)):
            values = _merged(values, {key: value for key, value in demo.items() if key != "unless_env"})
            notes.append(f"{variable} is not set: using the small recipe (`demo:` in {path})")
            places.add(path, document.lines, below="demo.")
        entries = values.get("clusters", {})
        if isinstance(entries, dict):  # else the schema refuses it
            values["clusters"] = {**own.values.get("clusters", {}), **entries}
        _check_grammar(values)
    except InputError as error:
        raise places.locate(error) from None
    return Experiment(values=values, places=places, notes=notes, sweep=sweep)


def read_resolved(path: Path) -> Config:
    """The Config in a run's config.yaml, with the present values of the environment.

    Raises InputError; for a variable that is not set it names the variable.
    """
    from omegaconf import OmegaConf

    document, places = read_yaml(path), Places(path)
    places.add(path, document.lines)
    try:
        _check_grammar(document.values)
        return _config(_resolve(OmegaConf.create(document.values))[0])
    except InputError as error:
        raise places.locate(error) from None


def with_run_dir(value: Any, run_dir: Path) -> Any:
    """A value of `params` or `command` with the path in the place of `${run_dir}`."""
    if isinstance(value, str):
        return value.replace(_RUN_DIR, str(run_dir))
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
    places.add(path, document.lines)
    try:
        _refuse_bare_none(document)
        build(_UserFile, document.values)
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


def _merged(values: Any, over: Any) -> Any:
    """Mappings are merged; any other value of `over` takes the place of the one in `values`."""
    if not (isinstance(values, dict) and isinstance(over, dict)):
        return over
    return {**values, **{key: _merged(values.get(key), value) for key, value in over.items()}}


# Overrides


@dataclass(frozen=True)
class Override:
    """A value that the command line, or a point of a sweep, sets."""

    key: str
    """Dotted, as `params.widths.0`."""
    value: Any
    adds: bool
    """True if it was typed with `+`: it may add a key to params, and change the type of a value."""


def parse_override(text: str, place: str = COMMAND_LINE) -> Override:
    """The meaning of `key=value` or `+key=value`. Raises InputError."""
    typed, equals, value = text.partition("=")
    key = typed.removeprefix("+")
    if not equals or not re.fullmatch(_KEY, key):
        raise InputError(f"{text!r}", allowed="key=value, as in params.lr=1e-3").at(place)
    if not value.strip():
        raise InputError("no value", key=key, hint=f"for none: {typed}=null; for an empty text: {typed}='\"\"'").at(
            place
        )
    try:
        parsed = parse_value(value)
    except ValueError as error:
        raise InputError(str(error), key=key, found=value).at(place) from None
    for inner in bare_none_in(value):
        _refuse_none(f"{key}.{inner}".rstrip("."), place)
    return Override(re.sub(r"\[(\d+)\]", r".\1", key), parsed, typed.startswith("+"))


def _refuse_bare_none(document: Document) -> None:
    for key in document.bare_none:
        _refuse_none(key)


def _refuse_none(key: str, place: str | None = None) -> None:
    if not key.endswith("comm.hook"):  # its default is the word none
        error = InputError(key=key, found="None", allowed="null for no value, or quotes around the text")
        raise error.at(place) if place else error


def _keys(key: str, value: Any) -> Iterator[str]:
    """The dotted keys that `key=value` sets: `clusters.big={nodes: 5}` sets `clusters.big.nodes`."""
    yield key
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _keys(f"{key}.{name}", inner)


def _apply(override: Override, merged: DictConfig) -> None:
    """Set a value, or merge a mapping into the present one."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    top, *below = override.key.split(".")
    values: Any = OmegaConf.to_container(merged)
    if top not in SECTIONS:
        hint = DROPPED.get(top) or _key_meant(override.key, values)
        raise InputError("unknown key", key=override.key, hint=hint, allowed=", ".join(SECTIONS))
    if top == "params" and not override.adds:
        params = values.get("params")
        _check_param("params", {} if params is None else params, below, override.value)
    dotted = re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", override.key)
    key = override.key if OmegaConf.select(merged, dotted.rpartition("[")[0]) is None else dotted
    try:
        OmegaConf.update(merged, key, override.value, force_add=True)
    except (OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
        raise InputError(_first_line(error), key=override.key, found=override.value) from None


def _check_param(key: str, present: Any, below: Sequence[str], value: Any) -> None:
    """Refuse a key that `params` does not have, and a text in the place of a number (a slip, as `1e-3x`).

    Args:
        present: the value of `key` so far, before interpolation
        below: the parts of the override's key below `key`
    """
    if isinstance(value, Mapping) and not below and isinstance(present, Mapping):
        for name, item in value.items():  # it is merged
            _check_param(key, present, [str(name)], item)
    elif not below:
        _check_kind(key, present, value)
    elif isinstance(present, list) and below[0].isdigit() and int(below[0]) < len(present):
        _check_param(f"{key}.{below[0]}", present[int(below[0])], below[1:], value)
    elif isinstance(present, Mapping) and below[0] in present:
        _check_param(f"{key}.{below[0]}", present[below[0]], below[1:], value)
    elif not (isinstance(present, str) and "${" in present):  # an interpolation: OmegaConf knows what is there
        new = f"{key}.{below[0]}"
        names = [str(name) for name in present] if isinstance(present, Mapping) else []
        match = closest(below[0], names)
        has = f"{', '.join(names[:KEYS_SHOWN])}{', ...' if len(names) > KEYS_SHOWN else ''}" if names else "no keys"
        meant = f"did you mean '{key}.{match}'? " if match else ""
        raise InputError("there is no such key", key=new, hint=f"{meant}({key} has {has}; to add it: +{new}=...)")


def _check_kind(key: str, present: Any, value: Any) -> None:
    is_text = isinstance(value, str) and "${" not in value
    allowed = ""
    if isinstance(present, bool):
        allowed = "true or false" if is_text or isinstance(value, Mapping) else ""
    elif isinstance(present, int | float):
        allowed = f"a number, as {present!r}" if is_text or isinstance(value, bool | Mapping) else ""
    elif isinstance(present, list | Mapping) and (is_text or isinstance(value, int | float)):
        allowed = f"a {'list' if isinstance(present, list) else 'mapping'}, as {present!r}"
    elif isinstance(present, str) and present != "???" and "${" not in present and isinstance(value, Mapping):
        allowed = "a text; one with a colon in it: in quotes"
    if allowed:
        several = is_text and "," in value
        hint = f"several runs: --sweep {key}={value}; a list: {key}=[{value}]; " if several else ""
        raise InputError(key=key, found=value, allowed=allowed, hint=f"{hint}+{key}=... takes any value")


def _key_meant(key: str, values: Mapping[str, Any]) -> str:
    """`did you mean 'params.lr'?` for `lr`: top-level keys, keys of sections and of params."""
    params = values.get("params")
    names = {name: f"{section}.{name}" for section, inner in SECTIONS.items() for name in inner}
    names |= {str(name): f"params.{name}" for name in (params if isinstance(params, Mapping) else {})}
    names |= {section: section for section in SECTIONS}
    match = closest(key.partition(".")[0], names) or closest(key.rpartition(".")[2], names)
    return f"did you mean {names[match]!r}?" if match else ""


# Interpolation


def _check_grammar(values: dict[str, Any]) -> None:
    """Refuse a value that is no valid expression of OmegaConf, as `a ${ b`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create(values)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = str(getattr(error, "full_key", None) or "")
        raise InputError(_first_line(error), key=key, hint="a text with ${ in it: write \\${") from None


def _resolve(merged: DictConfig) -> tuple[dict[str, Any], dict[Path_, tuple[str, Any]]]:
    """The values, and the expressions (with their values) that config.yaml keeps: the ones that read the environment,
    and the ones that would be read as an expression again.

    The rest of config.yaml has the values that the expressions refer to at the same keys.
    """
    from omegaconf import OmegaConf

    raw: Any = OmegaConf.to_container(merged)
    environment = _Environment()
    tree = OmegaConf.create(environment.watched(raw if "run_dir" in raw else {**raw, "run_dir": "\\" + _RUN_DIR}))
    expressions: dict[Path_, tuple[str, Any]] = {}

    def walk(node: Any, name: str | int, written: Any, path: Path_) -> Any:
        if isinstance(written, Mapping):
            return {key: walk(node[name], key, item, (*path, key)) for key, item in written.items()}
        if isinstance(written, list):
            return [walk(node[name], index, item, (*path, index)) for index, item in enumerate(written)]
        if not isinstance(written, str) or ("${" not in written and written != "???"):
            return written
        environment.names.clear()
        value = _value(node, name, path, environment, raw)
        if environment.names or "${" in str(value).replace(_RUN_DIR, ""):
            expressions[path] = (written, value)
        if path[0] not in ("command", "params") and _RUN_DIR in str(value):
            raise InputError(f"{_RUN_DIR} has a value in `command` and `params` only", key=_dotted(path))
        return value

    return {key: walk(tree, key, item, (key,)) for key, item in raw.items()}, expressions


class _Environment:
    """Reads variables for `${oc.env:NAME}` and notes their names."""

    def __init__(self) -> None:
        from omegaconf import OmegaConf

        self.names: list[str] = []
        OmegaConf.register_new_resolver("jobkit.env", self._read, replace=True)

    def _read(self, name: str, *default: Any) -> Any:
        self.names.append(name)
        if name in os.environ or not default:
            return os.environ[name]
        return default[0] if default[0] is None else str(default[0])

    def watched(self, value: Any) -> Any:
        """The values with this resolver in the place of OmegaConf's."""
        if isinstance(value, str):
            return re.sub(r"(?<!\\)\$\{(\s*)oc\.env\b", r"${\1jobkit.env", value)
        if isinstance(value, Mapping):
            return {key: self.watched(item) for key, item in value.items()}
        return [self.watched(item) for item in value] if isinstance(value, list) else value


def _value(node: Any, name: str | int, path: Path_, environment: _Environment, raw: Mapping[str, Any]) -> Any:
    """The value of one expression. Raises InputError."""
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key = _dotted(path)
    try:
        value = node[name]
        if isinstance(value, Container):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value
    except OmegaConfBaseException as error:
        line = _first_line(error)
        if missing := re.search(r"Missing mandatory value: ([\w.]+)", line):
            key = missing[1] if "interpolation" in line else key
            raise InputError("missing", key=key, hint=f"give it a value: {key}=...") from None
        if unknown := re.match(r"Interpolation key '([^']*)' not found", line):
            hint = nearest(unknown[1], _keys("", raw)) or f"the text itself: \\${{{unknown[1]}}}"
            raise InputError(f"${{{unknown[1]}}}: there is no such key", key=key, hint=hint) from None
        if "KeyError" in line and environment.names:
            variable = environment.names[-1]
            raise InputError(
                f"the environment variable {variable} is not set", key=key, hint=f"type first: export {variable}=..."
            ) from None
        raise InputError(line, key=key) from None


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))


def _at(values: Any, path: Path_) -> Any:
    """The value at a path, or None if there is none."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


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
