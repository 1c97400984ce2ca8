"""What a W&B in offline mode has written, read without W&B: the format of LevelDB's log, with W&B's records in it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

MAGIC, BLOCK = 7, 32768
"""Bytes of the file's own head, and of a block, which no record's head spans."""

FULL, LAST = 1, 4


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all sessions in a folder, in their order, as `wandb sync` would send them."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(file):
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                found.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


def records(file: Path) -> Iterator[Record]:
    """The records of one session."""
    data, at, part = file.read_bytes(), MAGIC, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (FULL, LAST):
            yield Record.FromString(part)
            part = b""
