"""How long steps take: for the agreement, the progress bar, and jobkit's own curves. loop.py calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from jobkit.data.loader import Loader
from jobkit.loop.reporter import Reporter
from jobkit.parallel.devices import peak_memory

SECONDS = 1.0
"""How often the loop logs its own curves: seconds and samples a step, learning rate, epoch."""


class Timing:
    """The clock of one loop; `loaders` and `optimizers` give the curves."""

    def __init__(
        self,
        reporter: Reporter,
        device: torch.device,
        loaders: Sequence[Loader],
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    ) -> None:
        self.steps_per_second: float | None = None
        self._reporter, self._device, self._loaders, self._optimizers = reporter, device, loaders, optimizers
        self._step, self._since = 0, time.perf_counter()
        self._sampled_step, self._sampled = 0, self._since

    def begin(self, step: int) -> None:
        """Steps are timed from here: the time of an evaluation is no step's."""
        now = time.perf_counter()
        if step == self._step:
            self._sampled += now - self._since
        else:
            self._sampled_step, self._sampled = step, now
        self._step, self._since = step, now

    def measure(self, step: int) -> float:
        """Return seconds a step since the last call."""
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, step - self._step)
        self._step, self._since = step, now
        return seconds

    def report(self, step: int) -> None:
        """Once a second, log jobkit's own curves."""
        now = time.perf_counter()
        if now - self._sampled < SECONDS or step == self._sampled_step:
            return
        seconds = (now - self._sampled) / (step - self._sampled_step)
        self._sampled_step, self._sampled = step, now
        self.steps_per_second = 1 / seconds
        values: dict[str, float] = {"perf/step_seconds": seconds}
        for loader in self._loaders[:1]:
            values["perf/samples_per_second"] = loader.global_batch_size / seconds
            values["perf/epoch"] = loader.epoch
        for optimizer in self._optimizers()[:1]:
            values["perf/lr"] = float(optimizer.param_groups[0]["lr"])
        if (peak := peak_memory(self._device)) is not None:
            values["perf/peak_memory_gib"] = peak / 2**30
        self._reporter.log_now(max(0, step - 1), values)
