"""From the values of a YAML to those of a Config: interpolations replaced, short forms written out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobkit.errors import InvalidValue, nearest
from jobkit.run import habits
from jobkit.run.config import ALL, AUTO, PARALLEL_WORDS


def as_omegaconf(values: dict[str, Any]) -> Any:
    """The values as OmegaConf has them. Raises InvalidValue."""
    try:
        return OmegaConf.create(values)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise InvalidValue(str(getattr(error, "full_key", None) or ""), first_line(error)) from None


def resolve(merged: Any) -> dict[str, Any]:
    """The values, resolved; `${run_dir}` stays in `command` and `params`: run/own_outputs.py puts the path there. So do
    references to other runs, `${run:...}` (run/references.py). Raises InvalidValue."""
    merged = _with_escaped_references(merged)
    if "run_dir" in merged:
        return _interpolated(merged)  # no key of a config: refused as such
    merged["run_dir"] = r"\${run_dir}"
    resolved = {key: value for key, value in _interpolated(merged).items() if key != "run_dir"}
    for key, value in resolved.items():
        if key not in ("command", "params") and "${run_dir}" in str(value):
            raise InvalidValue(key, "found ${run_dir}, which is known in `command` and `params` only")
        if key not in ("command", "params", "inputs") and "${run:" in str(value):
            raise InvalidValue(key, "found ${run:...}, which is known in `command`, `params` and `inputs` only")
    return resolved


def _with_escaped_references(merged: Any) -> Any:
    """The values, in which OmegaConf takes `${run:...}` for a text."""
    values = OmegaConf.to_container(merged)

    def escaped(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(r"(?<!\\)\$\{run:", r"\${run:", value)
        if isinstance(value, dict):
            return {key: escaped(one) for key, one in value.items()}
        return [escaped(one) for one in value] if isinstance(value, list) else value

    return OmegaConf.create(escaped(values)) if "${run:" in str(values) else merged


def _interpolated(merged: Any) -> dict[str, Any]:
    try:
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        if missing := re.search(r"Missing mandatory value: ([\w.]+)", str(error)):
            key = missing[1] if "interpolation" in str(error) else key
            raise InvalidValue(key, f"missing; give it a value: {key}=...") from None
        if unknown := re.match(r"Interpolation key '([^']*)' not found", str(error)):
            hint = nearest(unknown[1], _dotted_keys(OmegaConf.to_container(merged)))
            raise InvalidValue(key, f"${{{unknown[1]}}}: there is no such key{hint}") from None
        if variable := re.match(r"Environment variable '(\w+)' not found", first_line(error)):
            hint = f"; type first: export {variable[1]}=..."
            raise InvalidValue(key, f"{first_line(error)}{hint}") from None
        raise InvalidValue(key, first_line(error)) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _dotted_keys(values: Any, prefix: str = "") -> Iterator[str]:
    for key, value in values.items() if isinstance(values, Mapping) else ():
        yield f"{prefix}{key}"
        yield from _dotted_keys(value, f"{prefix}{key}.")


def in_full(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with `parallel: zero3`, one word, written out as a mapping, the numbers in a command as texts, and the
    GPUs of ranks of which there are as many as GPUs. Raises InvalidValue."""
    word, command = values.get("parallel"), values.get("command")
    if isinstance(command, str):
        raise InvalidValue("command", f"found {command!r}, expected a list: [{', '.join(command.split())}]")
    if isinstance(values.get("after"), str):
        values = values | {"after": [values["after"]]}
    if isinstance(command, list):  # an interpolation of a number is one
        numbers = [isinstance(one, (int, float)) and not isinstance(one, bool) for one in command]
        texts = [str(one) if number else one for one, number in zip(command, numbers, strict=True)]
        values = values | {"command": texts}
    resources = values.get("resources")
    if isinstance(resources, dict) and resources.get("tasks_per_node") == AUTO:
        values = values | {"resources": {"gpus_per_task": AUTO, **resources}}
    if not isinstance(word, str):
        return values
    if word not in PARALLEL_WORDS:
        named = habits.STRATEGIES.get(word.lower().replace("-", "_"))
        hint = f"; did you mean {named!r}?" if named else nearest(word, PARALLEL_WORDS)
        allowed = f"{', '.join(PARALLEL_WORDS)}, or a mapping of data, tensor, pipeline"
        raise InvalidValue("parallel", f"found {word!r}, allowed: {allowed}{hint}")
    written = {word: ALL} if word in ("tensor", "pipeline") else {"data": word}
    return values | {"parallel": written}


def first_line(error: Exception) -> str:
    """What an error of OmegaConf's says, without its own words."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    # OmegaConf's word for its own error says nothing to whoever has not set a variable.
    inner = re.fullmatch(r"\w+ raised while resolving interpolation: (['\"]?)(.*)\1", line)
    return inner[2] if inner else line
