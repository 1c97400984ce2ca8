"""The interruptions of a verification: a pure function of the boundaries of the straight run.

    straight run's trace -> Course -> interruptions() -> drill.json of the interrupted run

cli/verify.py calls it. Each attempt of the interrupted run has one interruption, in the order of the boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from jobkit.run.records import Interruption, InterruptionKind


@dataclass(frozen=True, kw_only=True)
class Course:
    """The boundaries that the straight run came by; all are numbers of steps done.

    Course(first=0, last=20, evaluations=(0, 6, 12, 18), epoch_ends=(6, 12, 18))
    """

    first: int
    last: int
    evaluations: tuple[int, ...] = ()
    """Boundaries at which an `every=` function or an evaluation ran."""
    epoch_ends: tuple[int, ...] = ()

    @property
    def last_pass(self) -> int:
        """The boundary with which the last pass begins, of an epoch or between two evaluations."""
        return max((place for place in (*self.evaluations, *self.epoch_ends) if place < self.last), default=self.first)


KINDS: tuple[InterruptionKind, ...] = get_args(InterruptionKind)


def interruptions(course: Course) -> tuple[Interruption, ...]:
    """Return the interruptions of one run, each of another attempt. A kind for which there is no place is left out.

    The stop comes within the last pass, for what only the result reads was added up there; one kill as early as may be,
    for a program may begin otherwise than it goes on. A kill comes one step after the save that the next attempt starts
    from, so that a step is repeated.
    """
    taken: dict[int, InterruptionKind] = {}
    inner = range(course.first + 1, course.last)
    middle = (course.first + course.last) // 2
    places_of_kinds: list[tuple[InterruptionKind, Iterable[int]]] = [
        ("stop", sorted(inner, key=lambda place: (place <= course.last_pass, -place))),
        ("evaluation", course.evaluations),
        ("epoch end", course.epoch_ends),
        ("memory", inner),
        ("disk", sorted(inner, key=lambda place: abs(place - middle))),
    ]
    for kind, places in places_of_kinds:
        if (place := _free(course, places, taken)) is not None:
            taken[place] = kind
    return tuple(
        Interruption(attempt=attempt, at=place, kind=kind)
        for attempt, (place, kind) in enumerate(sorted(taken.items()), start=1)
    )


def _free(course: Course, places: Iterable[int], taken: Iterable[int]) -> int | None:
    """Return the first place within the run that is two steps away from every other interruption."""
    inner = (place for place in places if course.first + 1 < place < course.last)
    return next((place for place in inner if all(abs(place - other) > 1 for other in taken)), None)
