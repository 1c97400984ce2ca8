"""How far a run is, for a person: a progress bar on a terminal, a line now and then elsewhere.

Goes to standard error, so that a pipe of results stays clean. follow.py calls it; the output of the ranks stands above.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from jobkit.duration import format_seconds
from jobkit.run.records import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

PLAIN_LINE_SECONDS = 10.0
"""Between two lines without a terminal: a log of a day shall have thousands of lines, not a million."""

OUTSIDE_SECONDS = 10.0
"""Before this a validation is not said: a bar shall not flicker."""

WIDE = 110
"""Columns of a terminal from which on the bar has the run's name and the elapsed time."""


class Display:
    """Shows Progress records of one run.

    display = Display("toy-11f5f19c")
    display.say("attempt 2 began")
    display.show(Progress(attempt=2, time=0, step=40, total_steps=200))
    display.close()
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._bars: Bars | None = None
        self._last_line = 0.0
        self._last_position: object = None

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        """Draw how far the run is; nothing before its loop."""
        evaluation = progress.evaluation or {}
        step, total = progress.step or 0, progress.total_steps
        if not (step or total or evaluation):
            return
        position = f"step {step}" if total is None else f"step {step}/{total}"
        rate = f"{progress.steps_per_second:.3g} step/s" if progress.steps_per_second else ""
        numbers = [(name, value) for name, value in progress.values.items() if value is not None][:2]
        values = "  ".join(f"{name} {value:.4g}" for name, value in numbers)
        outside = "" if evaluation else outside_a_step(progress, time.time())
        if evaluation:
            values = f"evaluating {evaluation.get('done')}/{evaluation.get('total')} samples  {values}".rstrip()
        texts = [text for text in (position, outside or rate, values) if text]
        if sys.stderr.isatty():
            self._draw(step, total, "  ".join(texts))
        elif self._is_due(step, total, (step, evaluation.get("done"), outside.rpartition(":")[0])):  # each minute
            self.say("  ".join(texts))

    def close(self) -> None:
        """Leave the last bar on the terminal."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _draw(self, step: int, total: int | None, text: str) -> None:
        if self._bars is None:
            self._bars = _bars()
            self._bars.add_task(self.name, text=text)
            self._bars.start()
        self._bars.update(self._bars.task_ids[0], completed=step, total=total, text=text)

    def _is_due(self, step: int, total: int | None, position: object) -> bool:
        arrived = step == total
        if position == self._last_position or not (arrived or time.monotonic() - self._last_line > PLAIN_LINE_SECONDS):
            return False
        self._last_line, self._last_position = time.monotonic(), position
        return True


def outside_a_step(progress: Progress, now: float) -> str:
    """Return since when a run is outside of steps, in words; empty in a step, and for the first seconds."""
    seconds = 0.0 if progress.outside_since is None else now - progress.outside_since
    return f"outside a step since {format_seconds(seconds)}" if seconds >= OUTSIDE_SECONDS else ""


def _bars() -> Bars:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    # A metric's name may look like markup: `acc[/top5]`.
    console = Console(stderr=True)
    name = [TextColumn("{task.description}", markup=False), BarColumn()] if console.width >= WIDE else [BarColumn(12)]
    elapsed = [TimeElapsedColumn()] if console.width >= WIDE else []
    text = TextColumn("{task.fields[text]}", markup=False)
    return Progress(*name, text, *elapsed, TimeRemainingColumn(), console=console)
