"""What of a run's config is not its YAML's: the values that its command line, its sweep or the run it starts from gave.

Only of keys that decide what the run computes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jobkit.run import secrets
from jobkit.run.config import Config
from jobkit.run.differences import ABSENT, DECIDES
from jobkit.run.overrides import Override, parse
from jobkit.run.records import GivenValues
from jobkit.run.yamlfile import in_a_line


def given_values(config: Config, typed: Sequence[str], inherited: Sequence[str] = ()) -> GivenValues:
    """What was given of a config: by the `key=value` of its command line and sweep, and by those of another run."""
    own = keys_of(typed)
    there = {key: _literal(value) for key, value in values_of(config, keys_of(inherited)).items() if key not in own}
    held = [key for text in inherited for key, value in _leaves(parse(text)) if there.get(key, ABSENT) == value]
    values = values_of(config, [*held, *own])
    return GivenValues(values={key: secrets.masked(value, key) for key, value in values.items()}, inherited=held)


def keys_of(texts: Iterable[str]) -> list[str]:
    """The dotted keys that some `key=value` set; of a mapping, which is merged into what is there, those in it."""
    return list(dict.fromkeys(key for text in texts for key, _ in _leaves(parse(text))))


def values_of(config: Config, keys: Iterable[str]) -> dict[str, Any]:
    """The values at some dotted keys, as they are; without those that the config does not have."""
    whole = dataclasses.asdict(config)
    found = {key: _at(whole, key) for key in keys}
    return {key: value for key, value in found.items() if value is not ABSENT}


def without(typed: Sequence[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of those keys that nobody has typed, nor what they are in."""
    own = keys_of(typed)
    return {
        key: value
        for key, value in values.items()
        if not any(key == one or key.startswith((f"{one}.", f"{one}[")) for one in own)
    }


def as_typed(values: Mapping[str, Any], there: Config) -> list[str]:
    """The `key=value` that set these values in a config; with `+` before those that `there` does not have."""
    known = values_of(there, values)
    return [
        f"{'+' if key.startswith('params.') and key not in known else ''}{key}={in_a_line(_literal(value))}"
        for key, value in values.items()
    ]


def _leaves(override: Override) -> Iterator[tuple[str, Any]]:
    if override.key.partition(".")[0].partition("[")[0] in DECIDES:
        yield from _leaves_of(override.key, override.value)


def _leaves_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and all(re.fullmatch(r"[\w-]+", str(name)) for name in value):
        for name, one in value.items():
            yield from _leaves_of(f"{key}.{name}", one)
    else:
        yield key, value


def _at(values: Any, key: str) -> Any:
    """The value at a dotted key, in which numbers are indices of lists; ABSENT where there is none."""
    for part in re.findall(r"[^.\[\]]+", key):
        try:
            values = values[int(part)] if isinstance(values, list) else values[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return ABSENT
    return values


def _literal(value: Any) -> Any:
    """A value in which nothing that looks like an interpolation is taken for one: it was resolved once."""
    if isinstance(value, str):
        return re.sub(r"\$\{(?!run:|run_dir\})", r"\\${", value)
    if isinstance(value, Mapping):
        return {key: _literal(one) for key, one in value.items()}
    return [_literal(one) for one in value] if isinstance(value, list) else value
