"""Values that are nobody else's business, by the names that they have: masked in what others can read, kept apart.

A name says so by one of its words, as in `hf_token`, `apiKey` or `WANDB_APIKEY`. Texts alone are masked: a number
under such a name, as in `key: 3`, is none.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.run.files import FOR_OWNER, read_fresh, write_atomic

MASK = "***"
"""What is shown instead."""

_SECRET = re.compile(
    r"(?:token|passwords?|passwd|passphrase|pwd|secrets?|credentials?|(?:^|_)keys?|(?:^|_)authorization"
    r"|(?:api|access|secret|private|auth|ssh|account|signing|encryption|pass)_?keys?"  # not `monkey`
    r"|(?:hf|api|auth|access|refresh|bearer)_?tokens"  # others are counted
    r"|(?:db|database|user|admin|root|login|smtp|mail|ftp|proxy|mysql|postgres|pg|redis|mongo)_?pass"  # others are runs
    r")(?=_|$)"
)
"""Ends of words, which may be written as one, by which a name says that its value is secret."""

_COUNTED = re.compile(r"(?<![a-z])(?:n|num|max|min|d)_(?:key|token)s?(?=_|$)|(?<![a-z])keys?_(?:dim|size|len|length)")
"""What only has such a word, as sizes of models do."""

_VALUE = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\\.|,(?![\w.-]+=)|[^\s,;&|'"\\])+"""
_ASSIGNED = re.compile(rf"([A-Za-z_][\w.-]*)=({_VALUE})")
"""`NAME=value`, as a shell, `export:` of sbatch and a program's options have it."""

_SPACED = re.compile(rf"(?<!\S)(--?([A-Za-z][\w.-]*)\s+|setenv\s+(\w+)\s+)(?!--)({_VALUE})")
"""`--name value` within a text, as in `bash -c "train --token abc"`, and csh's `setenv NAME value`."""

_HEADER = re.compile(r"\b(Authorization|\w+(?:-\w+)+)(:\s*)([^'\"\n]+)", re.IGNORECASE)
"""`Name: value` of HTTP; its name has a hyphen, unlike a word before a colon in a sentence."""

_IN_URL = re.compile(r"(\w://[^\s/:@]*:)[^\s/@]+(?=@)")
"""A URL up to the password in it."""

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)")

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


def is_secret(name: str) -> bool:
    """Whether a name says that its value is secret."""
    if name in ("PWD", "OLDPWD"):  # a shell's folders
        return False
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).lower()
    return _SECRET.search(_COUNTED.sub("", words)) is not None


def masked(value: Any, name: str = "") -> Any:
    """A value as others may see it; `name` is its dotted key."""
    hidden = is_secret(name)
    if isinstance(value, Mapping):
        return {key: masked(one, f"{name}.{key}" if hidden else str(key)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return _masked_words(value, name if hidden else "")
    if not isinstance(value, str) or not value:
        return value
    return MASK if hidden else _masked_text(value)


def _masked_text(text: str) -> str:
    text = _SPACED.sub(_mask_spaced, _ASSIGNED.sub(_mask_assigned, text))
    return _IN_URL.sub(rf"\1{MASK}", _HEADER.sub(_mask_header, text))


def _masked_words(values: Sequence[Any], name: str) -> list[Any]:
    """Those of a list: in a command a value may be the word behind its option, as in `--token abc`."""
    found: list[Any] = []
    before = ""
    for value in values:
        option = _OPTION.fullmatch(before)
        is_value = isinstance(value, str) and not value.startswith("--")  # a value may begin with one
        found.append(masked(value, option[1] if option and is_value and not name else name))
        before = value if isinstance(value, str) else ""
    return found


def _mask_assigned(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f"{name}={MASK if is_secret(name) else _ASSIGNED.sub(_mask_assigned, value)}"


def _mask_spaced(match: re.Match[str]) -> str:
    before, option, variable, value = match.groups()
    return f"{before}{MASK if is_secret(option or variable) else value}"


def _mask_header(match: re.Match[str]) -> str:
    name, colon, value = match.groups()
    return f"{name}{colon}{MASK if is_secret(name) else value}"


def masked_override(text: str, value: Any) -> str:
    """`key=value` of a command line as others may see it; `value` is what is meant by the text behind `=`."""
    key, _, typed = text.partition("=")
    shown = masked(value, key)
    if shown == value:
        return text
    return f"{key}={shown}" if isinstance(value, str) and value == typed else f"{key}={MASK}"


# In a run directory


def file_beside(config: Path) -> Path:
    """Where what is masked in a run's config is kept."""
    return config.with_name("secrets.json")


def hidden_in(values: Mapping[str, Any]) -> list[tuple[Place, str, str]]:
    """The texts that `masked` changes: where they are, what is shown instead, and what they are."""
    return _differences(values, masked(values), ())


def _differences(value: Any, shown: Any, place: Place) -> list[tuple[Place, str, str]]:
    if isinstance(value, str):
        return [(place, shown, value)] if shown != value else []
    if isinstance(value, Mapping):
        return [found for key, one in value.items() for found in _differences(one, shown[key], (*place, str(key)))]
    if isinstance(value, (list, tuple)):
        return [found for at, one in enumerate(value) for found in _differences(one, shown[at], (*place, at))]
    return []


def write_hidden(file: Path, values: Mapping[str, Any]) -> None:
    """Keep what `masked` hides in a file that only its owner can read."""
    write_atomic(file, json.dumps(hidden_in(values)) + "\n", mode=FOR_OWNER)


def with_hidden(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Masked values with what `write_hidden` kept; as they are for whoever may not read it. Raises OSError.

    A value that a person has changed since in the masked ones stays.
    """
    whole = copy.deepcopy(values)
    try:
        for place, shown, value in json.loads(read_fresh(file)):
            parent = _at(whole, place[:-1])
            if _at(whole, place) == shown and parent is not None:
                parent[place[-1]] = value
    except (FileNotFoundError, PermissionError, ValueError, TypeError):
        return values
    return whole


def _at(values: Any, place: Sequence[str | int]) -> Any:
    try:
        for key in place:
            values = values[key]
    except (KeyError, IndexError, TypeError):
        return None
    return values


def lacking_in(values: Mapping[str, Any]) -> list[str]:
    """Dotted keys of values that are masked: what `write_hidden` kept of them is gone, or may not be read."""
    guess = json.loads(json.dumps(values, default=str).replace(MASK, "x"))
    return [".".join(map(str, place)) for place, *_ in hidden_in(guess) if MASK in str(_at(values, place))]
