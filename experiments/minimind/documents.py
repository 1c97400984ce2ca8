"""The documents of a .jsonl file, `{"text": ...}` a line. No torch: a submission reads some of them, too."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jobkit.errors import InputError

LONGEST = 64 << 20
"""Bytes of a line: a file that is one array of documents would else be read as one line, into memory."""


def tokens_of(file: Path) -> Path:
    """The folder of the copies of a file's tokens, beside it."""
    return file.with_name(f"{file.name}.tokens")


def documents(file: Path) -> Iterator[str]:
    """The text of each line; empty lines count as none.

    Raises InputError, naming file and line, at one that is not `{"text": ...}`.
    """
    with file.open("rb") as opened:
        for number, line in enumerate(lines_of(opened), start=1):
            if not line.isspace():
                yield text_of(line, f"{file}:{number}")


def draw_of(text: str) -> float:
    """A number in [0, 1) that is the same for equal texts, and random else: below `held_out` it is for validation."""
    return digest_of(text) / 2**63


def digest_of(text: str) -> int:
    """63 bits that equal texts have alike."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def lines_of(opened: BinaryIO) -> Iterator[bytes]:
    """Its lines; of one that is longer than any document may be, parts, which are none."""
    return iter(lambda: opened.readline(LONGEST), b"")


def text_of(line: bytes, place: str) -> str:
    """A line's document; InputError, naming the place, where it is none."""
    try:
        text: str = json.loads(line)["text"]
        text.encode()  # half of a surrogate pair is text for JSON, but not for UTF-8
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found = line[:60].decode(errors="replace").strip()
        raise InputError(f'{place}: expected {{"text": "..."}}, found {found}') from None
    return text
