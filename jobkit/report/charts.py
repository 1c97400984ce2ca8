"""Pictures of a page: static SVG, all by `chart`. Colours are classes of page.css; a bar has a text on hover.

curves(series) ──┐
                 ├─> marks, axes ─> chart ─> <svg>
timeline(rows) ──┘

page.py calls it.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from jobkit.duration import format_seconds
from jobkit.report.logged import Series, stretches
from jobkit.run.accounting import Account

STRETCHES, DOTTED = 200, 40
"""Stretches a curve, and the points up to which each gets a dot."""

LOG_FROM = 10.0
"""The axis is logarithmic where values are positive, and the highest is this many times their median."""

COLOURS = 8
"""Of page.css. The next eight curves are dashed, and the next eight dotted. So many have their range drawn too."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Mark:
    """Something in a chart. `bar` takes two corners, `text` the place of its begin; `dots` and `cross` any points."""

    kind: Literal["line", "band", "dots", "cross", "bar", "text"]
    style: str
    points: Sequence[Point]
    text: str = ""


@dataclass(frozen=True)
class Axis:
    """The range of an axis, and its labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    log: bool = False

    def at(self, value: float, begin: float, end: float) -> float:
        """Return the place of a value where `low` is at `begin` and `high` at `end`."""
        if self.log:
            return Axis(math.log(self.low), math.log(self.high)).at(math.log(value), begin, end)
        return round(begin + (value - self.low) / (self.high - self.low) * (end - begin), 1)


def chart(label: str, marks: Iterable[Mark], x: Axis, y: Axis, size: tuple[int, int]) -> Markup:
    """Return an SVG of marks, drawn in their order, with the labels of both axes. `label` is for a screen reader."""
    width, height = size
    left, right, top, bottom = 48 if y.ticks else 2, width - (14 if y.ticks else 2), 8, height - 20

    def place(point: Point) -> Point:
        return x.at(point[0], left, right), y.at(point[1], bottom, top)

    def path(points: Iterable[Point]) -> str:
        return " ".join(f"{a:g},{b:g}" for a, b in map(place, points))

    parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, label)]
    for value, text in y.ticks:
        height_of = y.at(value, bottom, top)
        parts.append(Markup('<path class="grid" d="M{},{}H{}"/>').format(left, height_of, right))
        parts.append(Markup('<text class="end" x="{}" y="{}">{}</text>').format(left - 6, height_of + 4, text))
    for value, text in x.ticks:
        at = x.at(value, left, right)
        style = "begin" if at < left + 20 else "end" if at > right - 20 else "middle"
        parts.append(Markup('<text class="{}" x="{}" y="{}">{}</text>').format(style, at, height - 4, text))
    for mark in (mark for mark in marks if mark.points):
        if mark.kind == "bar":
            (a, b), (c, d) = map(place, mark.points)
            shape = Markup('<rect class="{}" x="{}" y="{}" width="{:g}" height="{:g}"><title>{}</title></rect>')
            parts.append(shape.format(mark.style, a, d, max(round(c - a, 1), 0.5), round(b - d, 1), mark.text))
        elif mark.kind == "text":
            a, b = place(mark.points[0])
            parts.append(Markup('<text class="{}" x="{}" y="{}">{}</text>').format(mark.style, a, b, mark.text))
        elif mark.kind in ("dots", "cross"):
            sign = "h0" if mark.kind == "dots" else "m-3,-3l6,6m0,-6l-6,6"
            signs = "".join(f"M{a:g},{b:g}{sign}" for a, b in map(place, mark.points))
            parts.append(Markup('<path class="{} {}" d="{}"/>').format(mark.kind, mark.style, signs))
        else:
            end = "Z" if mark.kind == "band" else ""
            parts.append(
                Markup('<path class="{} {}" d="M{}{}"/>').format(mark.kind, mark.style, path(mark.points), end)
            )
    return Markup("").join([*parts, Markup("</svg>")])


def colour(number: int) -> str:
    """Return the classes of a run's colour."""
    return f"c{number % COLOURS}" + ("", " dashed", " dotted")[number // COLOURS % 3]


def curves(tag: str, series: Sequence[tuple[int, Series]]) -> Markup:
    """Return the chart of a tag; `series` has the number of each run's colour, and its points.

    A curve of many points shows the mean of each stretch, and faintly its range. A cross stands for a value that is
    not finite.
    """
    pieces = [stretches(points, STRETCHES) for _, points in series]
    every = [item for stretches_of in pieces for piece in stretches_of for item in piece]
    few = len(series) <= COLOURS
    x = _axis([step for _, points in series for step in points.steps], is_step=True)
    y = _axis([value for item in every for value in ((item.low, item.high) if few else (item.mean,))])
    bands, lines = [], []
    for (number, points), stretches_of in zip(series, pieces, strict=True):
        style, is_dotted = colour(number), few and len(points.steps) <= DOTTED
        for piece in stretches_of:
            middles = [((item.first + item.last) / 2, item) for item in piece]
            if few and any(item.low < item.high for item in piece):
                edges = [(at, item.high) for at, item in middles] + [(at, item.low) for at, item in middles[::-1]]
                bands.append(Mark("band", style, edges))
            line = [(at, item.mean) for at, item in middles]
            lines += [Mark("line", style, line), Mark("dots", style, line if is_dotted or len(line) == 1 else [])]
        lines.append(Mark("cross", style, [(step, y.low) for step in points.not_finite[:STRETCHES]]))
    return chart(tag, [*bands, *lines], x, y, (480, 220))


def number(value: float, digits: int = 4) -> str:
    """Return a number as a person reads it: `0.0234`, `1,500`, `3.1e-05`."""
    is_whole = abs(value) < 1e6 and value == round(value)  # NaN and infinity are neither
    text = f"{value:,.0f}" if is_whole else f"{value:.{digits}g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text


def _axis(values: Sequence[float], *, is_step: bool = False) -> Axis:
    """Return the axis that holds these values, with about five round labels."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        low, high = low - (abs(low) / 10 or 1), high + (abs(high) / 10 or 1)
    if not is_step and low > 0 and high > LOG_FROM * statistics.median(values):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if len(powers) <= 4 else (1,)
        places = [factor * 10.0**power for power in powers[:: math.ceil(len(powers) / 6)] for factor in factors]
        ticks = [(place, f"{place:g}") for place in places if low <= place <= high]
        return Axis(low / 1.1, high * 1.1, ticks, log=True)
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 5)
    digits = max(0, math.floor(math.log10(max(abs(low), abs(high)) / step))) + 2
    places = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    ticks = [(at, f"{at / 1e6:,g}M" if is_step and at >= 1e6 else number(at, digits)) for at in places]
    margin = 0 if is_step else (high - low) * 0.04
    return Axis(low - margin, high + margin, ticks)


# Where the time went

PARTS = {
    "waiting": "waiting",
    "starting": "starting",
    "repeated": "repeated steps",
    "useful": "new steps",
    "ending": "ending",
    "unknown": "no step reported",
}
"""The parts of a run's time, in the order of a legend; the keys are classes of page.css."""


def parts(account: Account) -> dict[str, float]:
    """Return the seconds of an attempt by PARTS, in the order in which they passed."""
    if account.first_step is None:
        return {"waiting": account.queue, "unknown": account.seconds}
    repeated = account.seconds - account.starting - account.useful - account.ending
    named = {"waiting": account.queue, "starting": account.starting, "repeated": repeated}
    return {**named, "useful": account.useful, "ending": account.ending}


def timeline(rows: Sequence[tuple[str, Sequence[Account], Sequence[str]]]) -> Markup:
    """Return the chart of attempts over time; a row has a label, and an account and a text for each attempt.

    Time in which no run had an attempt is drawn short.
    """
    spent = [account for row in rows for account in row[1]]
    queued = min(account.began - account.queue for account in spent)
    knots = _without_idle(sorted([(queued, queued), *((account.began, account.until) for account in spent)]))
    times, places = [at for at, _ in knots], [place for _, place in knots]

    def place(at: float) -> float:
        i = min(max(bisect(times, at), 1), len(times) - 1)
        share = (at - times[i - 1]) / ((times[i] - times[i - 1]) or 1)
        return places[i - 1] + min(max(share, 0), 1) * (places[i] - places[i - 1])

    marks = []
    for row, (label, of_run, texts) in enumerate(rows):
        base = len(rows) - 1 - row
        marks.append(Mark("text", "begin", [(0, base + 0.72)], label))
        free = 0.0
        for account, text in zip(of_run, texts, strict=True):
            at = account.began - account.queue
            for part, seconds in parts(account).items():
                corners = [(place(at), base + 0.12), (place(at + seconds), base + 0.62)]
                marks.append(
                    Mark("bar", part, corners if seconds > 0 else [], f"{text}\n{PARTS[part]}: {length(seconds)}")
                )
                at += seconds
            edge = place(account.began)
            if not label and edge >= free:  # of one run the attempts have names
                marks.append(Mark("text", "begin", [(edge, base + 0.72)], str(account.attempt)))
                free = edge + places[-1] / 20
            marks.append(Mark("line", "edge", [(edge, base + 0.06), (edge, base + 0.68)]))
    ends = [(places[0], times[0]), (places[-1], times[-1])]
    ticks = [(at, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))) for at, moment in ends]
    return chart(
        "attempts over time", marks, Axis(0, places[-1], ticks), Axis(0, len(rows)), (960, 54 * len(rows) + 32)
    )


def _without_idle(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (time, place) of the ends of all spans, in order: a gap takes at most a thirtieth of their sum."""
    knots = [(spans[0][0], 0.0)]
    longest_gap = max(sum(end - begin for begin, end in spans) / 30, 1e-3)
    for begin, end in spans:
        at, place = knots[-1]
        if begin > at:
            at, place = begin, place + min(begin - at, longest_gap)
            knots.append((at, place))
        if end > at:
            knots.append((end, place + end - at))
    return knots if len(knots) > 1 else [*knots, (knots[0][0] + 1, 1.0)]


def length(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)
