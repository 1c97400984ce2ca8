"""The points of a sweep: what each of its runs overrides, from a command line, a table or `sweep:` of a YAML.

    --sweep params.lr=.003,.01 seed=range(3)  ─┐
    --sweep-file points.csv                   ─┼─> Point = ((`params.lr=.003`, place), (`seed=0`, place)), ...
    sweep: {params.lr: [.003, .01], seed: ...} ─┘          └─> Source.loaded(point), as strict as `key=value`

submit.py calls `points`. Nothing is read here but the table.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobkit.config.load import Source
from jobkit.config.yamlfile import COMMAND_LINE, dump_in_line, split_values
from jobkit.errors import InputError, nearest

Point = tuple[tuple[str, str], ...]
"""The overrides of one run: `key=value`, and the place for errors about it."""

FORMS = "v1,v2 or range(4) or log(1e-4,1e-1,7)"

MOST_POINTS = 100_000
"""More are a slip, as one factor too many: each gets a run directory."""

DIGITS = 4
"""Significant digits of the values of `log(...)`: a person can type them again."""

_KEY = re.compile(r"\+?[A-Za-z_][\w.\-]*")
_CALL = re.compile(r"(\w+)\((.*)\)")


def points(source: Source, words: Sequence[str] | None, table: Path | None) -> list[Point] | None:
    """Return the points of a sweep; None where nothing asks for one. Raises InputError.

    `--sweep` or `--sweep-file` takes the place of `sweep:`. A key that is typed as `key=value` has that value in all
    points of `sweep:`.
    """
    if words is not None:
        return _of_words(words)
    if table is not None:
        return _of_table(table)
    if source.sweep is None:
        return None

    def place(key: str) -> str:
        file, line = source.places.by_key.get(key, (source.places.file, None))
        return f"{file}:{line}" if line else str(file)

    with source.places.locating():
        return _of_yaml(source.sweep, set(source.typed), place)


def sweep_name(name: str, runs: Iterable[str]) -> str:
    """Return the name of a sweep, `<name>-<hash8>`: the same runs are the same sweep, however they are written."""
    return f"{name}-{hashlib.sha256(' '.join(sorted(runs)).encode()).hexdigest()[:8]}"


# The three ways to write points


def _of_words(words: Sequence[str]) -> list[Point]:
    axes: dict[str, list[str]] = {}
    try:
        for word in words:
            key, equals, text = word.partition("=")
            if not equals or not _KEY.fullmatch(key):
                raise InputError(key="--sweep", found=word, allowed=f"key={FORMS}, as in params.lr=.003,.01")
            if key in axes:
                raise InputError("the key is there twice", key=key, hint="write one list of all its values")
            axes[key] = _values(key, text)
        return _product({key: [(f"{key}={value}", COMMAND_LINE) for value in axes[key]] for key in axes})
    except InputError as error:
        raise error.at(COMMAND_LINE) from None


def _of_table(path: Path) -> list[Point]:
    """A line of keys, then a line a point; an empty field keeps the YAML's value."""
    try:
        reader = csv.reader(path.read_text(encoding="utf-8-sig").splitlines(), skipinitialspace=True)
        rows = [(reader.line_num, [field.strip() for field in row]) for row in reader if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}").at(path) from None
    if len(rows) < 2:
        raise InputError("it has no points", hint="a line of keys, as params.lr,seed, then a line a point").at(path)
    (line, keys), *rest = rows
    for column, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key) or key in keys[: column - 1]:
            hint = "commas stand between the columns" if re.search(r"[;\t]", key) else ""
            refusal = InputError(key=f"column {column}", found=key, allowed="a key, each once", hint=hint)
            raise refusal.at(path, line)
    table: list[Point] = []
    for line, row in rest:
        if len(row) != len(keys):
            hint = "put a value that has a comma into double quotes"
            raise InputError(f"{len(row)} value(s) for {len(keys)} key(s)", hint=hint).at(path, line)
        fields = [(column, key, value) for column, (key, value) in enumerate(zip(keys, row, strict=True), 1) if value]
        table.append(tuple((f"{key}={value}", f"{path}:{line}, column {column}") for column, key, value in fields))
    return table


def _of_yaml(sweep: Any, typed: Collection[str], place: Callable[[str], str]) -> list[Point] | None:
    """A mapping of axes, or a list of mappings; None where the command line has a value for every key."""

    def word(below: str, key: str, text: str) -> tuple[str, str]:
        return f"{key}={text}", place(f"{below}.{key}")

    if isinstance(sweep, Mapping) and sweep:
        axes = {key: _listed(f"sweep.{key}", value) for key, value in sweep.items() if _bare(key) not in typed}
        return _product({key: [word("sweep", key, text) for text in axes[key]] for key in axes}) if axes else None
    if isinstance(sweep, list) and sweep and all(isinstance(item, Mapping) and item for item in sweep):
        points = []
        for number, item in enumerate(sweep):
            free = {key: value for key, value in item.items() if _bare(key) not in typed}
            points.append(tuple(word(f"sweep.{number}", key, dump_in_line(value)) for key, value in free.items()))
        return points if any(points) else None
    allowed = "a mapping, as {params.lr: [.003, .01], seed: range(3)}, or a list of mappings"
    raise InputError(key="sweep", found=sweep, allowed=allowed)


def _bare(key: str) -> str:
    return key.removeprefix("+")


def _product(axes: Mapping[str, Sequence[tuple[str, str]]]) -> list[Point]:
    """The product of axes; the last one changes fastest."""
    count = math.prod(map(len, axes.values()))
    if count > MOST_POINTS:
        raise InputError(key="sweep", found=f"{count} points", allowed=f"at most {MOST_POINTS}")
    return list(itertools.product(*axes.values()))


# The values of an axis


def _listed(key: str, value: Any) -> list[str]:
    if isinstance(value, list) and value:
        return [dump_in_line(item) for item in value]
    if isinstance(value, str):
        return _values(key, value)
    hint = "keys are written with dots, as params.lr" if isinstance(value, Mapping) else ""
    raise InputError(key=key, found=value, allowed=f"a list of values, or a text like {FORMS}", hint=hint)


def _values(key: str, text: str) -> list[str]:
    """The values of `v1,v2`, `range(...)` or `log(...)`, as they stand behind `key=`."""
    call = _CALL.fullmatch(text.strip())
    if call and call[1] in ("range", "log"):
        return _called(key, call[1], call[2].split(","))
    values = split_values(text)
    if not values or not all(values):
        raise InputError(key=key, found=text, allowed=f"{FORMS}, without blanks")
    for value in values:
        if match := _CALL.fullmatch(value):  # as choice(1,2) of Hydra
            hint = nearest(match[1], ("range", "log")) or f"the text itself is written '\"{value}\"'"
            raise InputError(key=key, found=value, allowed=FORMS, hint=hint)
    return values


def _called(key: str, name: str, words: Sequence[str]) -> list[str]:
    """`range` is Python's; `log(first,last,count)` has equal factors, and both ends."""
    try:
        if name == "range":
            values = [str(number) for number in range(*map(int, words))[: MOST_POINTS + 1]]
        else:
            first, last, count = float(words[0]), float(words[1]), int(words[2])
            factor = (last / first) ** (1 / (count - 1))
            numbers = [first * factor**number for number in range(min(count, MOST_POINTS + 1))]
            values = [repr(float(f"{value:.{DIGITS}g}")) for value in numbers if value > 0 and math.isfinite(value)]
            if len(words) != 3 or len(values) != len(numbers):
                raise ValueError
        if not values:
            raise ValueError
    except (ValueError, TypeError, IndexError, ArithmeticError):
        allowed = {
            "range": "range(COUNT), range(FIRST,END) or range(FIRST,END,STEP), of whole numbers, with a value or more",
            "log": "log(FIRST,LAST,COUNT), with both ends above 0 and two values or more",
        }
        raise InputError(key=key, found=f"{name}({','.join(words)})", allowed=allowed[name]) from None
    return values
