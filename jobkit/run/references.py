"""`${run:NAME.result.key}` and `${run:NAME}` in a config: another run's result, and its directory.

At submission NAME becomes the whole name of the run, which the hash has, too; the value is there when the run starts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.errors import JobkitError, nearest
from jobkit.run.config import Config
from jobkit.run.files import read_json, write_json
from jobkit.run.rundir import RunDir
from jobkit.run.status import State

_REFERENCE = re.compile(r"\$\{run:(?P<name>[^}]+?)(?P<result>\.result(?:\.(?P<key>[^}]*))?)?\}")

FIELDS = ("command", "params", "inputs")
"""The keys of a config that may refer to other runs."""


class NoSuchResult(JobkitError):
    """A run has no result of the name that another one refers to."""


def texts_with_references(config: Config) -> Iterator[tuple[str, str]]:
    """(dotted key, text) of each text that refers to another run."""
    for field in FIELDS:
        for key, text in _texts(getattr(config, field), field):
            if _REFERENCE.search(text):
                yield key, text


def named_in(text: str) -> list[str]:
    """The runs that a text refers to, as it names them."""
    return [match["name"] for match in _REFERENCE.finditer(text)]


def directories_in(config: Config) -> set[str]:
    """The runs to whose directories a config refers, `${run:NAME}`, as it names them."""
    texts = (text for _, text in texts_with_references(config))
    return {match["name"] for text in texts for match in _REFERENCE.finditer(text) if not match["result"]}


def with_names(config: Config, whole_name: Callable[[str, str], str]) -> Config:
    """The config with whole names of the runs; `whole_name` gives one for (dotted key, name as it was typed)."""

    def renamed(key: str, text: str) -> str:
        return _REFERENCE.sub(lambda match: f"${{run:{whole_name(key, match['name'])}{match['result'] or ''}}}", text)

    return _replaced(config, renamed)


def keep_values(config: Config, run: RunDir) -> None:
    """Write down the values that other runs have now: all attempts of `run` are to have the same.

    Raises NoSuchResult where one is not finished or has no such result.
    """
    values = {
        match[0]: _found(key, match, run)
        for key, text in texts_with_references(config)
        for match in _REFERENCE.finditer(text)
    }
    if values:
        write_json(_file(run), values)


def with_values(config: Config, run: RunDir) -> Config:
    """The config with the values of other runs: those that were kept, else as they are now. Raises NoSuchResult."""
    if not any(True for _ in texts_with_references(config)):
        return config
    kept = read_json(_file(run), fresh=True)
    known = kept if isinstance(kept, dict) else {}
    return _replaced(config, lambda key, text: _value(key, text, run, known))


def _file(run: RunDir) -> Path:
    return run.path / "references.json"


def _value(key: str, text: str, run: RunDir, known: Mapping[str, Any]) -> Any:
    def value_of(match: re.Match[str]) -> Any:
        return known[match[0]] if match[0] in known else _found(key, match, run)

    def as_text(match: re.Match[str]) -> str:
        value = value_of(match)
        return value if isinstance(value, str) else json.dumps(value)

    whole = _REFERENCE.fullmatch(text)
    is_text = whole is None or key.startswith(("command", "inputs"))
    return _REFERENCE.sub(as_text, text) if is_text or whole is None else value_of(whole)


def _found(key: str, match: re.Match[str], run: RunDir) -> Any:
    other = RunDir(run.path.parent / match["name"])
    if not match["result"]:
        return str(other.path)
    status = other.status() if other.exists() else None
    if status is None or status.state != State.FINISHED:
        raise NoSuchResult(f"{key}: {match[0]}: {other.name} is {status.state if status else 'not there'}")
    value = status.result
    for part in (match["key"] or "").split("."):
        if part == "":
            continue
        if not isinstance(value, Mapping) or part not in value:
            known = list(value) if isinstance(value, Mapping) else []
            there = f"it has {', '.join(map(str, known[:8]))}" if known else f"there it is {json.dumps(value)[:80]}"
            hint = nearest(part, known)
            raise NoSuchResult(f"{key}: {match[0]}: the result of {other.name} has no {part!r} ({there}){hint}")
        value = value[part]
    return value


def _replaced(config: Config, change: Callable[[str, str], Any]) -> Config:
    return dataclasses.replace(config, **{field: _changed(field, getattr(config, field), change) for field in FIELDS})


def _changed(key: str, value: Any, change: Callable[[str, str], Any]) -> Any:
    if isinstance(value, str):
        return change(key, value) if "${run:" in value else value
    if isinstance(value, Mapping):
        return {name: _changed(f"{key}.{name}", one, change) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [_changed(key, one, change) for one in value]
    return value


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _texts(one, f"{key}.{name}")
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one, key)
