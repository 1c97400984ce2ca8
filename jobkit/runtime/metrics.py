"""TensorBoard, written off the hot path, so that across attempts every curve has each step exactly once."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

Position = dict[str, int]
"""Event file name -> its size in bytes: all that was written before one instant."""

TICK_SECONDS = 0.5


def rewind(folder: Path, position: Mapping[str, int]) -> None:
    """Cut the event files back to a checkpoint's position: what a lost attempt wrote after it will be written again."""
    for file in folder.glob("events.out.tfevents.*"):
        size = position.get(file.name)
        if size is None:
            file.unlink()
        elif file.stat().st_size > size:
            os.truncate(file, size)


class MetricLog:
    """A thread that turns logged values into event files. Everything it is given is written in that order."""

    def __init__(self, folder: Path, first_step: int, on_tick: Callable[[dict[str, float]], None]) -> None:
        # Imported on rank 0 alone: it costs a second, and as many seconds of CPU as there are ranks on a node.
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self._on_tick = on_tick
        self._latest: dict[str, float] = {}
        # purge_step: a TensorBoard that is watching right now forgets the points that rewind() took back.
        self._writer = SummaryWriter(str(folder), purge_step=first_step or None, max_queue=1000, flush_secs=5)
        self._waiting: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="jobkit-metrics", daemon=True)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers, or tensors of one element, which are read later and never wait for the device here."""
        self._waiting.append(lambda: self._write_scalars(step, values))

    def image(self, step: int, tag: str, image: torch.Tensor) -> None:
        """Log one image: CHW, uint8 or float in [0, 1]."""
        self._waiting.append(lambda: self._writer.add_image(tag, image.cpu(), step))

    def hparams(self, parameters: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Log the run's parameters with its final metrics, for TensorBoard's HPARAMS page."""
        from torch.utils.tensorboard.summary import hparams

        def write() -> None:
            for summary in hparams(dict(parameters), dict(metrics)):
                self._writer._get_file_writer().add_summary(summary)

        self._waiting.append(write)

    def mark(self) -> Future[Position]:
        """A future of the position after everything logged so far is on the disk."""
        future: Future[Position] = Future()
        self._waiting.append(lambda: self._resolve(future))
        self._wake.set()
        return future

    def close(self) -> None:
        """Write what is left and stop."""
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
        self._try(self._writer.close)

    def _drain(self) -> None:
        while self._waiting:
            self._try(self._waiting.popleft())
        self._try(lambda: self._on_tick(self._latest))

    @staticmethod
    def _try(job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # a full disk or a value that is none costs points of a curve, not the training
            print(f"jobkit: TensorBoard: {error}", file=sys.stderr, flush=True)

    def _write_scalars(self, step: int, values: Mapping[str, Any]) -> None:
        for tag, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                print(f"jobkit: ctx.log: {tag} at step {step} is not one number: {error}", file=sys.stderr, flush=True)
                continue
            self._latest[tag] = number
            self._writer.add_scalar(tag, number, step)

    def _resolve(self, future: Future[Position]) -> None:
        try:
            self._writer.flush()
            position = {}
            for file in self.folder.glob("events.out.tfevents.*"):
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
                    position[file.name] = os.fstat(stream.fileno()).st_size
            future.set_result(position)
        except Exception as error:  # for the checkpoint to say: it must not wait for ever
            future.set_exception(error)
