"""jobkit top [RUN ...]: the runs that are under way, as they go on, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import select
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from jobkit.cli import columns
from jobkit.cli.arguments import add_selection, found_runs, is_filtered, meeting_filters, runs_dir
from jobkit.cli.table import ABSENT, Cell, Table, as_lines
from jobkit.errors import EXIT_FINISHED
from jobkit.run.command_line import to_type
from jobkit.run.duration import format_seconds
from jobkit.run.status import State
from jobkit.run.summary import Summary
from jobkit.run.usage import show_examples
from jobkit.submission.observer import ASK_SECONDS
from jobkit.submission.overview import look_again, look_at

if TYPE_CHECKING:
    from rich.console import RenderableType

LOOK_SECONDS = 1.0
"""How often the files of the runs are read; schedulers are asked, and new runs looked for, every ASK_SECONDS."""

TITLES = ("RUN", "STATE", "STEP", "RATE", "ETA", "LAST", "GOODPUT", "ATTEMPTS")

NUMBERS = ("STEP", "ETA", "GOODPUT", "ATTEMPTS")

BAR = ""
"""The title of the column of progress bars."""

DROPPED = ("ATTEMPTS", "GOODPUT", "RATE", BAR, "LAST", "ETA")
"""Columns that a narrow terminal has no room for, in this order."""

LAST_WIDTH = 24
"""At least so many characters of the last metrics are shown, where they are."""

GAP = 2
"""Characters between two columns."""

BAR_WIDTH = 16
"""Of a progress bar, in characters."""

VALUES = 2
"""How many of the metrics that a run logged last there is room for."""

COLOURS = {"running": "green", "queued": "yellow", "held": "yellow", "failed": "red", "interrupted": "red"}

ORDER = ("running", "queued", "held")
"""States of the runs that come first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection(parser)
    show_examples(
        parser,
        "'digits*'  the runs of that name that are under way",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the runs until `q` or Ctrl-C; where there is no terminal, once."""
    watched = Watched(arguments)
    if not sys.stdout.isatty():
        shown = watched.look()
        print("\n".join(as_lines(Table(TITLES, [row(one) for one in shown]))[0]) if shown else _nothing(arguments))
        return EXIT_FINISHED
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(_picture(watched.look(), _nothing(arguments)), refresh=True)
            if pressed(LOOK_SECONDS) in ("q", "Q"):
                break
    return EXIT_FINISHED


class Watched:
    """The runs that are meant, looked at again and again: those under way, or all of those that were named."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._names_runs = bool(arguments.run_names) or is_filtered(arguments)
        self._shown: dict[str, Summary] = {}
        """By directory; one that ends meanwhile stays."""
        self._ask_at = 0.0

    def look(self) -> list[Summary]:
        """What they are now, those that run first."""
        if time.monotonic() >= self._ask_at:
            looked = look_at(found_runs(self._arguments), with_config=bool(self._arguments.where))
            meant = meeting_filters(looked, self._arguments)
            self._shown |= {
                one.path: one for one in meant if self._names_runs or one.path in self._shown or _is_under_way(one)
            }
            self._ask_at = time.monotonic() + ASK_SECONDS
        else:
            again = {path: look_again(one) for path, one in self._shown.items() if _is_under_way(one)}
            self._shown |= again
        return sorted(self._shown.values(), key=_place)  # within a state nothing moves


def _is_under_way(one: Summary) -> bool:
    return State(one.facts["state"]).is_under_way


def _place(one: Summary) -> int:
    state = str(one.facts["state"])
    return ORDER.index(state) if state in ORDER else len(ORDER)


def row(one: Summary) -> list[Cell]:
    """What is shown of a run, under TITLES."""
    speed = one.steps_per_second
    values = list((one.facts.get("values") or {}).items())[:VALUES]
    said = ", ".join(f"{name} {columns.text_of(value)}" for name, value in values) or ABSENT
    left = one.seconds_left
    return [
        Cell(one.run, one.run),
        columns.cell(one, "state"),
        columns.cell(one, "step"),
        Cell(speed, f"{speed:.3g} step/s" if speed else ABSENT),
        Cell(left, ABSENT if left is None else format_seconds(left)),
        Cell(said, said),
        columns.cell(one, "goodput"),
        columns.cell(one, "attempts"),
    ]


def _picture(shown: Sequence[Summary], nothing: str) -> RenderableType:
    """The screen: how many there are of each state, and a line for each run."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table as RichTable
    from rich.text import Text

    states = Counter(str(one.facts["state"]) for one in shown)
    counted = ", ".join(f"{number} {state}" for state, number in states.items()) or nothing
    head = Text(f"{counted}   {time.strftime('%H:%M:%S')}   q ends this", style="dim", no_wrap=True)
    size = shutil.get_terminal_size()
    room = max(1, size.lines - 4)
    cells = [dict(zip(TITLES, row(one), strict=True)) for one in shown[:room]]
    widths = {title: max([len(title), *(len(one[title].shown) for one in cells)]) for title in TITLES}
    titles = fitting(widths | {BAR: BAR_WIDTH}, size.columns)
    table = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for title in titles:
        narrowest = None if title == "LAST" else widths.get(title, BAR_WIDTH)
        justify: Literal["left", "right"] = "right" if title in NUMBERS else "left"
        table.add_column(title, no_wrap=True, overflow="ellipsis", justify=justify, min_width=narrowest)
    for one, texts in zip(shown, cells, strict=False):
        step, total = one.facts.get("step") or 0, one.facts.get("total_steps")
        drawn: dict[str, RenderableType] = {title: Text(cell.shown) for title, cell in texts.items()}  # no markup
        drawn["STATE"] = Text(texts["STATE"].shown, style=COLOURS.get(str(one.facts["state"]), ""))
        drawn[BAR] = ProgressBar(total=total, completed=min(step, total), width=BAR_WIDTH) if total else Text("")
        table.add_row(*(drawn[title] for title in titles))
    rest = [Text(f"... and {len(shown) - room} more", style="dim")] if len(shown) > room else []
    return Group(head, Text(""), table, *rest)


def fitting(widths: Mapping[str, int], width: int) -> list[str]:
    """The columns that there is room for; that of the last metrics is cut to what is left, or left out."""
    titles = ["RUN", "STATE", BAR, *TITLES[2:]]
    for dropped in DROPPED:
        needed = sum(min(widths[title], LAST_WIDTH) if title == "LAST" else widths[title] for title in titles)
        if needed + GAP * len(titles) <= width:
            break
        titles.remove(dropped)
    return titles


def _nothing(arguments: argparse.Namespace) -> str:
    return f"no run is under way in {runs_dir(arguments)}; {to_type('list')} shows all"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """What waits for a key and returns it, or nothing after so many seconds; keys are not shown meanwhile."""
    if not sys.stdin.isatty():
        yield _no_keys
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)  # Ctrl-C stays a signal
    try:
        yield _pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _pressed(seconds: float) -> str:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return sys.stdin.read(1) if ready else ""


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""
