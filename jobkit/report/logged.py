"""What a run has logged: its scalars and its last images, from TensorBoard's event files, without TensorBoard's reader.

That one checks each record's checksum in Python, and takes 1 s for 100,000 points where this takes 0.3 s.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

EVENT_FILES = "events.out.tfevents.*"

_HEADER = struct.Struct("<QI")
"""A record's length and the checksum of that; the record and its own checksum follow."""

_FORMATS = {b"\x89PNG\r\n\x1a\n": "image/png", b"GIF8": "image/gif", b"\xff\xd8\xff": "image/jpeg"}
"""First bytes of an image -> its type."""


@dataclass(frozen=True)
class Image:
    """The last image of a tag, as it is in the file."""

    step: int
    width: int
    height: int
    type: str
    """As `image/png`."""
    data: bytes


@dataclass
class Logged:
    """What a run has logged until now, by tag."""

    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    """Values by step, in the order of the steps; values that are not finite included."""
    images: dict[str, Image] = field(default_factory=dict)


def read(folder: Path) -> Logged:
    """What the event files of a folder hold; what is not whole, as the end of a file that is being written, is left."""
    logged = Logged()
    for file in sorted(folder.glob(EVENT_FILES)):
        for event in events(file):
            for value in event.summary.value:
                _add(logged, event.step, value)
    for tag, points in logged.scalars.items():
        if list(points) != sorted(points):  # as a checkpoint's seconds, which are known some steps later
            logged.scalars[tag] = dict(sorted(points.items()))
    return logged


def events(file: Path, start: int = 0, until: int | None = None) -> Iterator[Event]:
    """The events of a file between two places, at each of which a record begins or the file ends."""
    with file.open("rb") as stream:
        length = os.fstat(stream.fileno()).st_size
        stream.seek(start)
        while until is None or stream.tell() < until:
            header = stream.read(_HEADER.size)
            size = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else length + 1
            if size > length:  # the end, or not a length: the file is damaged from here on
                return
            record, checksum = stream.read(size), stream.read(4)
            if len(checksum) < 4:
                return
            with suppress(DecodeError):  # the rest of the file may be whole
                yield Event.FromString(record)


def scalar(value: Summary.Value) -> float | None:
    """The number that a value of a summary is; None where it is something else."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind == "tensor" and value.metadata.plugin_data.plugin_name == "scalars":
        return _number(value)
    return None


def _add(logged: Logged, step: int, value: Summary.Value) -> None:
    number = scalar(value)
    if number is not None:
        logged.scalars.setdefault(value.tag, {})[step] = number
    elif value.HasField("image"):
        data = value.image.encoded_image_string
        found = [name for start, name in _FORMATS.items() if data.startswith(start)]
        if found:
            logged.images[value.tag] = Image(step, value.image.width, value.image.height, found[0], data)


def _number(value: Summary.Value) -> float | None:
    """The number of a scalar that is written as a tensor, as TensorFlow's and newer writers do it."""
    tensor = value.tensor
    for held in (tensor.float_val, tensor.double_val):
        if len(held) == 1:
            return float(held[0])
    form = {4: "<f", 8: "<d"}.get(len(tensor.tensor_content))
    return struct.unpack(form, tensor.tensor_content)[0] if form else None


def finite(points: dict[int, float]) -> list[tuple[int, float]]:
    """(step, value) of those that can be drawn."""
    return [(step, value) for step, value in points.items() if math.isfinite(value)]
