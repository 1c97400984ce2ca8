"""All that a rank shows of its training: curves, progress, warnings.

    ctx.log --> Reporter --one append a step--> thread --> TensorBoard (metrics.py)
                        --hash--> page (repeated_steps.py)  progress.json, each half second

    each half second, and at the end of the run --> mirror.py: copies at W&B and MLflow

Only rank 0 writes files. Nothing here is the truth: a full disk delays a curve, and the training goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from jobkit.errors import UsageError
from jobkit.log import log
from jobkit.loop.rank import Rank
from jobkit.loop.repeated_steps import Repeats
from jobkit.mirror import Mirror, services
from jobkit.run import metrics
from jobkit.run.metrics import EventFile, Position
from jobkit.wire.pages import Phase

TICK_SECONDS = 0.5
"""How often points and the progress report are written: a follower sees a run move, a file server hardly notices."""

VALUES_SHOWN = 8
"""The newest values that the progress report holds."""


MIRROR_SECONDS = 20.0
"""How long a finished run waits for its copies at other services."""


def as_number(value: Any) -> float:
    """Return a number, or a tensor or an array of one element, as a float. Raises what float() does for others."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(())  # float() takes a tensor of any shape, and an array without dimensions alone
    return float(value)


class Reporter:
    """One rank's reports.

    reporter = Reporter(rank)
    reporter.begin(first_step=40, position=extra.get("tensorboard"), repeats=repeats)
    reporter.log(40, {"train/loss": loss})
    reporter.end_step(40)
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.logged: dict[str, float] = {}
        """The values of the step under way that are numbers already."""
        self._on_device: dict[str, torch.Tensor] = {}
        self._fields: dict[str, Any] = {}
        self._outside: tuple[int, float] | None = None
        """While the rank is outside of steps: the steps done, and since when."""
        self._latest: dict[str, float] = {}
        self._warnings: list[str] = []
        self._repeats: Repeats | None = None
        self._jobs: deque[Callable[[], None]] = deque()
        self._file: EventFile | None = None
        self._wake, self._closing = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._disk_said = False
        self._mirrors: list[Mirror] = []
        if rank.rank == 0:
            self._mirrors = [Mirror(rank.run, service, self.warn) for service in services(rank.config.mirror)]

    def begin(self, first_step: int, position: Position | None, repeats: Repeats | None) -> None:
        """Cut the curves back to where the training goes on, and begin to write.

        Lines before the loop run in each attempt: what they log is written in the first one.
        """
        self._repeats = repeats
        if position is not None:
            self.logged, self._on_device = {}, {}
            self._jobs.clear()
        self._fields["first_step"] = first_step
        if self.rank.rank == 0:
            folder = self.rank.run.tensorboard
            folder.mkdir(exist_ok=True)
            metrics.rewind(folder, position or {})
            self._file = EventFile(folder, first_step)
            self.rank.report(
                step=first_step, **self._fields
            )  # now: the attempt may die before the thread's first report
            self._thread = threading.Thread(target=self._work, name="jobkit-reporter", daemon=True)
            self._thread.start()
        self.end_step(first_step, compare=False)

    # Curves

    def log(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Log numbers, or tensors and arrays of one element. Raises UsageError for any other value. Returns them as
        they are now: numbers, and of tensors of a device copies."""
        now: dict[str, Any] = {}
        for tag, value in values.items():
            if value is None:
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.detach()
                if value.device.type != "cpu":
                    # Read by the thread, for the loop does not wait for the device; a copy, for the loop may change it.
                    now[tag] = self._on_device[tag] = value.clone()
                    continue
            try:
                now[tag] = self.logged[tag] = as_number(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UsageError(f"ctx.log: {tag} at step {step} is not one number: {error}") from None
        return now

    def values_now(self) -> dict[str, float]:
        """Return what the step under way has logged so far. It waits for the devices."""
        return self.logged | {tag: float(value) for tag, value in self._on_device.items()}

    def log_now(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers of another step than the one under way, or of jobkit itself."""
        numbers = {tag: float(value) for tag, value in values.items()}
        if self.rank.rank == 0:
            self._jobs.append(lambda: self._write_scalars(step, numbers))

    def end_step(self, step: int, *, compare: bool = True) -> None:
        """The step is done: hand its values over. `compare`: they are values of the step itself."""
        if not self.logged and not self._on_device:
            return
        logged, on_device = self.logged, self._on_device
        self.logged, self._on_device = {}, {}
        repeats = self._repeats if compare else None
        if on_device and self.rank.rank == 0:
            numbers = on_device.items()
            self._jobs.append(lambda: self._take(step, logged | {tag: float(v) for tag, v in numbers}, repeats))
        else:
            if repeats is not None:
                repeats.note(step, logged)
            if self.rank.rank == 0:
                self._jobs.append(lambda: self._write_scalars(step, logged))

    def _take(self, step: int, values: dict[str, float], repeats: Repeats | None) -> None:
        if repeats is not None:
            repeats.note(step, values)
        self._write_scalars(step, values)

    def _write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        assert self._file is not None  # rank 0's thread, or nobody, works the jobs off
        self._latest.update(values)
        for tag, value in values.items():
            self._file.add(step, metrics.scalar(tag, value))

    def image(self, step: int, tag: str, pixels: torch.Tensor) -> None:
        self._add(step, lambda: metrics.image(tag, pixels))

    def video(self, step: int, tag: str, frames: torch.Tensor) -> None:
        self._add(step, lambda: metrics.video(tag, frames))

    def text(self, step: int, tag: str, content: str) -> None:
        self._add(step, lambda: metrics.text(tag, content))

    def _add(self, step: int, make: Callable[[], Any]) -> None:
        if self.rank.rank == 0:
            value = make()  # here: a mistake of the user's is an error of the user's line
            self._jobs.append(lambda: self._file.add(step, value) if self._file is not None else None)

    def position(self) -> Future[Position]:
        """Return a future of the position of the curves after everything logged so far, for a checkpoint."""
        future: Future[Position] = Future()
        if self._file is None:
            future.set_result({})
            return future
        file = self._file

        def resolve() -> None:
            self._write()
            sizes = {other.name: other.stat().st_size for other in file.path.parent.glob(metrics.PATTERN)}
            future.set_result({**sizes, file.path.name: file.size})

        self._jobs.append(resolve)
        self._wake.set()
        return future

    # Progress

    def update(self, **fields: Any) -> None:
        """Change fields of the progress report (records.Progress); it is written each half second."""
        self._fields.update(fields)

    def warn(self, text: str) -> None:
        """Warn the user once: in the log, and where the run is followed."""
        if text not in self._warnings:
            self._warnings.append(text)
            if self.rank.rank == 0:
                log.warning("%s", text)

    def flush(self) -> None:
        """Write everything now, on rank 0."""
        if self._thread is not None:
            self.position().result()
            self._report()

    def close(self) -> None:
        """Write everything, and end the thread."""
        if self._thread is not None:
            self._closing = True
            self._wake.set()
            self._thread.join()
            self._thread = None

    def finish(self, result: Any) -> None:
        """The run has finished and everything is written: let the copies at other services get the rest."""
        deadline = time.monotonic() + MIRROR_SECONDS
        for mirror in self._mirrors:
            mirror.end(result)
        for mirror in self._mirrors:
            mirror.wait(deadline - time.monotonic())
        if self._mirrors:
            self._report()  # their warnings
        self._mirrors = []

    def _outside_since(self) -> float | None:
        beat = self.rank.page.read()
        if beat.phase not in (Phase.OUTSIDE, Phase.ENDING):
            self._outside = None
        elif self._outside is None or self._outside[0] != beat.step:  # steps may be quicker than these reports
            self._outside = beat.step, time.time()
        return None if self._outside is None else self._outside[1]

    def _report(self) -> None:
        values = dict(list(self._latest.items())[-VALUES_SHOWN:])
        repeats = self._repeats.as_dict() if self._repeats is not None else None
        views = {"values": values, "repeats": repeats, "outside_since": self._outside_since()}
        self.rank.report(warnings=list(self._warnings), **views, **self._fields)

    def _work(self) -> None:
        try:
            # Woken by the clock, not by each value: a training step must not pay for a switch of threads.
            while not self._closing:
                self._wake.wait(TICK_SECONDS)
                self._wake.clear()
                self._drain()
            self._drain()
        except BaseException:  # a bug: a save would wait for ever for the position of the curves
            log.exception("the thread of the reports failed")
            os._exit(1)

    def _drain(self) -> None:
        while self._jobs:
            self._jobs.popleft()()
        self._write()
        for mirror in self._mirrors:
            mirror.keep_running()
        self._report()

    def _write(self) -> None:
        assert self._file is not None
        try:
            self._file.write()
            self._disk_said = False
        except OSError as error:
            if not self._disk_said:
                self._disk_said = True
                log.warning("TensorBoard's file cannot be written (%s): its points wait in memory", error)
