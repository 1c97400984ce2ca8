"""How the code of two submissions differs, line by line, by their snapshots."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobkit.run import secrets
from jobkit.run.files import read_json
from jobkit.run.snapshot import MANIFEST

LONGEST = 1 << 20
"""Bytes of the longest file of which lines are compared: what is longer is data, and would take minutes."""

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")

_GIVEN = re.compile(r"""(\w+)(["']?\]?\s*[:=]\s*)(["'])([^"']+)\3""")
"""A text that code gives a name: `name = "text"`, `{"name": "text"}`."""


@dataclass(frozen=True)
class Line:
    """A line that only one of two snapshots has; or, with line 0, what there is to say of a whole file."""

    file: str
    line: int
    """Its number in the snapshot that has it."""
    sign: str
    """`+` where the second has it, `-` where the first has; empty for a file."""
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.sign} {self.text}" if self.line else f"{self.file} {self.text}"


def code_diff(before: Path, after: Path) -> list[Line]:
    """The lines by which the snapshot folder `after` differs from `before`; what is secret in them is masked."""
    one, other = (_files(folder) for folder in (before, after))
    missing = [
        Line(str(folder), 0, "", "is gone") for folder, files in ((before, one), (after, other)) if files is None
    ]
    if one is None or other is None:
        return missing
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return [line for name in names for line in _lines(name, before / name, after / name)]


def _files(folder: Path) -> dict[str, str] | None:
    """Name -> digest of each file of a snapshot; None where there is none."""
    files = read_json(folder / MANIFEST)
    return files if isinstance(files, dict) else None


def _lines(name: str, before: Path, after: Path) -> Iterator[Line]:
    if not (before.exists() and after.exists()):
        yield Line(name, 0, "", "is new" if after.exists() else "was removed")
        return
    one, other = _text(before), _text(after)
    if one is None or other is None or one == other:
        yield Line(name, 0, "", "has other permissions" if one is not None and one == other else "differs")
        return
    old = new = 0
    for line in difflib.unified_diff(one, other, n=0, lineterm=""):
        if hunk := _HUNK.match(line):
            old, new = int(hunk[1]), int(hunk[2])
        elif line[0] == "-" and old:
            yield Line(name, old, "-", _shown(line))
            old += 1
        elif line[0] == "+" and new:
            yield Line(name, new, "+", _shown(line))
            new += 1


def _shown(line: str) -> str:
    """A line of the diff without its sign."""
    return _GIVEN.sub(_masked, str(secrets.masked(line[1:]))).rstrip()


def _masked(match: re.Match[str]) -> str:
    name, between, quote, _ = match.groups()
    return f"{name}{between}{quote}{secrets.MASK}{quote}" if secrets.is_secret(name) else match[0]


def _text(file: Path) -> list[str] | None:
    """The lines of a text; None for what is none, or is too long."""
    try:
        return None if file.stat().st_size > LONGEST else file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
