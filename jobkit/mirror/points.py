"""The points of a run that no attempt will log again: those before its newest checkpoint, and all of a finished run.

A resumed run cuts its curves back to the checkpoint, and logs from there on anew. What is copied elsewhere cannot be
cut back: it is copied once it is sure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from jobkit.checkpoint.store import Store
from jobkit.errors import CheckpointError
from jobkit.mirror.target import Point
from jobkit.report import logged
from jobkit.run.rundir import RunDir
from jobkit.run.status import State


class SurePoints:
    """The points of one run, each given once, as they become sure."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._store = Store(run.checkpoints, missing_seconds=0.0)
        self._read: dict[str, int] = {}
        """Bytes of each event file that were read."""

    def new(self) -> list[Point]:
        """Those that have become sure since the last call, by their steps."""
        found: list[Point] = []
        for name, until in sorted(self._sure().items()):
            file, start = self._run.tensorboard / name, self._read.get(name, 0)
            if until > start and file.exists():
                found += _points(file, start, until)
                self._read[name] = until
        return sorted(found, key=lambda point: point.step)

    def _sure(self) -> Mapping[str, int]:
        """Event file -> the size up to which it stays as it is."""
        if self._run.status().state == State.FINISHED:
            return {file.name: file.stat().st_size for file in self._run.tensorboard.glob(logged.EVENT_FILES)}
        for step in self._store.steps():  # the newest first
            with contextlib.suppress(CheckpointError, OSError):  # removed meanwhile, as there is a newer one
                position = self._store.manifest(step).extra.get("tensorboard")
                return position if isinstance(position, dict) else {}
        return {}


def _points(file: Path, start: int, until: int) -> Iterator[Point]:
    for event in logged.events(file, start, until):
        for value in event.summary.value:
            number = logged.scalar(value)
            if number is not None:
                yield Point(value.tag, event.step, number, event.wall_time)
