"""The documents of a .jsonl file, `{"text": ...}` a line. No torch: a submission reads some of them, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from jobkit.errors import InputError


def documents(file: Path) -> Iterator[str]:
    """The text of each line; empty lines count as none.

    Raises InputError, naming file and line, at one that is not `{"text": ...}`.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield text_of(line, f"{file}:{number}")


def text_of(line: bytes, place: str) -> str:
    """A line's document; InputError, naming the place, where it is none."""
    try:
        text: str = json.loads(line)["text"]
        text.encode()  # half of a surrogate pair is text for JSON, but not for UTF-8
    except (ValueError, KeyError, TypeError, AttributeError):
        found = line[:60].decode(errors="replace").strip()
        raise InputError(f'{place}: expected {{"text": "..."}}, found {found}') from None
    return text
