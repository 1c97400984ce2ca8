"""Curves as charts: which values are drawn where, in the units of an SVG. What draws them is the template."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jobkit.report.logged import finite

WIDTH, HEIGHT = 440.0, 220.0
"""Of a chart, in the units of its SVG; it is shown as wide as there is room."""

LEFT, RIGHT, TOP, BOTTOM = 52.0, 12.0, 10.0, 26.0
"""What is left around the curves, for the numbers of the axes."""

POINTS_OF_A_CHART = 2400
"""How many points all curves of a chart have together: a page of 40 charts is then a few megabytes."""

POINTS_AT_LEAST = 80
"""Of one curve, however many there are."""

LOG_RATIO = 100.0
"""The axis is logarithmic where all values are above 0 and the largest is so many times the smallest."""


TINY = 1e-300
"""Values that are closer to each other are drawn as equal: a float has no round numbers between them."""


@dataclass(frozen=True)
class Tick:
    """A number at an axis, and where it is."""

    at: float
    label: str


@dataclass(frozen=True)
class Curve:
    """One run's curve of a chart."""

    run: int
    """Which of the runs of the page it is, from 0: the same colour everywhere."""
    points: list[tuple[int, float]]
    """(step, value), as many as are drawn."""
    line: str
    """The same as a polyline's points."""
    not_finite: int
    """How many values could not be drawn: NaN or infinite."""


@dataclass(frozen=True)
class Chart:
    """The curves of one tag."""

    tag: str
    curves: list[Curve]
    is_log: bool
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    frame: dict[str, float] = field(default_factory=dict)
    """What a script needs to find the point below a pointer: the ends of both axes, `log` and the size."""


def chart(tag: str, runs: Mapping[int, Mapping[int, float]]) -> Chart:
    """A chart of the values by step that some of the page's runs have logged under a tag."""
    drawn = {run: finite(dict(points)) for run, points in runs.items()}
    values = [value for points in drawn.values() for _, value in points]
    steps = [step for points in drawn.values() for step, _ in points]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    first, last = (float(min(steps)), float(max(steps))) if steps else (0.0, 1.0)
    if first == last:
        first, last = first - 0.5, last + 0.5
    is_log = low > 0 and high / low >= LOG_RATIO
    y_ticks = _log_ticks(low, high) if is_log else _ticks(low, high)
    low, high = _with_margin(low, high, y_ticks, is_log)
    up: Callable[[float], float] = math.log10 if is_log else float
    x = _scale(first, last, LEFT, WIDTH - RIGHT)
    y = _scale(up(low), up(high), HEIGHT - BOTTOM, TOP)
    most = max(POINTS_AT_LEAST, POINTS_OF_A_CHART // max(1, len(drawn)))
    curves = []
    for run, points in drawn.items():
        kept = thinned(points, most)
        line = " ".join(f"{x(step):.1f},{y(up(value)):.1f}" for step, value in kept)
        curves.append(Curve(run, kept, line, len(runs[run]) - len(points)))
    return Chart(
        tag,
        curves,
        is_log,
        [Tick(round(x(at), 1), label(at)) for at in _ticks(first, last, whole=True) if first <= at <= last],
        [Tick(round(y(up(at)), 1), label(at)) for at in y_ticks if low <= at <= high],
        {"first": first, "last": last, "low": low, "high": high, "log": float(is_log)},
    )


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """At most `most` points, spikes included: of each stretch the smallest and the largest, and the ends."""
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(points) - 1}
    for number in range(stretches):
        stretch = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def label(value: float) -> str:
    """A number of an axis, in few characters."""
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and abs(value) < 1e12:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Four to eight round numbers between two; `whole` ones, as of steps."""
    width = high - low
    if not TINY < width < math.inf:
        return [low]
    step = 10.0 ** math.floor(math.log10(width / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if width / (step * factor) <= 6)
    if whole:
        step = max(1.0, step)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, every so many that there are at most seven."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**power for power in range(first, last + 1, max(1, -(-(last - first) // 6)))]


def _with_margin(low: float, high: float, ticks: Sequence[float], is_log: bool) -> tuple[float, float]:
    """The ends of an axis: a curve does not lie on the frame, and one of equal values lies in the middle."""
    if is_log:
        return low / 1.2, high * 1.2
    width = high - low
    if not width < math.inf:  # the values are as large as numbers get
        return low, high
    margin = width * 0.04 or abs(low) * 0.5 or 1.0
    return low - margin, high + margin


def _scale(low: float, high: float, at_low: float, at_high: float) -> Callable[[float], float]:
    width = high - low
    if not TINY < width < math.inf:
        return lambda value: (at_low + at_high) / 2
    return lambda value: at_low + (value - low) / width * (at_high - at_low)
