"""Values in the place of `${...}` expressions, by OmegaConf: the values for now, and the expressions for config.yaml.

{"a": "${oc.env:HOME}/x", "b": "${a}", "c": "${n}", "n": 3}
  -> {"a": "/home/me/x", "b": "/home/me/x", "c": 3, "n": 3}, and a and b as expressions

load.py and, for the words of a script, worker/script.py call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jobkit.config.overrides import keys_below
from jobkit.errors import InputError, nearest

RUN_DIR = "${run_dir}"
"""Stays a text until a rank knows its directory (`load.with_run_dir`)."""

KeyPath = tuple[str | int, ...]


class NoValue(InputError):
    """An expression leads to no value: it may be a text, or one that another program's config gives a value."""


def resolve(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[KeyPath, tuple[str, Any]]]:
    """Return the values, and the expressions (with their values) that config.yaml keeps: expressions that read the
    environment, and those whose values would be read as an expression again.

    A key that an expression of config.yaml names is also in config.yaml. Raises InputError.
    """
    if not _has_expression(raw):
        return dict(raw), {}  # a sweep of a thousand points would spend its time in OmegaConf
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.create({"run_dir": f"\\{RUN_DIR}", **raw})  # with a backslash it is a text
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        key = re.sub(r"\[(\d+)\]", r".\1", str(getattr(error, "full_key", None) or ""))
        raise NoValue(_first_line(error), key=key, hint="a text with ${ in it is written \\${") from None
    expressions: dict[KeyPath, tuple[str, Any]] = {}

    def walk(node: Any, written: Any, path: KeyPath) -> Any:
        if isinstance(written, Mapping):
            inner = node[path[-1]] if path else node
            return {key: walk(inner, item, (*path, key)) for key, item in written.items()}
        if isinstance(written, list):
            return [walk(node[path[-1]], item, (*path, index)) for index, item in enumerate(written)]
        if not isinstance(written, str) or ("${" not in written and written != "???"):
            return written
        variables.clear()
        value = _value(node, path, raw)
        if variables or "${" in str(value).replace(RUN_DIR, ""):
            expressions[path] = (written, value)
        if path[0] not in ("command", "params") and RUN_DIR in str(value):
            raise InputError(f"{RUN_DIR} has a value in `command` and `params` only", key=_dotted(path))
        return value

    with _watched_environment() as variables:
        return walk(tree, raw, ()), expressions


def _has_expression(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_expression, value.values()))
    if isinstance(value, list):
        return any(map(_has_expression, value))
    return isinstance(value, str) and ("${" in value or value == "???")


def _value(node: Any, path: KeyPath, raw: Mapping[str, Any]) -> Any:
    """The value of the expression at the end of a path, of which `node` is the parent. Raises InputError."""
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    kind: type[InputError] = NoValue
    key, hint = _dotted(path), ""
    try:
        value = node[path[-1]]
        if isinstance(value, Container):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value
    except OmegaConfBaseException as error:
        problem = _first_line(error)
        if missing := re.search(r"Missing mandatory value: ([\w.]+)", problem):
            key = missing[1] if "interpolation" in problem else key
            kind, problem, hint = InputError, "missing", f"give it a value: {key}=..."
        elif unknown := re.match(r"Interpolation key '([^']*)' not found", problem):
            problem = f"${{{unknown[1]}}}: there is no such key"
            hint = nearest(unknown[1], keys_below(raw)) or f"the text itself is written \\${{{unknown[1]}}}"
        elif variable := re.search(r"Environment variable '([^']*)' not found", problem):
            kind, problem = InputError, f"the environment variable {variable[1]} is not set"
            hint = f"type first: export {variable[1]}=..."
        raise kind(problem, key=key, hint=hint) from None


@contextmanager
def _watched_environment() -> Iterator[list[str]]:
    """Yield a list that gets the name of each variable that `${oc.env:NAME}` reads."""
    import omegaconf
    from omegaconf.resolvers import oc

    names: list[str] = []

    def read(name: str, *default: Any) -> Any:
        names.append(name)
        return oc.env(name, *default)

    is_renamed = tuple(map(int, omegaconf.__version__.split(".")[:2])) >= (2, 4)  # Hydra 1.3 needs 2.3
    register = getattr(omegaconf.OmegaConf, "register_resolver" if is_renamed else "register_new_resolver")
    register("oc.env", read, replace=True)
    try:
        yield names
    finally:
        register("oc.env", oc.env, replace=True)


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
