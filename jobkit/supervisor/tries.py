"""The attempts of a submission: which of them made progress, and how long the run has waited since.

Pure, over the journal's attempts; retry.py and evidence.py decide by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from jobkit.run.records import AttemptEnded, Cause
from jobkit.run.status import Attempt

DEATHS: frozenset[Cause] = frozenset({"node_failure", "crashed", "killed", "out_of_memory", "hang"})

STAYS = DEATHS | {"unknown"}
"""Causes after which the job may still have its nodes."""

LIFE_SECONDS = 300.0
"""How much of an attempt's training counts as waiting: an attempt that trained for days has not waited that long."""


def end_of(attempt: Attempt) -> AttemptEnded:
    assert attempt.ended is not None, f"attempt {attempt.number} has not ended"
    return attempt.ended


def ran_until_stopped(attempt: Attempt) -> bool:
    """Return whether ranks were running until the scheduler ended them: a program that reports no steps says no more.

    A preemption while the run waits for its agents, or in a pause, is an attempt without ranks.
    """
    return attempt.began.ranks > 0 and end_of(attempt).cause in ("preempted", "timeout")


class Tries:
    """The attempts of a submission, and those of them that count.

    Progress is a newer state than all before: a checkpoint, or a snapshot in memory. A snapshot shows in the step where
    the next attempt begins; of the last attempt, in its own report. An attempt that died has made progress only if it
    came further than all before, trained for as long as its start and the pause before it took, and left no more steps
    to repeat than it advanced: else a death a step further on each time would never use up its tries.
    """

    def __init__(self, attempts: Sequence[Attempt], command: bool) -> None:
        self.all, self.last = attempts, attempts[-1]
        self.ours = [attempt for attempt in attempts if attempt.submission == self.last.submission]
        self.is_silent = command and all(end_of(attempt).first_step is None for attempt in self.ours)
        """True for a `command:` that reports no steps."""
        # Nobody knows how far a silent program came. It was running, at least, until the scheduler ended it.
        stops = [ran_until_stopped(attempt) for attempt in self.ours]
        newest = _newest_states(self.ours)
        newer = stops if self.is_silent else [state > before for before, state in newest]
        first = _last(newer if self.is_silent else _progress(self.ours, newest))
        self.fruitless = self.ours[first:]
        """Those since the last one that made progress."""
        self.deaths = [attempt for attempt in self.ours[max(0, first - 1) :] if end_of(attempt).cause in STAYS]
        """The same that nobody asked for; first the death of the attempt that made progress, if it died."""
        self.since_state = self.ours[max(0, _last(newer) - 1) :]
        """Those since the last newer state, however short the attempt was that made it, with that one."""

    @cached_property
    def counted(self) -> list[Attempt]:
        """The fruitless ones without those that were stopped in a pause: they have tried nothing."""
        due = {attempt.number: end_of(before).next_at or 0.0 for before, attempt in pairwise(self.all)}
        return [item for item in self.fruitless if item.began.ranks or end_of(item).time >= due.get(item.number, 0.0)]

    @cached_property
    def has_trained(self) -> bool:
        """Whether the run had ever done a step, or has a checkpoint: a death may come before a report."""
        steps = (
            step
            for ended in map(end_of, self.all)
            for step in (ended.last_step, ended.first_step, ended.step, ended.durable_step)
        )
        return any((step or 0) > 0 for step in steps)

    @cached_property
    def _after(self) -> list[tuple[Attempt, Attempt]]:
        """The attempts after the first of the deaths, each with the one before it."""
        return [pair for pair in pairwise(self.ours) if self.deaths and pair[1].number > self.deaths[0].number]

    @cached_property
    def waited(self) -> float:
        """Seconds of waiting for better weather since the first of the deaths; the queue is none, nor is training."""
        return self.paused + sum(_start(attempt) + min(_trained(attempt), LIFE_SECONDS) for _, attempt in self._after)

    @cached_property
    def paused(self) -> float:
        return sum(_pause_before(attempt, before) for before, attempt in self._after)

    @cached_property
    def gave_up_after(self) -> float:
        """Seconds after which patience ended, of a submission before this one, without progress since; else 0."""
        earlier = self.all[: len(self.all) - len(self.ours)]
        is_fruitless = bool(earlier) and len(self.fruitless) == len(self.ours)
        return end_of(earlier[-1]).waited if is_fruitless and end_of(earlier[-1]).gave_up else 0.0

    @cached_property
    def only_node(self) -> str | None:
        """The node on which all deaths were, in a job of one node; None where the ranks were elsewhere too."""
        used = {node for attempt in self.deaths for node in attempt.nodes}
        return used.pop() if len(used) == 1 else None


def _last(made: Sequence[bool]) -> int:
    return max((number for number, is_made in enumerate(made, start=1) if is_made), default=0)


def _newest_states(attempts: Sequence[Attempt]) -> list[tuple[int, int]]:
    """Return the steps of the newest state before each attempt's own, and with those: the same where it left none."""
    made, best, furthest = [], 0, 0
    for number, attempt in enumerate(attempts):
        ended = end_of(attempt)
        first, durable, last = ended.first_step, ended.durable_step or 0, ended.last_step or 0
        following = end_of(attempts[number + 1]).first_step if number + 1 < len(attempts) else None
        best = max(best, first or 0)
        # An attempt that never came to its loop found the checkpoints that are there, and made none.
        newest = max(best, durable) if first is not None else best
        if last > furthest:
            newest = max(newest, following if following is not None else ended.snapshot_step or 0)
        made.append((best, newest))
        best, furthest = max(best, durable), max(furthest, last)
    return made


def _progress(attempts: Sequence[Attempt], newest: Sequence[tuple[int, int]]) -> list[bool]:
    """Return which of the attempts that left a newer state made progress."""
    made, furthest = [], 0
    for number, (attempt, (before, state)) in enumerate(zip(attempts, newest, strict=True)):
        ended, is_progress = end_of(attempt), state > before
        last = ended.last_step or 0
        if is_progress and ended.cause in DEATHS:
            pause = _pause_before(attempt, attempts[number - 1]) if number else 0.0
            is_progress = last > furthest and _trained(attempt) >= _start(attempt) + pause
            is_progress = is_progress and state - before >= last - state
        made.append(is_progress)
        furthest = max(furthest, last)
    return made


def _start(attempt: Attempt) -> float:
    """Return the seconds until an attempt's first step; all of them where it came to none."""
    ended = end_of(attempt)
    return max(0.0, (ended.loop_began or ended.time) - attempt.began.time)


def _trained(attempt: Attempt) -> float:
    ended = end_of(attempt)
    return max(0.0, ended.time - (ended.loop_began or ended.time))


def _pause_before(attempt: Attempt, before: Attempt) -> float:
    """Return the seconds between two attempts; of those in the queue the pause that was meant.

    In place agents may have to start too. A clock that was set, or a machine that slept, adds no more than that.
    """
    ended = end_of(before)
    meant = (ended.next_at or ended.time) - ended.time + (LIFE_SECONDS if attempt.began.how == "in place" else 0.0)
    return min(max(0.0, attempt.began.time - ended.time), meant)
