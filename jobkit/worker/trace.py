"""The trace of a run of `jobkit verify`: each rank's values, samples and state, boundary by boundary.

loop --(state digests, values, samples)--> trace/<attempt>/<rank>.jsonl --> verify/compare.py
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import CodeType
from typing import TYPE_CHECKING, Any

from jobkit.worker.checkpoints import Boundary
from jobkit.worker.rank import Rank

if TYPE_CHECKING:
    from jobkit.worker.reporter import Reporter

NOT_NAMED = ("/dev/", "/proc/", "/sys/", f"{tempfile.gettempdir()}/")
"""Folders whose files nobody expects to be restored; those in hidden folders are caches."""

MAX_FILES = 10
"""Names of files in a report."""

MAX_TEXT = 200
"""Characters of a local value."""


class Trace:
    """Writes one rank's trace. Each line is on its way to the disk before the rank goes on."""

    def __init__(self, rank: Rank) -> None:
        folder = rank.run.trace_folder / str(rank.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{rank.rank}.jsonl").open("w", encoding="utf-8")
        self._values: dict[str, str] = {}
        self.samples: Callable[[], list[int]] = list
        """Gives the ids of the samples of the step that ends."""
        self.function: CodeType | None = None
        """The training function's code; None in a script."""
        self._runs_dir = f"{rank.run.path.parent.absolute()}/"
        self._written: set[str] = set()
        sys.addaudithook(self._note_open)

    def _note_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook: note a file that is opened for writing."""
        if event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            path = os.path.abspath(arguments[0])  # noqa: PTH100 - a Path would open files of its own
            if not path.startswith((self._runs_dir, *NOT_NAMED)) and "/." not in path and "/__pycache__/" not in path:
                self._written.add(path)

    @property
    def written(self) -> list[str]:
        """The first files outside the runs directory that this rank has opened for writing."""
        return sorted(self._written)[:MAX_FILES]

    def take(self, reporter: Reporter) -> None:
        """Note the values that the step under way logged."""
        self.take_values(reporter.logged)

    def take_values(self, values: Mapping[str, float]) -> None:
        """Note values by their raw bits."""
        self._values |= {name: struct.pack("<d", float(value)).hex() for name, value in values.items()}

    def write(self, boundary: Boundary, event: str, state: Mapping[str, str], **more: Any) -> None:
        """Write a line: the place, values and samples since the line before, and digests of the state."""
        line = {
            **asdict(boundary),
            "event": event,
            "values": self._values,
            "samples": self.samples() if event == "boundary" else [],
            "state": dict(state),
            **more,
        }
        if event == "boundary":
            line["locals"] = self._locals()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._values = {}

    def _locals(self) -> dict[str, str]:
        """Return the plain local values of the training function, of a script its globals: a hint for a person."""
        if self.function is None:
            return _plain(vars(sys.modules["__main__"]))
        frame = sys._getframe()
        while frame is not None and frame.f_code is not self.function:
            frame = frame.f_back  # type: ignore[assignment]
        if frame is None:
            return {}
        values = frame.f_locals
        plain = _plain(values)
        if isinstance(values, dict):  # before Python 3.13 the frame keeps it, and with it this step's tensors
            values.clear()
        return plain


def _plain(values: Mapping[str, Any]) -> dict[str, str]:
    """Return numbers and short texts: a text that is a program's data would be written at each boundary."""
    plain = {name: repr(value) for name, value in values.items() if isinstance(value, (bool, int, float, str))}
    return {name: text for name, text in plain.items() if len(text) <= MAX_TEXT}
