"""What two configs have differently, key by key, as others may see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobkit.run import secrets
from jobkit.run.config import Config

DECIDES = ("task", "command", "params", "seed", "precision", "deterministic", "parallel", "comm")
"""Keys of what a run computes: its hash is of them, and of what it starts from."""


class _Absent:
    def __str__(self) -> str:
        return "-"


ABSENT = _Absent()
"""The value of a key that one of two does not have."""


@dataclass(frozen=True)
class Difference:
    """A dotted key, and its value in each of two configs; secrets are masked."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.after}"


def differences(before: Config, after: Config, keys: tuple[str, ...] | None = None) -> list[Difference]:
    """What differs, in the order of the keys; only of some top-level keys where they are given."""
    one, other = (_dotted(dataclasses.asdict(config)) for config in (before, after))
    shown = [_dotted(secrets.masked(dataclasses.asdict(config))) for config in (before, after)]
    return [
        Difference(key, shown[0].get(key, ABSENT), shown[1].get(key, ABSENT))
        for key in dict.fromkeys([*one, *other])
        if (keys is None or key.partition(".")[0] in keys) and _is_other(one.get(key, ABSENT), other.get(key, ABSENT))
    ]


def _is_other(before: Any, after: Any) -> bool:
    """Whether two values make other runs: 1 and 1.0 do not, 1 and true do."""
    if isinstance(before, list) and isinstance(after, list):
        return len(before) != len(after) or any(map(_is_other, before, after))
    return before != after or isinstance(before, bool) != isinstance(after, bool)


def _dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= _dotted(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found
