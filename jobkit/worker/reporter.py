"""What a rank tells of its attempt: events for the journal, how far it is, and curves for TensorBoard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from jobkit.display import Display
from jobkit.log import log
from jobkit.run import records
from jobkit.run.append import Backlog, Outage
from jobkit.run.events import Event
from jobkit.run.journal import encode
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.worker.heartbeat import Heartbeat
from jobkit.worker.lease import LostLease, check_lease, holds_lease
from jobkit.worker.mirror import MirrorProcesses
from jobkit.worker.results import number, whole

if TYPE_CHECKING:
    from jobkit.worker.metrics import MetricLog, Position

MAX_UNWRITTEN_EVENTS = 64 << 20
"""Bytes of events that wait for a full disk: years of them, as a checkpoint has one line."""

MARK_SECONDS = 60.0
"""How long a checkpoint, or the end of a function without a loop, waits for what was logged to be on the disk."""

REPORTED_VALUES = 32
"""How many of the values that the function logs are in the progress report, which is written a few times a second."""


class RunReporter:
    """The reports of one rank. Rank 0 alone writes to the journal, to TensorBoard and to the progress report.

    An attempt that has lost its lease writes nothing more: `record` and `write_journal` raise LostLease then.

    Args:
        on_lost_lease: what the thread of the metrics, or of a checkpoint, calls where the lease is lost: it cannot
            raise into the training's thread, which may wait for ranks that are gone.
        display: of a script that draws its own progress.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        is_main: bool,
        *,
        on_lost_lease: Callable[[LostLease], None],
        display: Display | None = None,
    ) -> None:
        self.heartbeat = Heartbeat()
        self._run, self._attempt, self._is_main = run, attempt, is_main
        self._on_lost_lease = on_lost_lease
        self._display = display
        before = run.progress() if is_main else None
        self._progress: dict[str, Any] = {
            "slowest_before": max(before.slowest, before.slowest_before) if before else 0.0
        }
        self._metrics: MetricLog | None = None
        self._mirrors: MirrorProcesses | None = None
        self._values: dict[str, Any] = {}
        """Scalars of the step that is under way."""
        self._placed: list[tuple[int, dict[str, Any]]] = []
        """Those that were given a step of their own."""
        self._media: list[tuple[str, str, Any]] = []
        """Its images, videos and texts: (method of MetricLog, tag, value)."""
        self._summaries: list[tuple[int, Any]] = []
        """What another framework logs of other kinds: (step, summary)."""
        # The training's thread, the metrics' and a checkpoint's record events; only writing may take long.
        self._adding, self._writing = threading.Lock(), threading.Lock()
        self._events = Backlog(MAX_UNWRITTEN_EVENTS)
        self._has_dropped_events = False
        self._status_is_old = False
        self._outage = Outage(
            "the journal", "Its events are kept in memory meanwhile; the checkpoints that are there are safe."
        )

    # The journal

    def record(self, event: Event, **fields: Any) -> None:
        """Journal an event of this attempt, once: on rank 0. What the disk does not take now is written later."""
        if self.record_soon(event, **fields):
            with self._outage.survived():
                self.write_journal()

    def record_soon(self, event: Event, **fields: Any) -> bool:
        """`record`, but with the next that is written, as for what must not hold up a step; whether this is rank 0."""
        if not self._is_main:
            return False
        line = encode({"time": round(time.time(), 3), "event": event, "attempt": self._attempt, **fields})
        with self._adding:
            if not self._events.add(line) and not self._has_dropped_events:
                self._has_dropped_events = True
                log.warning("no memory is left for events that the journal cannot take: from here on they are lost")
        return True

    def write_journal(self) -> None:
        """Write the events that are not in the journal yet, in their order; raises OSError when the disk is full."""
        with self._writing:
            if not (self._events or self._status_is_old):
                return
            check_lease(self._run, self._attempt)
            if self._events:
                self._events.flush(self._run.journal.append_lines)
                self._status_is_old = True
            self._run.write_status()
            self._status_is_old = False

    @contextmanager
    def in_a_thread(self) -> Iterator[None]:
        """For what a thread beside the training's does: a lost lease ends the process, as `on_lost_lease` says."""
        try:
            yield
        except LostLease as error:
            self._on_lost_lease(error)

    # TensorBoard

    def start_metrics(
        self, position: Position, first_step: int, parameters: Mapping[str, float | str | bool] | None = None
    ) -> None:
        """Write curves from here on; `parameters` are the run's for TensorBoard's HPARAMS page, by name."""
        if self._is_main:
            # Imported on rank 0 alone: TensorBoard costs a second, times the ranks of a node.
            from jobkit.worker.hyperparameters import session_start
            from jobkit.worker.metrics import MetricLog, rewind

            goes_on = rewind(self._run.tensorboard, position)
            may_write = partial(holds_lease, self._run, self._attempt)
            self._metrics = MetricLog(self._run.tensorboard, first_step, self._tick, may_write)
            if not goes_on:  # else an earlier attempt has written it
                self._metrics.summary(0, session_start(parameters or {}))

    def start_mirrors(self, services: Sequence[str]) -> None:
        """Copy what is logged to some services, beside this process."""
        if self._is_main and services:
            self._mirrors = MirrorProcesses(self._run.path, services)

    def finish_mirrors(self) -> None:
        """The run is recorded as finished: give the copies a while to become whole."""
        if self._mirrors is not None:
            self.mark_metrics()()
            self._mirrors.finish()

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Scalars of the step that is under way, or of `step`; a tensor is copied and not synchronised, None left out.

        Raises UsageError, on every rank, for what is not one number.
        """
        found = {tag: number(tag, value) for tag, value in values.items() if value is not None}
        if self._metrics is None:
            return
        copied = {tag: _copied(value) for tag, value in found.items()}
        if step is None:
            self._values |= copied
        else:
            self._placed.append((step, copied))

    def log_media(self, kind: Literal["image", "video", "text"], tag: str, value: torch.Tensor | str) -> None:
        """An image, video or text of the step that is under way; a tensor is copied."""
        value = whole(tag, value)
        if self._metrics is not None:
            self._media.append((kind, tag, _copied(value)))

    def log_summary(self, step: int, summary: Any) -> None:
        """A summary as TensorBoard's writer makes them, at `step`."""
        if self._metrics is not None:
            self._summaries.append((step, summary))

    def end_step(self, step: int) -> None:
        """Hand a whole step's values on: those of one that is broken off half-way are logged when it is repeated."""
        if self._metrics is None:
            return
        self.scalars(step, self._values)
        for own_step, values in self._placed:
            self.scalars(own_step, values)
        for kind, tag, value in self._media:
            getattr(self._metrics, kind)(step, tag, value)
        for own_step, summary in self._summaries:
            self._metrics.summary(own_step, summary)
        self._values, self._placed, self._media, self._summaries = {}, [], [], []

    def drop_step(self) -> None:
        """Log nothing of what was given since the last step's end: an earlier attempt has logged it."""
        self._values, self._placed, self._media, self._summaries = {}, [], [], []

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        if self._metrics is not None and values:
            self._metrics.scalars(step, values)

    def log_session_end(self) -> None:
        """Tell TensorBoard's HPARAMS page that the run has finished."""
        if self._metrics is not None:
            from jobkit.worker.hyperparameters import session_end

            self.log_summary(0, session_end())

    def mark_metrics(self) -> Callable[[], Position]:
        """What waits until all that was logged so far is on the disk, and returns the position after it."""
        return dict if self._metrics is None else partial(self._metrics.mark().result, timeout=MARK_SECONDS)

    def on_disk(self, position: Position) -> Position:
        """A position; OSError where a full disk has not taken all that was logged before it."""
        return position if self._metrics is None else self._metrics.on_disk(position)

    # Progress

    def update(self, **fields: Any) -> None:
        self._progress.update(fields)

    @property
    def is_evaluating(self) -> bool:
        return self._progress.get("evaluation") is not None

    def say(self, text: str) -> None:
        if self._display is not None:
            self._display.say(text)

    def _tick(self, latest: dict[str, float]) -> None:
        """A few times a second, in the metrics' thread."""
        with self.in_a_thread():
            try:
                check_lease(self._run, self._attempt)
            except OSError:
                return
            self._report(latest)  # first: the journal may be claimed by another host for a while
            with self._outage.survived():
                self.write_journal()

    def _report(self, latest: dict[str, float]) -> None:
        own = ("perf/", "final/", "train/lr")
        shown = [(tag, value) for tag, value in latest.items() if not tag.startswith(own)]
        values, beats = dict(shown[:REPORTED_VALUES]), self.heartbeat.report()
        progress = Progress(attempt=self._attempt, time=time.time(), values=values, **self._progress, **beats)
        with suppress(OSError):  # only a view, and the journal's own trouble has been said
            records.write(self._run.progress_file, progress, durable=False)
        if self._display is not None:
            self._display.show(progress)

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._mirrors is not None:
            self._mirrors.close()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
