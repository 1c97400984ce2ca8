"""Whole runs in bad weather over a fake clock: how often they are tried, where they go, and how they end.

The oracle is the world below: a clock, nodes, and a fault that knows no jobkit. What a person would want is the row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from jobkit.config.schema import RetryConfig
from jobkit.errors import Nature
from jobkit.run.records import AttemptBegan, AttemptEnded, Cause
from jobkit.run.status import Attempt
from jobkit.supervisor.retry import Decision, RestartOptions, decide

MINUTE, HOUR = 60.0, 3600.0


@dataclass(frozen=True)
class Death:
    """How an attempt dies, as the diagnosis would say it."""

    rank: int = 0
    cause: Cause = "crashed"
    signature: str | None = "OSError at data.py:7"
    nature: Nature | None = None
    evidence: str | None = None
    everywhere: bool = False
    alone: bool = True
    error: str = "rank 0: OSError: away"


Fault = Callable[[float, int, Sequence[str]], Death | None]
"""(time, step, node of each rank) -> how the attempt dies now, if it does."""


@dataclass
class World:
    """A cluster with one run, of a second a step, and a fault."""

    fault: Fault
    nodes: int = 1
    ranks: int = 1
    """Of each node."""
    spares: int = 0
    cluster: int = 16
    """Nodes that are up."""
    steps: int = 5000
    start: float = 10.0
    """Seconds from the begin of an attempt to its first step."""
    snapshot: int = 30
    """Steps between two snapshots in memory."""
    checkpoint: int = 600
    queue: float = 10 * MINUTE
    retry: RetryConfig = field(default_factory=RetryConfig)

    time: float = 0.0
    attempts: list[Attempt] = field(default_factory=list)
    moves: int = 0
    kept: int = 0
    """The step of the newest state."""
    durable: int = 0
    submission: int = 1
    decision: Decision = field(default_factory=lambda: Decision(action="stop", reason=""))

    def submit(self) -> World:
        """Play one submission to its end."""
        job = self._allocate({})
        used, how = job[: self.nodes], "resume"
        while not self._finishes(used, how):
            self._decide(job)
            if self.decision.action in ("stop", "fail"):
                break
            went, self.time = self.time, self.time + self.decision.pause
            if self.decision.action == "in_place":
                how = "in place"
                spares = [node for node in job if node not in used and node not in self.decision.avoid]
                used = [spares.pop(0) if node in self.decision.avoid else node for node in used]
                used = [*used[1:], used[0]] if self.decision.rotate else used
            else:
                how, self.kept, self.moves = "requeue", self.durable, self.moves + 1
                self.time = max(self.time, went + self.queue)
                job = self._allocate(self.decision.avoid)
                used = job[: self.nodes]
        self.submission += 1
        return self

    def _decide(self, job: Sequence[str]) -> None:
        room = RestartOptions(
            in_place=lambda without: len(set(job) - without) >= self.nodes,
            requeue="requeue",
            spares=len(job) - self.nodes,
            elsewhere=lambda without: self.cluster - len(without) >= self.nodes + 1,
        )
        decision = self.decision = decide(self.attempts, self.retry, room)
        facts = {
            "next_at": self.time + decision.pause,
            "gave_up": decision.gave_up,
            "waited": decision.waited,
            "avoid": dict(decision.avoid),
        }
        last = self.attempts[-1]
        self.attempts[-1] = replace(last, ended=replace(last.ended, **facts))  # type: ignore[type-var, arg-type]

    def _allocate(self, avoid: Any) -> list[str]:
        names = [f"n{number}" for number in range(self.cluster) if f"n{number}" not in avoid]
        return names[: self.nodes + self.spares]

    def _finishes(self, used: Sequence[str], how: Any) -> bool:
        began, places = self.time, [node for node in used for _ in range(self.ranks)]
        self.time += self.start
        loop, first, step, death = self.time, self.kept, self.kept, None
        while step < self.steps and (death := self.fault(self.time, step, places)) is None:
            step, self.time = step + 1, self.time + 1.0
            if step % self.checkpoint == 0:
                self.durable = step
            if step % self.checkpoint == 0 or (step - first) % self.snapshot == 0:
                self.kept = step
        facts: dict[str, Any] = {"cause": "finished"}
        if death is not None:
            facts = vars(death) | {"node": places[death.rank], "step": step}
        number = len(self.attempts) + 1
        ended = AttemptEnded(
            attempt=number,
            next="stop",
            time=self.time,
            first_step=first,
            last_step=step,
            durable_step=self.durable,
            snapshot_step=self.kept,
            loop_began=loop,
            **facts,
        )
        job = AttemptBegan(attempt=number, token="t", job_id="7", time=began, nodes=list(used), how=how)
        self.attempts.append(Attempt(number=number, submission=self.submission, began=job, ended=ended))
        return death is None

    @property
    def end(self) -> str:
        last = self.attempts[-1].ended
        return "finished" if last is not None and last.cause == "finished" else self.decision.action


def between(since: float, until: float, **death: Any) -> Fault:
    return lambda time, step, nodes: Death(**death) if since <= time < until else None


def by_chance(since: float, until: float, **death: Any) -> Fault:
    """An outage that any rank meets first."""
    chance = random.Random(1)
    return lambda time, step, nodes: (
        Death(rank=chance.randrange(len(nodes)), **death) if since <= time < until else None
    )


def at_step(number: int, **death: Any) -> Fault:
    return lambda time, step, nodes: Death(**death) if step == number else None


def on_node(name: str, since: float = 0.0, **death: Any) -> Fault:
    return lambda time, step, nodes: (
        Death(rank=list(nodes).index(name), **death) if name in nodes and time >= since else None
    )


def leak(steps: int) -> Fault:
    """Memory that an attempt has used up after so many steps."""
    seen = [-1, 0]

    def fault(time: float, step: int, nodes: Sequence[str]) -> Death | None:
        seen[:] = step, seen[1] + 1 if step == seen[0] + 1 else 0
        return Death(cause="killed", signature="SIGKILL of rank 0") if seen[1] == steps else None

    return fault


def times(count: int, fault: Fault) -> Fault:
    """The first few deaths of a fault."""
    deaths: list[Death] = []

    def limited(time: float, step: int, nodes: Sequence[str]) -> Death | None:
        death = fault(time, step, nodes) if len(deaths) < count else None
        deaths.extend([death] if death is not None else [])
        return death

    return limited


DEVICE = {"signature": "RuntimeError at model.py:9", "error": "rank 0: RuntimeError: CUDA error"}
ECC = {**DEVICE, "nature": "hardware", "evidence": "its device failed"}
MEMORY = {"cause": "out_of_memory", "nature": "program", "signature": "SIGKILL of rank 0"}
ABORT = {"cause": "killed", "signature": None, "alone": False}
HANG = {"cause": "hang", "signature": "hang"}
TYPO = {"signature": "FileNotFoundError at train.py:50"}
EIGHT = {"nodes": 8, "ranks": 8}

# (what happens, world) -> (end, attempts, moves through the queue, nodes avoided)
RUNS: dict[str, tuple[World, tuple[str, int, int, set[str]]]] = {
    # Outages: nothing is excluded, and the job is kept
    "S3 away for 20 min": (World(between(1000, 1000 + 20 * MINUTE)), ("finished", 11, 0, set())),
    "150 s, from the first step": (World(between(0, 150, nature="outside")), ("finished", 7, 0, set())),
    "150 s, two nodes": (World(by_chance(1000, 1150, alone=False), nodes=2, ranks=4), ("finished", 7, 0, set())),
    "150 s, each time one node": (World(by_chance(1000, 1150), nodes=2, ranks=4), ("finished", 7, 0, set())),
    "150 s, rank 0 alone": (World(between(1000, 1150), nodes=2, ranks=4), ("finished", 7, 0, set())),
    "two hours, a node": (World(between(1000, 1000 + 2 * HOUR)), ("stop", 19, 1, set())),
    "two hours, nothing else up": (World(between(1000, 1000 + 2 * HOUR), cluster=1), ("stop", 18, 0, set())),
    # A person must act
    "memory at step + 3 each time": (
        World(lambda time, step, nodes: Death(**MEMORY) if step > 100 and step % 30 == 3 else None),  # type: ignore[arg-type]
        ("fail", 4, 0, set()),
    ),
    "a typo in a path at the first validation": (World(at_step(500, **TYPO)), ("fail", 2, 0, set())),
    "a typo in a path before the first step": (World(at_step(0, everywhere=True, **TYPO)), ("fail", 2, 0, set())),
    "the same by rank 0 of two nodes": (World(at_step(0, **TYPO), nodes=2), ("fail", 2, 0, set())),
    "a hang at step 700 each time": (World(at_step(700, **HANG)), ("fail", 2, 0, set())),
    "a TypeError at step 100": (World(at_step(100, nature="program")), ("fail", 2, 0, set())),
    "a leak that takes longer to start than to die": (World(leak(40), start=60, cluster=1), ("stop", 15, 0, set())),
    "a leak that takes longer to die than to start": (World(leak(400), start=60), ("finished", 13, 0, set())),
    # Nodes
    "SIGABRT of all of eight nodes": (World(times(3, at_step(900, **ABORT)), **EIGHT), ("finished", 4, 0, set())),
    "a device, nothing else free": (World(on_node("n0", 1000, **DEVICE), cluster=1), ("stop", 18, 0, set())),
    "a device, another node up": (World(on_node("n0", 1000, **DEVICE)), ("finished", 19, 1, {"n0"})),
    "a device, a spare": (World(on_node("n1", 1000, **DEVICE), nodes=2, spares=1), ("finished", 4, 0, {"n1"})),
    "a device, two nodes": (World(on_node("n1", 1000, **DEVICE), nodes=2), ("finished", 4, 1, {"n1"})),
    "one that says so, a node": (World(on_node("n0", 1000, **ECC)), ("finished", 3, 1, {"n0"})),
    "one that says so, two nodes": (World(on_node("n1", 1000, **ECC), nodes=2), ("finished", 3, 1, {"n1"})),
    "one that says so, a spare": (World(on_node("n1", 1000, **ECC), nodes=2, spares=1), ("finished", 2, 0, {"n1"})),
    "one that says so, nothing else up": (World(on_node("n0", 1000, **ECC), cluster=1), ("stop", 18, 0, set())),
    "no mount on one of 16, at the start": (World(on_node("n7"), nodes=16, cluster=20), ("finished", 4, 1, {"n7"})),
    "no mount on one of 16, later": (World(on_node("n7", 2000), nodes=16, cluster=20), ("finished", 4, 1, {"n7"})),
}  # fmt: skip


@pytest.mark.parametrize(("world", "expected"), RUNS.values(), ids=RUNS)
def test_a_run_in_bad_weather_goes_on_where_it_can(world: World, expected: tuple[str, int, int, set[str]]) -> None:
    world = replace(world, attempts=[]).submit()
    assert (world.end, len(world.attempts), world.moves, set(world.decision.avoid)) == expected


def test_all_nodes_sick_is_given_up_after_an_hour_and_excludes_two() -> None:
    world = World(lambda time, step, nodes: Death(**ECC) if time > 1000 else None, nodes=2).submit()  # type: ignore[arg-type]
    assert (world.end, len(world.decision.avoid)) == ("stop", 2)
    assert HOUR < world.time < 3 * HOUR


def test_a_proof_says_which_error_and_when_it_was_seen_before() -> None:
    words = World(at_step(100, **TYPO)).submit().decision.reason
    assert words.endswith(
        "restarts are exact, and this was FileNotFoundError at train.py:50 in step 100, as in attempt 1: not retried "
        "(retry.crash: unlimited would)"
    )


def test_a_loop_that_submits_on_75_costs_a_try_a_submission_and_the_run_goes_on_after_the_outage() -> None:
    world = World(between(1000, 1000 + 8 * HOUR), cluster=1)
    counts = []
    while world.submit().end == "stop":
        counts.append(len(world.attempts))
        world.time += 5 * MINUTE  # the loop's sleep
    assert world.end == "finished"
    assert counts[0] == 18 and {later - count for count, later in pairwise(counts)} == {1}


def test_more_patience_than_before_counts() -> None:
    world = World(between(1000, 1000 + 2 * HOUR), cluster=1).submit()
    world.retry = RetryConfig(patience="3h")
    assert world.submit().end == "finished"
