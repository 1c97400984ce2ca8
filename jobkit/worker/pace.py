"""How long steps take, and when the ranks next compare notes."""

from __future__ import annotations

import time

AGREEMENT_SECONDS = 0.25
"""Ranks compare notes about stopping about this often, or once a step where steps are longer than that."""

MAX_STEPS_BETWEEN_AGREEMENTS = 32
"""So that steps which suddenly take a hundred times longer do not put a stop off for minutes."""

PERFORMANCE_SECONDS = 1.0
"""How often the loop logs its own curves (learning rate, samples and time a step, epoch)."""


class StepTimer:
    """The clock of one loop; equal decisions on all ranks follow from equal arguments."""

    def __init__(self) -> None:
        self.agree_at = 0
        self.steps_per_second: float | None = None
        self._since_step, self._since = 0, 0.0
        self._sampled_step, self._sampled = 0, 0.0

    def start(self, step: int) -> None:
        """The loop begins, or goes on, after `step` steps."""
        self.agree_at = step + 1
        self._since_step, self._since = step, time.perf_counter()
        self._sampled_step, self._sampled = step, self._since

    def measure(self, step: int) -> float:
        """Seconds a step since the last agreement."""
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, step - self._since_step)
        self._since_step, self._since = step, now
        return seconds

    def agree_after(self, step: int, seconds_a_step: float) -> None:
        """The next agreement: after AGREEMENT_SECONDS at this pace, the same step on every rank."""
        steps = int(AGREEMENT_SECONDS / max(seconds_a_step, 1e-6))
        self.agree_at = step + max(1, min(MAX_STEPS_BETWEEN_AGREEMENTS, steps))

    def agree_next(self, step: int) -> None:
        """Agree after this step: it was an unusual one, as with an evaluation in it."""
        self.agree_at = step + 1

    def sample(self, step: int) -> float | None:
        """Seconds a step, once every PERFORMANCE_SECONDS, else None."""
        now = time.perf_counter()
        if now - self._sampled < PERFORMANCE_SECONDS or step == self._sampled_step:
            return None
        seconds = (now - self._sampled) / (step - self._sampled_step)
        self._sampled_step, self._sampled = step, now
        self.steps_per_second = 1 / seconds
        return seconds
