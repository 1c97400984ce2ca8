"""Which rank holds up the others: each measures the part of a step that is its own, and they compare."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence

import torch

from jobkit.log import log
from jobkit.run.events import Event
from jobkit.worker.rank import Rank
from jobkit.worker.reporter import RunReporter
from jobkit.worker.timing import ComputeTimer, events_of

EXCHANGE_SECONDS = 1.0
"""How often the ranks compare, at most: it is one more all-reduce, of which training should not notice anything."""

SLOW_FACTOR = 1.5
"""A rank is slow whose own time is this many times the median ..."""

SLOW_SHARE = 0.1
"""... and is longer than it by this part of a whole step: less than that is no straggler."""

EXCHANGES = 3
"""How many times in a row a rank must be slow to be named, and must not be to be cleared: one slow read from a shared
disk, or one garbage collection, is no slow rank."""

EACH_RANK = 16
"""Up to this many ranks have a curve each in TensorBoard; of more there are minimum, median and maximum."""


class StragglerDetector:
    """Which ranks are slow, by what they say of several exchanges."""

    def __init__(self) -> None:
        self.slow: set[int] = set()
        self._in_a_row: dict[int, int] = {}

    def look(self, seconds: Sequence[float], step_seconds: float) -> list[int]:
        """The ranks that have become slow, or no longer are, with this exchange of own seconds, by rank."""
        middle = statistics.median_low(seconds)  # of two ranks the faster one
        changed = []
        for rank, own in enumerate(seconds):
            now = own > SLOW_FACTOR * middle and own - middle > SLOW_SHARE * step_seconds
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if now != (rank in self.slow) else 0
            if self._in_a_row[rank] == EXCHANGES:
                self._in_a_row[rank] = 0
                changed.append(rank)
        self.slow ^= set(changed)
        return changed


class StragglerMonitor:
    """Compares the ranks' own times in the loop; rank 0 writes them to TensorBoard and names who is slow."""

    def __init__(self, rank: Rank, reporter: RunReporter) -> None:
        self.timer = ComputeTimer(events_of(rank.device))
        """Of this rank."""
        self._rank, self._reporter = rank, reporter
        self._detector = StragglerDetector()
        self._hosts: list[str] = []
        self._compared = time.monotonic()

    def watch(self, model: torch.nn.Module, forward_waits: bool = False) -> None:
        if self._rank.topology.world_size > 1:
            self.timer.watch(model, forward_waits)

    def is_due(self) -> bool:
        """Whether it is time to compare: rank 0's clock, which tells the others."""
        several = self._rank.topology.world_size > 1
        return several and self._rank.is_main and time.monotonic() - self._compared >= EXCHANGE_SECONDS

    def compare(self, step: int) -> None:
        """Exchange the means since the last time, on all ranks together, after `step` steps."""
        group, topology = self._rank.group, self._rank.topology
        if not self._hosts:
            host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
            self._hosts = [str(one) for one in group.gather(host)]
        seconds = torch.zeros(topology.world_size, dtype=torch.float64)
        seconds[topology.rank], whole = self.timer.take()
        group.sum(seconds)
        self._compared = time.monotonic()
        if self._rank.is_main and bool((seconds > 0).all()):
            self._report(step, seconds.tolist(), whole)

    def _report(self, step: int, seconds: list[float], step_seconds: float) -> None:
        median = statistics.median_low(seconds)
        self._reporter.scalars(step - 1, curves(seconds))
        for rank in self._detector.look(seconds, step_seconds):
            host, own = self._hosts[rank], seconds[rank]
            about = {"rank": rank, "host": host, "step": step, "seconds": round(own, 6), "median": round(median, 6)}
            if rank in self._detector.slow:
                self._reporter.record(Event.STRAGGLER, **about, factor=round(own / median, 2))
                needs = f"needs {own:.3g} s a step by itself, the median rank {median:.3g} s"
                log.info("rank %d on %s is slower than the others: it %s", rank, host, needs)
            else:
                self._reporter.record(Event.STRAGGLER_OVER, **about)
                log.info("rank %d on %s is no longer slower than the others", rank, host)


def curves(seconds: Sequence[float]) -> dict[str, float]:
    """The ranks' own seconds as TensorBoard's scalars: one a rank, or a summary where there are many."""
    if len(seconds) <= EACH_RANK:
        return {f"perf/rank_seconds/{rank}": own for rank, own in enumerate(seconds)}
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    summary = {"min": min(seconds), "median": statistics.median_low(seconds), "max": max(seconds)}
    return {f"perf/rank_seconds/{name}": value for name, value in {**summary, "slowest_rank": slowest}.items()}
