"""The attempts of a run along the time: what each part of them was spent on, and when there were checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jobkit.run.events import Event
from jobkit.run.journal import Entry
from jobkit.run.status import Attempt, Status

WIDTH = 1000.0
"""Of a timeline, in the units of its SVG."""

ROW = 22.0
"""Height of an attempt's row, in the same units."""

LABELS = 96.0
"""What is left of the rows for their names."""

MARGIN = 8.0
"""What is left free at the end of the rows, for the mark of an end."""

IDLE_PART = 0.15
"""A time in which nothing of the run was under way is drawn shorter where it is more than this part of the rest."""

IDLE_WIDTH = 26.0
"""How wide such a time is drawn."""

PARTS = {
    "queue": "in the queue",
    "start": "starting processes, until the ranks had formed their group",
    "restart": "starting again in place, on the same nodes",
    "load": "building the model and reading the checkpoint",
    "train": "training, checkpoints included",
    "lost": "training that was lost and repeated",
    "end": "from the last step to the end: noticing, saving, ending",
}
"""What a piece of a timeline may be -> what it means, in the order of a legend."""


@dataclass(frozen=True)
class Piece:
    """A part of an attempt: where it is drawn, and what is said of it."""

    part: str
    """One of PARTS."""
    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Row:
    """One attempt."""

    label: str
    y: float
    pieces: list[Piece]
    checkpoints: list[tuple[float, str]]
    """Where one became durable, and what is said of it."""
    end: tuple[float, str] | None
    """Where it ended, and why; None while it runs."""


@dataclass(frozen=True)
class Timeline:
    """All attempts of a run."""

    rows: list[Row]
    parts: list[str]
    """Those of PARTS that are in it."""
    ticks: list[tuple[float, str]]
    breaks: list[tuple[float, str]]
    """Where a time in which nothing was under way is drawn shorter, and how long it was."""
    height: float


def timeline(status: Status, events: Sequence[Entry], now: float | None = None) -> Timeline | None:
    """The timeline of a run; None before there is an attempt. `now` is in seconds since the epoch."""
    if not status.attempts:
        return None
    now = time.time() if now is None else now
    spans = [list(_spans(status, number, now)) for number in range(len(status.attempts))]
    busy = _merged([(start, end) for parts in spans for _, start, end in parts])
    x, breaks = _axis(busy)
    rows = []
    for number, (attempt, parts) in enumerate(zip(status.attempts, spans, strict=True)):
        pieces = [
            Piece(part, x(start), max(0.5, x(end) - x(start)), f"{PARTS[part]}: {duration(end - start)}")
            for part, start, end in parts
        ]
        saved = [
            (x(float(event["time"])), f"checkpoint of step {event.get('step')}, {event.get('seconds', 0):.3g} s")
            for event in events
            if event["event"] == Event.CHECKPOINT and event.get("attempt") == attempt.id
        ]
        end = None if attempt.ended is None else (x(attempt.ended), f"{attempt.cause}{_at(attempt)}")
        rows.append(Row(f"attempt {attempt.id}", number * ROW, pieces, saved, end))
    seen = {piece.part for row in rows for piece in row.pieces}
    return Timeline(rows, [part for part in PARTS if part in seen], _ticks(busy, x), breaks, len(rows) * ROW)


def _spans(status: Status, number: int, now: float) -> Iterator[tuple[str, float, float]]:
    """(part, start, end) of an attempt, in seconds since the epoch; what took no time is left out."""
    attempt = status.attempts[number]
    ended = attempt.ended or now
    up = attempt.joined or attempt.resumed or ended
    if attempt.began == "in place" and number:
        began = status.attempts[number - 1].ended
        marks: list[tuple[str, float | None]] = [("restart", up), ("load", attempt.resumed)]
    else:
        began = attempt.queued
        marks = [("queue", attempt.started), ("start", up), ("load", attempt.resumed)]
    at = began or attempt.started
    for part, until in marks:
        if until is not None and until > at:
            yield part, at, min(until, ended)
            at = min(until, ended)
    if attempt.resumed is None:
        return
    last = min(max(attempt.last_seen or ended, at), ended)
    lost_from = last - (last - at) * _lost_part(status, number)
    for part, until in (("train", lost_from), ("lost", last), ("end", ended)):
        if until > at:
            yield part, at, until
            at = until


def _lost_part(status: Status, number: int) -> float:
    """Which part of an attempt's steps the next one did again; the time is taken to be the same part."""
    attempt = status.attempts[number]
    after = next((one for one in status.attempts[number + 1 :] if one.first_step is not None), None)
    first, last = attempt.first_step or 0, attempt.last_step or 0
    if after is None or after.first_step is None or last <= first:
        return 0.0
    return min(1.0, max(0, last - max(first, after.first_step)) / (last - first))


def _at(attempt: Attempt) -> str:
    return f" at step {attempt.last_step}" if attempt.last_step is not None else ""


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times in which anything was under way."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _axis(busy: Sequence[tuple[float, float]]) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Where a time is drawn; and the idle times that are drawn shorter, in the middle of each."""
    total = sum(end - start for start, end in busy) or 1.0
    gaps = [after[0] - before[1] for before, after in pairwise(busy)]
    short = [gap > IDLE_PART * total for gap in gaps]
    shown = total + sum(gap for gap, is_short in zip(gaps, short, strict=True) if not is_short)
    scale = max(1.0, WIDTH - LABELS - MARGIN - IDLE_WIDTH * sum(short)) / shown
    places, breaks, at = [], [], LABELS
    for number, (start, end) in enumerate(busy):
        places.append((start, end, at))
        at += (end - start) * scale
        if number < len(gaps):
            width = IDLE_WIDTH if short[number] else gaps[number] * scale
            if short[number]:
                breaks.append((at + width / 2, duration(gaps[number])))
            at += width

    def x(moment: float) -> float:
        place = next((one for one in reversed(places) if one[0] <= moment), places[0])
        return round(place[2] + min(max(moment, place[0]) - place[0], place[1] - place[0]) * scale, 1)

    return x, breaks


def _ticks(busy: Sequence[tuple[float, float]], x: Callable[[float], float]) -> list[tuple[float, str]]:
    """Round times since the beginning, where something was under way, as far as there is room for their labels."""
    first, last = busy[0][0], busy[-1][1]
    units = (1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 7 * 86400)
    total = sum(end - start for start, end in busy)
    step = next((unit for unit in units if total / unit <= 8), 30 * 86400)
    if (last - first) / step > 10000:  # it was idle for so long that no ticks of that kind help
        return [(x(first), "0")]
    found: list[tuple[float, str]] = []
    for number in range(int((last - first) / step) + 1):
        moment = first + number * step
        is_busy = any(start <= moment <= end for start, end in busy)
        if is_busy and (not found or x(moment) - found[-1][0] >= 70):
            found.append((x(moment), duration(number * step) if number else "0"))
    return found


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `5 h 10 min`, `2 d 3 h`."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.01 else "0 s"
    whole = round(seconds)
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"
