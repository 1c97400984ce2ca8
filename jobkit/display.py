"""How a run's progress looks to a person, whether drawn by a follower outside or by the run itself."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jobkit.run.records import Progress as Report

PLAIN_LINE_SECONDS = 10.0
"""How often a line is printed where there is no terminal: a log of a day is to have thousands, not a million."""


class Display:
    """A progress bar on a terminal, a line now and then elsewhere; the run's own output stands above it."""

    def __init__(self, name: str) -> None:
        # Errors and progress go where they do not end up in a pipe of results.
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[position]}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[values]}"),
            console=self.console,
            transient=False,
        )
        self.name = name
        self.task: TaskID | None = None
        self.last_line = 0.0
        self.last_position: tuple[int, int | None] = (-1, None)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def show(self, progress: Report) -> None:
        step, total = progress.step or 0, progress.total_steps
        evaluation = progress.evaluation or {}
        if total is None and not evaluation and not step:
            return  # the training function has not reached its loop yet
        rate = progress.steps_per_second
        rate_text = f"{rate:.3g} step/s" if rate else ""
        values = "  ".join(f"{name} {value:.4g}" for name, value in list(progress.values.items())[:2])
        if evaluation:
            values = f"evaluating {evaluation['done']}/{evaluation['total']} samples  {values}".rstrip()
        if self.console.is_terminal:
            if total is None and not step:  # an evaluation without a loop is all there is to draw
                step, total = evaluation["done"], evaluation["total"]
            texts: dict[str, Any] = {"position": _position(step, total), "rate": rate_text, "values": values}
            if self.task is None:
                self.task = self.progress.add_task(self.name, total=total, **texts)
                self.progress.start()
            self.progress.update(self.task, completed=step, total=total, **texts)
            return
        position = (step, evaluation.get("done"))
        arrived = step == total and step != self.last_position[0]
        if position != self.last_position and (time.monotonic() - self.last_line > PLAIN_LINE_SECONDS or arrived):
            self.last_line, self.last_position = time.monotonic(), position
            where = f"step {_position(step, total)}  " if total is not None or step else ""
            self.say(f"{where}{rate_text}  {values}".strip())

    def close(self) -> None:
        if self.task is not None:
            self.progress.stop()


def _position(step: int, total: int | None) -> str:
    """Of a loop over a stream nobody knows the total."""
    return str(step) if total is None else f"{step}/{total}"
