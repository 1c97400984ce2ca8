"""The points of a sweep: what each of its runs overrides, from a command line, a YAML's `sweep:` or a table."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jobkit.errors import InputError, InvalidValue, nearest
from jobkit.run.overrides import Given
from jobkit.run.usage import AXIS_FORMS
from jobkit.run.yamlfile import read_text

Point = tuple[Given, ...]
"""The overrides of one run."""

SIGNIFICANT_DIGITS = 4
"""Of the values of `log(...)`: a person can type them, and each has one text."""

MOST_POINTS = 100_000
"""More are a slip, as a factor too many: a run directory would be made for each."""

_KEY = re.compile(r"\+?[A-Za-z_][\w.\-]*(\[\d+\])?")
_CALL = re.compile(r"(range|log)\((.*)\)")
_ANY_CALL = re.compile(r"[A-Za-z_]\w*\(.*\)")


def grid_of_words(words: Sequence[str]) -> list[Point]:
    """The product of axes as typed, `params.lr=.003,.01 seed=range(3)`; the last one changes fastest.

    Raises InputError.
    """
    axes: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not _KEY.fullmatch(key):
            raise InputError(f"--sweep {word}: expected key={AXIS_FORMS}, as in params.lr=.003,.01")
        if key in axes:
            raise InputError(f"--sweep {word}: {key} is there twice; one list of all its values")
        try:
            axes[key] = _values(text)
        except ValueError as error:
            raise InputError(f"--sweep {word}: {error}") from None
    try:
        return _product(axes)
    except ValueError as error:
        raise InputError(f"--sweep: {error}") from None


def grid_of_yaml(sweep: Any, place_of: Callable[[str], str] = str) -> list[Point]:
    """The points under `sweep:`: a mapping of keys to their values makes a grid, a list of mappings has each of
    them.

    `place_of` gives the place of a dotted key, as `toy.yaml:6: sweep.seed`. Raises InvalidValue.
    """

    def given(below: str, key: str, text: str) -> Given:
        return Given(f"{key}={text}", place_of(f"{below}.{key}").removesuffix(f".{key}"))

    if isinstance(sweep, Mapping):
        axes = {str(key): _listed(f"sweep.{key}", value) for key, value in sweep.items()}
        try:
            return _product(axes, partial(given, "sweep"))
        except ValueError as error:
            raise InvalidValue("sweep", str(error)) from None
    if isinstance(sweep, list) and sweep and all(isinstance(one, Mapping) and one for one in sweep):
        return [
            tuple(given(f"sweep.{number}", key, _text(value)) for key, value in one.items())
            for number, one in enumerate(sweep)
        ]
    calls = AXIS_FORMS.partition(" or ")[2]
    expected = f"a mapping, as params.lr: [.003, .01] or params.lr: {calls}, or a list of mappings"
    raise InvalidValue("sweep", f"found {sweep!r}, expected {expected}")


def points_of_table(path: Path) -> list[Point]:
    """The points in a CSV file: a line of keys, then a line a point; an empty field overrides nothing.

    Raises InputError with file and line.
    """
    reader = csv.reader(read_text(path).removeprefix("\ufeff").splitlines(), skipinitialspace=True)
    rows = [(reader.line_num, row) for row in reader]
    keys = [key.strip() for key in rows[0][1]] if rows else []
    wrong = next((key for key in keys if not _KEY.fullmatch(key)), None)
    if not keys or wrong is not None or len(set(keys)) < len(keys):
        found = "nothing" if not keys else f"a key twice in {keys}" if wrong is None else f"{wrong!r}"
        comma = "; commas stand between the columns" if re.search(r"[;\t]", wrong or "") else ""
        raise InputError(f"{path}:1: found {found}, expected the keys, as in params.lr,seed{comma}")
    points = []
    for line, row in rows[1:]:
        if not any(field.strip() for field in row):
            continue
        if len(row) != len(keys):
            raise InputError(f"{path}:{line}: {len(row)} value(s) for {len(keys)} key(s); quote a value with a comma")
        fields = enumerate(zip(keys, map(str.strip, row), strict=True), start=1)
        given = (Given(f"{key}={value}", f"{path}:{line}: column {number}") for number, (key, value) in fields if value)
        points.append(tuple(given))
    if not points:
        raise InputError(f"{path}: has no points: a line of keys, then a line a point")
    return points


def _product(axes: Mapping[str, Sequence[str]], given: Callable[[str, str], Given] | None = None) -> list[Point]:
    if not axes:
        raise ValueError(f"no axis; expected key: {AXIS_FORMS}")
    count = math.prod(len(values) for values in axes.values())
    if count > MOST_POINTS:
        raise ValueError(f"{count} points; at most {MOST_POINTS} are taken for what was meant")
    make = given or (lambda key, value: Given(f"{key}={value}"))
    each = [[make(key, value) for value in values] for key, values in axes.items()]
    return list(itertools.product(*each))


def _listed(key: str, value: Any) -> list[str]:
    """The values of one axis of a YAML."""
    try:
        if isinstance(value, list) and value:
            return [_text(one) for one in value]
        if isinstance(value, str):
            return _values(value)
    except ValueError as error:
        raise InvalidValue(key, f"found {value!r}: {error}") from None
    written = next(iter(value), "lr") if isinstance(value, Mapping) else ""
    hint = f"; keys are written with dots: params.{written}: [...]" if isinstance(value, Mapping) else ""
    raise InvalidValue(key, f"found {value!r}, expected a list of values, or a text like range(4){hint}")


def _text(value: Any) -> str:
    """A value of a YAML as it stands behind `key=`: JSON, which YAML reads."""
    if isinstance(value, float) and not math.isfinite(value):  # YAML knows them by other names than JSON
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    return json.dumps(value)


def _values(text: str) -> list[str]:
    """The values of an axis as typed. Raises ValueError."""
    if call := _CALL.fullmatch(text.strip()):
        return _called(call[1], [one.strip() for one in call[2].split(",")])
    values = [one.strip() for one in _split(text)]
    if not all(values):
        raise ValueError(f"a value is empty (blanks separate axes: no blank behind a comma); expected {AXIS_FORMS}")
    if unknown := next(filter(_ANY_CALL.fullmatch, values), None):  # Hydra's choice(...), a misspelt range(...)
        hint = nearest(unknown.partition("(")[0], ("range", "log"))
        raise ValueError(f"found {unknown}; expected {AXIS_FORMS}; a text in quotes: '\"{unknown}\"'{hint}")
    return values


def _called(name: str, given: Sequence[str]) -> list[str]:
    """The values of `range(...)`, as Python's, or of `log(first,last,count)`, in equal factors, both ends included."""
    try:
        if name == "range":
            values = [str(one) for one in range(*map(int, given))]
        else:
            first, last, count = float(given[0]), float(given[1]), int(given[2])
            if len(given) != 3 or min(first, last) <= 0 or count < 2 or not math.isfinite(first * last):
                raise ValueError
            factor = (last / first) ** (1 / (count - 1))
            values = [_rounded(first * factor**number) for number in range(count)]
    except (ValueError, TypeError, IndexError, OverflowError):
        forms = "range(COUNT), range(FIRST,END) or range(FIRST,END,STEP), of whole numbers"
        expected = forms if name == "range" else "log(FIRST,LAST,COUNT), with both above 0 and 2 values or more"
        raise ValueError(f"expected {expected}") from None
    if not values:
        raise ValueError(f"{name}({','.join(given)}) has no values")
    return values


def _rounded(value: float) -> str:
    return repr(float(f"{value:.{SIGNIFICANT_DIGITS}g}"))


def _split(text: str) -> Iterable[str]:
    """The parts between commas that stand in no bracket and in no quotes."""
    part, depth, quote = "", 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"" and not part.strip():
            quote = sign
        depth += (sign in "[{(") - (sign in "]})") if not quote else 0
        if sign == "," and depth == 0 and not quote:
            yield part
            part = ""
        else:
            part += sign
    yield part
