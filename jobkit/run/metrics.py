"""TensorBoard's event files, written so that across attempts every curve has each step exactly once.

    reporter's thread --add()--> EventFile --write()--> tensorboard/events.out.tfevents...
    a checkpoint holds the sizes of all event files (`position`); the next attempt cuts them back to it (`rewind`)

Only rank 0 writes here. TensorBoard's own writer hands records to a thread that a full disk kills; this writer keeps
records that the disk does not take, and tries again.
"""

from __future__ import annotations

import io
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter

Position = dict[str, int]
"""Event file name -> bytes of all that was logged before one instant."""

MAX_KEPT_BYTES = 64 << 20
"""Records that wait for a disk with room; older ones are dropped beyond that."""

PATTERN = "events.out.tfevents.*"


def rewind(folder: Path, position: Mapping[str, int]) -> None:
    """Cut the event files back to a checkpoint's position: the next attempt writes the later points again."""
    for file in folder.glob(PATTERN):
        size = position.get(file.name)
        if size is None:
            file.unlink()
        elif file.stat().st_size > size:
            os.truncate(file, size)


class EventFile:
    """One attempt's event file. It is made by the first write.

    file = EventFile(run.tensorboard, first_step=40)
    file.add(41, scalar("train/loss", 0.5))
    file.write()
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._waiting = bytearray()
        self._written = 0
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:
            # A TensorBoard that is watching right now forgets the points that `rewind` took back.
            start = SessionLog(status=SessionLog.SessionStatus.Value("START"))
            self._add(Event(wall_time=time.time(), step=first_step, session_log=start))

    @property
    def size(self) -> int:
        """Bytes of the file once everything is written."""
        return self._written + len(self._waiting)

    def add(self, step: int, value: Summary.Value) -> None:
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def _add(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        if len(self._waiting) < MAX_KEPT_BYTES:
            self._waiting += record.getvalue()

    def write(self) -> None:
        """Append the waiting records. Raises OSError if the disk refuses them: they wait, and the file stays whole."""
        if not self._waiting:
            return
        with self.path.open("ab", buffering=0) as file:
            file.truncate(self._written)  # an append that failed may have left a part of a record
            count = file.write(self._waiting)
            if count < len(self._waiting):
                file.truncate(self._written)
                raise OSError(28, "No space left on device", str(self.path))
        self._written += count
        self._waiting.clear()


def events(file: Path, start: int, end: int) -> Iterator[Event]:
    """Yield the events between two positions of an event file, which are ends of records."""
    with file.open("rb") as stream:
        stream.seek(start)
        while stream.tell() < end:
            (size,) = struct.unpack("<Q4x", stream.read(12))  # the length, and its checksum
            yield Event.FromString(stream.read(size))
            stream.seek(4, os.SEEK_CUR)


def scalar(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def image(tag: str, pixels: Any) -> Summary.Value:
    """Return an image; `pixels` is uint8 or float in [0, 1], [C, H, W] or [H, W], with 1 or 3 channels."""
    picture = _picture(pixels)
    data = io.BytesIO()
    picture.save(data, format="PNG")
    return _as_image(tag, picture, data.getvalue())


def video(tag: str, frames: Any, frames_per_second: float = 8.0) -> Summary.Value:
    """Return a short video, [T, C, H, W], as an animated GIF, which TensorBoard shows among the images."""
    pictures = [_picture(frame) for frame in frames]
    data = io.BytesIO()
    pictures[0].save(
        data,
        format="GIF",
        save_all=True,
        append_images=pictures[1:],
        duration=1000 / frames_per_second,
        loop=0,
    )
    return _as_image(tag, pictures[0], data.getvalue())


def _as_image(tag: str, picture: Any, data: bytes) -> Summary.Value:
    shown = Summary.Image(height=picture.height, width=picture.width, encoded_image_string=data)
    return Summary.Value(tag=tag, image=shown)


def _picture(pixels: Any) -> Any:
    """Return a picture of PIL's."""
    from PIL import Image

    array = pixels.detach().cpu()
    if array.is_floating_point():
        array = (array.clamp(0, 1) * 255).round()
    array = array.byte()
    if array.dim() == 3:
        array = array.squeeze(0) if array.shape[0] == 1 else array.permute(1, 2, 0)
    return Image.fromarray(array.numpy())


def text(tag: str, content: str) -> Summary.Value:
    """Return a text, which TensorBoard shows as Markdown."""
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[content.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary.Value(tag=f"{tag}/text_summary", metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
