"""The logged values of a run: the points of each scalar, and the last image of each tag.

tensorboard/events.out.tfevents.* --read_logged--> Logged(scalars, images)

page.py calls it.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

PATTERN = "events.out.tfevents.*"


class Series:
    """The points of a scalar, in the order of their steps. Values that are not finite are points too."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    @property
    def last(self) -> float:
        return self.values[-1]

    @property
    def not_finite(self) -> list[int]:
        """Return the steps at which the value is NaN or infinite."""
        return [step for step, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)]


@dataclass(frozen=True)
class Image:
    """The bytes of a PNG, a GIF or a JPEG, as they were logged at a step."""

    step: int
    width: int
    data: bytes


@dataclass
class Logged:
    """The logged values of one run, by tag."""

    scalars: dict[str, Series] = field(default_factory=dict)
    images: dict[str, Image] = field(default_factory=dict)


class Stretch(NamedTuple):
    """The finite points of a part of a curve: their first and last step, and the range and the mean of their values."""

    first: int
    last: int
    low: float
    mean: float
    high: float


def read_logged(folder: Path) -> Logged:
    """Return the values in the event files of a folder; a record that is cut off ends its file."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    logged = Logged()
    for file in sorted(folder.glob(PATTERN)):  # their names begin with their time: later attempts come later
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    series = logged.scalars.setdefault(value.tag, Series())
                    series.steps.append(event.step)
                    series.values.append(value.simple_value)
                elif value.HasField("image"):
                    picture = value.image
                    logged.images[value.tag] = Image(event.step, picture.width, picture.encoded_image_string)
    return logged


def stretches(series: Series, count: int) -> list[list[Stretch]]:
    """Return at most `count` stretches of a curve, in pieces: a stretch without a finite value parts two pieces.

    A curve of at most `count` points keeps each of them; else each stretch is an equal part of the steps.
    """
    steps, values = series.steps, series.values
    if not steps:
        return []
    first, width = min(steps), (max(steps) - min(steps) + 1) / count
    few = len(steps) <= count
    pieces: list[list[Stretch]] = [[]]
    for _, group in groupby(range(len(steps)), key=lambda i: i if few else int((steps[i] - first) / width)):
        points = list(group)
        finite = [values[i] for i in points if math.isfinite(values[i])]
        if finite:
            mean = min(max(math.fsum(finite) / len(finite), min(finite)), max(finite))  # rounding may leave the range
            pieces[-1].append(Stretch(steps[points[0]], steps[points[-1]], min(finite), mean, max(finite)))
        else:
            pieces.append([])
    return [piece for piece in pieces if piece]
