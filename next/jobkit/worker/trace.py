"""The trace of a run of `jobkit verify`: what each rank came by, boundary by boundary.

loop --(state digests, values, samples)--> trace/<attempt>/<rank>.jsonl --> verify/compare.py
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jobkit.run.records import Drill
from jobkit.worker.checkpoints import Boundary
from jobkit.worker.rank import Rank

if TYPE_CHECKING:
    from jobkit.worker.reporter import Reporter


class Trace:
    """Writes one rank's trace. Each line is on its way to the disk before the rank goes on."""

    def __init__(self, rank: Rank, drill: Drill) -> None:
        folder = rank.run.trace_folder / str(rank.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{rank.rank}.jsonl").open("w", encoding="utf-8")
        self._values: dict[str, str] = {}
        self.samples: Callable[[], list[int]] = list
        """Gives the ids of the samples of the step that ends."""
        self.locals: Callable[[], Mapping[str, Any]] = dict

    def take(self, reporter: Reporter) -> None:
        """Note the values that the step under way logged."""
        self.take_values(reporter.logged)

    def take_values(self, values: Mapping[str, float]) -> None:
        """Note values by their raw bits."""
        self._values |= {name: struct.pack("<d", float(value)).hex() for name, value in values.items()}

    def write(self, boundary: Boundary, event: str, state: Mapping[str, str], **more: Any) -> None:
        """Write a line: the place, what happened since the line before, and digests of the state."""
        line = {
            **asdict(boundary),
            "event": event,
            "values": self._values,
            "samples": self.samples() if event == "boundary" else [],
            "state": dict(state),
            **more,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._values = {}
