"""Learning rates by step: a multiplier of the optimizer's own rate, after a warm-up that rises linearly.

torch's LinearLR and CosineAnnealingLR multiply the rate of the step before, so that rounding errors add up; the latter
rises again after its last step, and has one lowest rate for all groups. So these functions make a LambdaLR, which
computes the rate from the step. Users call them as jobkit.schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from jobkit.errors import InputError, nearest


def linear_at(step: int, *, steps: int, floor: float = 0.0) -> float:
    """From 1 at step 0 along a line to `floor` at `steps`, and no lower."""
    return floor + (1 - floor) * (1 - min(step, steps) / steps)


def cosine_at(step: int, *, steps: int, floor: float = 0.0) -> float:
    """From 1 at step 0 along half a cosine to `floor` at `steps`, and no lower.

    Loshchilov and Hutter, https://arxiv.org/abs/1608.03983, without restarts.
    """
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": lambda step: 1.0, "linear": linear_at, "cosine": cosine_at}
"""The schedules, by name: the multiplier at a step."""


def constant(optimizer: Optimizer, *, warmup: int = 0) -> LambdaLR:
    """The optimizer's rate, reached after `warmup` steps."""
    return schedule("constant", optimizer, warmup=warmup)


def linear(optimizer: Optimizer, *, steps: int, warmup: int = 0, floor: float = 0.0) -> LambdaLR:
    """A line from the optimizer's rate, after `warmup` steps, to `floor` times that at step `steps`."""
    return schedule("linear", optimizer, steps=steps, warmup=warmup, floor=floor)


def cosine(optimizer: Optimizer, *, steps: int, warmup: int = 0, floor: float = 0.0) -> LambdaLR:
    """Half a cosine from the optimizer's rate, after `warmup` steps, to `floor` times that at step `steps`."""
    return schedule("cosine", optimizer, steps=steps, warmup=warmup, floor=floor)


def schedule(
    name: str, optimizer: Optimizer, *, steps: int | None = None, warmup: int = 0, floor: float = 0.0
) -> LambdaLR:
    """The schedule of that name, as a YAML may give it; call its `step()` after each of the optimizer's.

    Step s of the `warmup` (s = 0, 1, ...) has (s + 1) / warmup of the rate. `steps` counts the warm-up in; constant
    needs none and has no use for a floor. Raises InputError for an unknown name and for steps that cannot be.
    """
    if name not in SCHEDULES:
        raise InputError(f"schedule: found {name!r}, allowed: {', '.join(SCHEDULES)}; {nearest(name, SCHEDULES)}")
    if warmup < 0:
        raise InputError(f"schedule: warmup = {warmup}, expected 0 or more steps")
    if not 0.0 <= floor <= 1.0:
        raise InputError(f"schedule: floor = {floor}, expected a part of the learning rate, 0 to 1")
    after = SCHEDULES[name]
    if name != "constant":
        if steps is None or steps < 1:
            raise InputError(f"schedule: {name} needs the number of steps it takes, 1 or more; found {steps}")
        if warmup >= steps:
            raise InputError(f"schedule: a warm-up of {warmup} steps leaves none of {steps} for the {name} schedule")
        after = partial(after, steps=steps - warmup, floor=floor)
    return LambdaLR(optimizer, lambda step: (step + 1) / warmup if step < warmup else after(step - warmup))
