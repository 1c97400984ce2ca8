"""Values in the place of `${...}` expressions, by OmegaConf: the values for now, and the expressions for config.yaml.

{"a": "${oc.env:HOME}/x", "b": "${a}", "c": "${n}", "n": 3}
  -> {"a": "/home/me/x", "b": "/home/me/x", "c": 3, "n": 3}, and a and b as expressions
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from jobkit.errors import InputError, nearest
from jobkit.run.overrides import keys_below

RUN_DIR = "${run_dir}"
"""Stays a text until a rank knows its directory (`load.with_run_dir`)."""

KeyPath = tuple[str | int, ...]


def resolve(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, tuple[str, Any]]]:
    """The values, and the expressions (with their values) that config.yaml keeps: the ones that read the environment,
    and the ones whose values would be read as an expression again.

    What an expression of config.yaml refers to has the same key there. Raises InputError.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    environment = _Environment()
    run_dir = {} if "run_dir" in raw else {"run_dir": f"\\{RUN_DIR}"}  # with a backslash it is a text
    try:
        tree = OmegaConf.create(environment.watched({**raw, **run_dir}))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = re.sub(r"\[(\d+)\]", r".\1", str(getattr(error, "full_key", None) or ""))
        hint = "a text with ${ in it is written \\${"
        raise InputError(_first_line(error), key=key, hint=hint) from None
    expressions: dict[KeyPath, tuple[str, Any]] = {}

    def walk(node: Any, written: Any, path: KeyPath) -> Any:
        if isinstance(written, Mapping):
            inner = node[path[-1]] if path else node
            return {key: walk(inner, item, (*path, key)) for key, item in written.items()}
        if isinstance(written, list):
            return [walk(node[path[-1]], item, (*path, index)) for index, item in enumerate(written)]
        if not isinstance(written, str) or ("${" not in written and written != "???"):
            return written
        value = _value(node, path, environment, raw)
        if environment.names or "${" in str(value).replace(RUN_DIR, ""):
            expressions[path] = (written, value)
        if path[0] not in ("command", "params") and RUN_DIR in str(value):
            raise InputError(f"{RUN_DIR} has a value in `command` and `params` only", key=_dotted(path))
        return value

    return walk(tree, raw, ()), expressions


def _value(node: Any, path: KeyPath, environment: _Environment, raw: Mapping[str, Any]) -> Any:
    """The value of the expression at the end of a path, of which `node` is the parent. Raises InputError."""
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, hint = _dotted(path), ""
    environment.names.clear()
    try:
        value = node[path[-1]]
        if isinstance(value, Container):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value
    except OmegaConfBaseException as error:
        problem = _first_line(error)
        if missing := re.search(r"Missing mandatory value: ([\w.]+)", problem):
            key = missing[1] if "interpolation" in problem else key
            problem, hint = "missing", f"give it a value: {key}=..."
        elif unknown := re.match(r"Interpolation key '([^']*)' not found", problem):
            problem = f"${{{unknown[1]}}}: there is no such key"
            hint = nearest(unknown[1], keys_below(raw)) or f"the text itself is written \\${{{unknown[1]}}}"
        elif "KeyError" in problem and environment.names:
            name = environment.names[-1]
            problem, hint = f"the environment variable {name} is not set", f"type first: export {name}=..."
        raise InputError(problem, key=key, hint=hint) from None


class _Environment:
    """Reads variables for `${oc.env:NAME}`, and notes their names."""

    def __init__(self) -> None:
        import omegaconf

        self.names: list[str] = []
        is_renamed = tuple(map(int, omegaconf.__version__.split(".")[:2])) >= (2, 4)
        register = omegaconf.OmegaConf.register_resolver if is_renamed else omegaconf.OmegaConf.register_new_resolver
        register("jobkit.env", self._read, replace=True)

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


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def at(values: Any, path: KeyPath) -> Any:
    """The value at a path, or None if there is none."""
    for key in path:
        try:
            values = values[key]
        except (KeyError, IndexError, TypeError):
            return None
    return values


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
