"""TensorBoard, written off the hot path, so that across attempts every curve has each step exactly once."""

from __future__ import annotations

import errno
import io
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import summary as summaries

from jobkit.log import log
from jobkit.run.append import Backlog, Outage, append_whole
from jobkit.train.video import gif

Position = dict[str, int]
"""Event file name -> its size in bytes with all that was logged before one instant."""

TICK_SECONDS = 0.5
"""How often points and the progress report are written: a follower sees a run move, a file server hardly notices."""


def rewind(folder: Path, position: Mapping[str, int]) -> bool:
    """Cut the event files back to a checkpoint's position: what a lost attempt wrote after it will be written again.

    Returns whether any of what was written is left.
    """
    is_left = False
    for file in folder.glob("events.out.tfevents.*"):
        size = position.get(file.name)
        if size is None:
            file.unlink()
            continue
        is_left = True
        if file.stat().st_size > size:
            os.truncate(file, size)
    return is_left


class EventFile:
    """One event file, written without a thread of its own; what a full disk does not take is kept and tried again.

    TensorBoard's EventFileWriter hands records to a thread which dies of a full disk, and its flush then never returns.
    The next attempt cuts the file back or removes it. This process may still be alive then: it asks `may_write` first,
    never makes the file a second time, and appends only to what it left.
    """

    MAX_KEPT_BYTES = 64 << 20

    def __init__(self, folder: Path, first_step: int, may_write: Callable[[], bool] = lambda: True) -> None:
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._may_write = may_write
        self._backlog = Backlog(self.MAX_KEPT_BYTES)
        self._written = 0
        """Bytes in the file."""
        self._exists = False
        self._given_up = False
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if first_step:
            # A TensorBoard that is watching right now forgets the points that rewind() took back.
            start = SessionLog(status=SessionLog.SessionStatus.Value("START"))
            self.add(Event(wall_time=time.time(), step=first_step, session_log=start))

    @property
    def size(self) -> int:
        return self._written + len(self._backlog)

    def add(self, event: Event) -> None:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._backlog.add(record.getvalue())

    def write(self, durable: bool = False) -> None:
        """Append what was added; raises OSError, with the file cut back to whole records, when the disk is full."""
        if self._given_up or not (self._backlog or durable) or not self._may_write():
            return
        before = len(self._backlog)
        try:
            self._backlog.flush(lambda data: self._append(data, durable))
        except (FileNotFoundError, _ShorterThanLeft):  # another attempt has removed it, or cut it back
            self._given_up = True
            log.warning("TensorBoard: another attempt has changed %s; no more is written to it", self.path)
        else:
            self._written += before

    def _append(self, data: bytes, durable: bool) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | (0 if self._exists else os.O_CREAT), 0o666)
        self._exists = True
        try:
            size = os.fstat(fd).st_size
            if size < self._written:
                raise _ShorterThanLeft
            if size > self._written:  # an append that failed could not even be taken back
                os.ftruncate(fd, self._written)
            append_whole(fd, data, durable=durable)
        finally:
            os.close(fd)  # raises, too: a file system of the network may refuse what was written as late as here


class _ShorterThanLeft(Exception):
    """The event file is not as this process left it."""


class MetricLog:
    """A thread that turns logged values into event files. Everything it is given is written in that order."""

    def __init__(
        self,
        folder: Path,
        first_step: int,
        on_tick: Callable[[dict[str, float]], None],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.folder = folder
        self._on_tick = on_tick
        self._latest: dict[str, float] = {}
        self._file = EventFile(folder, first_step, may_write)
        self._outage = Outage("TensorBoard's event file", "Its points are kept in memory meanwhile.")
        self._waiting: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="jobkit-metrics", daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers, or tensors of one element, which are read later and never wait for the device here."""

        def write() -> None:
            for tag, value in values.items():
                try:
                    number = float(value)
                except (TypeError, ValueError, RuntimeError) as error:
                    log.warning("ctx.log: %s at step %d is not one number: %s", tag, step, error)
                    continue
                self._latest[tag] = number
                self._add(summaries.scalar(tag, number), step)

        self._waiting.append(write)

    def image(self, step: int, tag: str, image: torch.Tensor) -> None:
        self._waiting.append(lambda: self._add(summaries.image(tag, image.cpu().numpy(), dataformats="CHW"), step))

    def video(self, step: int, tag: str, video: torch.Tensor) -> None:
        """Log a short video, uint8 [T, C, H, W], as an animated GIF: TensorBoard shows it among the images."""

        def write() -> None:  # not torch's own summary of a video: it wants moviepy
            _, channels, height, width = video.shape
            image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=gif(video))
            self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), step)

        self._waiting.append(write)

    def text(self, step: int, tag: str, text: str) -> None:
        self._waiting.append(lambda: self._add(summaries.text(tag, text), step))

    def summary(self, step: int, summary: Any) -> None:
        """Log a summary of TensorBoard's of any kind, as its own writer makes them: a histogram, a figure."""
        self._waiting.append(lambda: self._add(summary, step))

    def mark(self) -> Future[Position]:
        """A future of the position after everything logged so far, once it is on the disk.

        Where the disk does not take it, of the position that it will have there.
        """
        future: Future[Position] = Future()

        def resolve() -> None:
            try:
                self._write(durable=True)
                files = {file.name: file.stat().st_size for file in self.folder.glob("events.out.tfevents.*")}
                future.set_result({**files, self._file.path.name: self._file.size})
            except Exception as error:  # for the checkpoint to say: it must not wait for ever
                future.set_exception(error)

        self._waiting.append(resolve)
        self._wake.set()
        return future

    def on_disk(self, position: Position) -> Position:
        """The position of a mark; OSError where the disk has not taken all that was logged before it."""
        for name, size in position.items():
            if (self.folder / name).stat().st_size < size:
                raise OSError(errno.ENOSPC, "TensorBoard's points are not all on the disk", name)
        return position

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        # Woken by the clock and not by each value: a training step must not pay for a switch of threads.
        while not self._closing:
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._waiting:
            self._try(self._waiting.popleft())
        self._try(self._write)
        self._try(lambda: self._on_tick(self._latest))

    def _write(self, durable: bool = False) -> None:
        with self._outage.survived():
            self._file.write(durable)

    @staticmethod
    def _try(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # a value that is none costs a point of a curve, not the training
            log.warning("TensorBoard: %s", error)

    def _add(self, summary: Any, step: int) -> None:
        self._file.add(Event(wall_time=time.time(), step=step, summary=summary))
