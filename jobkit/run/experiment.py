"""From file, demo, stage and command line to one resolved Config."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobkit.errors import InputError, InvalidValue
from jobkit.run import secrets
from jobkit.run.config import SECTIONS, Config
from jobkit.run.overrides import Given, Override, refuse_sections_in_params
from jobkit.run.overrides import check as check_override
from jobkit.run.overrides import parse as parse_override
from jobkit.run.places import Places
from jobkit.run.resolve import as_omegaconf, first_line, in_full, resolve
from jobkit.run.strict import build
from jobkit.run.user_config import read_user_config, user_config_path
from jobkit.run.yamlfile import read_yaml


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and what a person should be told about how it came to be."""

    config: Config
    notes: list[str]
    places: Places
    of_environment: bool = False
    """Whether a value is a variable's of the shell: where the same command is typed in another one, it means another
    run."""


@dataclass(frozen=True)
class Experiment:
    """A YAML as it was read, of which command lines make configs."""

    values: dict[str, Any]
    """With its demo merged where that applies, and without `sweep:`."""
    sweep: Any
    """What stands under `sweep:`; None where nothing does."""
    notes: list[str]
    """What a person should be told about it."""
    places: Places
    own_clusters: dict[str, dict[str, Any]]
    """Those of the user's own file."""
    pipeline: Any = None
    """What stands under `pipeline:`; None where nothing does."""

    def config(self, overrides: Sequence[str] = (), point: Sequence[Given] = ()) -> LoadedConfig:
        """The config with what was typed, then a point of a sweep, interpolated and checked. Raises InputError as
        `load` does."""
        places = dataclasses.replace(self.places, overridden={})
        with places.locating_errors():
            if self.pipeline is not None:
                raise InvalidValue("pipeline", "its stages are several runs: `jobkit submit` starts them")
            merged = as_omegaconf(self.values)
            typed: list[Override] = []
            for given in (*map(Given, overrides), *point):
                override = parse_override(given.text, given.place)
                typed.append(override)
                places.overridden[override.key] = given.place
                check_override(override, OmegaConf.to_container(merged), SECTIONS)  # type: ignore[arg-type]
                try:
                    OmegaConf.update(merged, override.key, override.value, force_add=True)
                except (OmegaConfBaseException, ValueError, AttributeError, TypeError) as error:
                    raise InputError(f"{given.place}: {given.text}: {first_line(error)}") from None
            of_environment = _reads_variables(OmegaConf.to_yaml(merged))
            resolved = resolve(merged)
            if isinstance(resolved.get("params"), dict):
                refuse_sections_in_params(resolved["params"], SECTIONS)
            config = build(Config, in_full(resolved))
            if config.task and config.command:
                raise InvalidValue("command", "there is a task as well; a run is one of them")
            if not (config.task or config.command):
                raise InvalidValue("task", "missing; it is required (or command: [python, train.py])")
        clusters = _without_typed(self.own_clusters | config.clusters, typed)
        return LoadedConfig(dataclasses.replace(config, clusters=clusters), self.notes, places, of_environment)


def _reads_variables(text: str) -> bool:
    """Whether a config, not yet interpolated, takes a variable that is set here and that not every shell has alike."""
    named = re.findall(r"\$\{\s*oc\.env\s*:[\s'\"\\]*(\w+)", text)  # quoted too, also within a text that YAML quotes
    return any(name in os.environ for name in named if name not in ("HOME", "USER", "LOGNAME"))


def _without_typed(clusters: Mapping[str, Mapping[str, Any]], typed: Sequence[Override]) -> dict[str, dict[str, Any]]:
    """The entries of clusters without the keys of `resources` that were typed: those count wherever the run goes."""
    keys = {key for one in typed for key in _keys(one.key, one.value)}
    names = {key.removeprefix("resources.") for key in keys if key.startswith("resources.")}
    return {
        cluster: {
            name: value
            for name, value in entry.items()
            if str(name).replace("-", "_") not in names or f"clusters.{cluster}.{name}" in keys
        }
        for cluster, entry in clusters.items()
    }


def _keys(key: str, value: Any) -> Iterator[str]:
    """The dotted keys that `key=value` sets: `clusters.big={nodes: 5}` says what `clusters.big.nodes=5` does."""
    yield key
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _keys(f"{key}.{name}", inner)


def load(path: Path, overrides: Sequence[str] = (), demo: bool | None = None) -> LoadedConfig:
    """The config of a YAML: its demo merged where it applies, then the overrides, then interpolated and checked.

    `demo` forces the YAML's `demo:` section on or off; None leaves it to the section's own `unless_env`. What stands
    under `sweep:` is left out. Raises InputError, naming file, line and key, for anything that is not right.
    """
    return read_experiment(path, demo).config(overrides)


def read_experiment(path: Path, demo: bool | None = None) -> Experiment:
    """The experiment in a YAML; `demo` and errors as `load` has them."""
    values, lines = read_yaml(path)
    if path.name == "config.yaml":  # it may be a run's own
        values = secrets.with_hidden(secrets.file_beside(path), values)
    own, own_lines = read_user_config()
    own_clusters = own.clusters
    with Places(path=path, lines=lines).locating_errors():
        values, note = _apply_demo(path, values, demo)
    places = Places(path=path, lines=lines, own_lines=own_lines, own_file=user_config_path(), demo=bool(note))
    sweep, pipeline = values.pop("sweep", None), values.pop("pipeline", None)
    return Experiment(values, sweep, [note] if note else [], places, own_clusters, pipeline)


def stages_of(experiment: Experiment) -> dict[str, Experiment]:
    """The stages under `pipeline:` by their names, in the file's order, each merged over the rest of the file.

    Raises InputError.
    """
    found = experiment.pipeline
    with experiment.places.locating_errors():
        if not isinstance(found, dict) or not found:
            raise InvalidValue("pipeline", f"found {found!r}, expected stages: {{train: {{...}}, sample: {{...}}}}")
        return {str(name): _stage(experiment, str(name), values) for name, values in found.items()}


def _stage(experiment: Experiment, name: str, values: Any) -> Experiment:
    key = f"pipeline.{name}"
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in SECTIONS:
        raise InvalidValue(key, "a stage's name has letters, digits, '_' and '-', and is no key of a config")
    if not isinstance(values, dict):
        raise InvalidValue(key, f"found {values!r}, expected a mapping")
    if "name" in values:
        raise InvalidValue(f"{key}.name", f"a stage is named after the file: {experiment.values.get('name')}-{name}")
    rest = {key: value for key, value in experiment.values.items() if key not in _REPLACES.get(_program_of(values), ())}
    merged = OmegaConf.to_container(OmegaConf.merge(as_omegaconf(rest), as_omegaconf(values)))
    assert isinstance(merged, dict)
    named = {**{str(key): value for key, value in merged.items()}, "name": f"{experiment.values.get('name')}-{name}"}
    places = dataclasses.replace(experiment.places, stage=name)
    return dataclasses.replace(experiment, values=named, places=places, pipeline=None)


_REPLACES = {"task": ("command",), "command": ("task",)}
"""What a stage's program stands for of the rest of the file."""


def _program_of(values: Mapping[str, Any]) -> str:
    return next((key for key in _REPLACES if key in values), "")


def _apply_demo(path: Path, values: dict[str, Any], forced: bool | None) -> tuple[dict[str, Any], str | None]:
    """`values` less the demo section, which is merged over the rest where it applies, and the line that says so."""
    demo = values.pop("demo", None)
    if demo is None:
        if forced:
            raise InputError(f"{path}: --demo: this file has no `demo:` section")
        return values, None
    if not isinstance(demo, dict):
        raise InvalidValue("demo", f"found {demo!r}, expected a mapping")
    variable = demo.pop("unless_env", None)
    if variable is not None and not isinstance(variable, str):
        raise InvalidValue("demo.unless_env", f"found {variable!r}, expected a variable")
    unset = variable is not None and not os.environ.get(variable)
    if not (unset if forced is None else forced):
        return values, None
    reason = f"{variable} is not set" if unset else "--demo"
    merged = OmegaConf.to_container(OmegaConf.merge(as_omegaconf(values), as_omegaconf(demo)))
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}, f"{reason}: using the small recipe (`demo:` in {path})"
