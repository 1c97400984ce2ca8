"""A run that starts from another's checkpoint: what its function gives otherwise holds, the rest goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as of_torch

from jobkit.train.built import built, settle, take_changes
from jobkit.train.schedule import cosine

Make = Callable[[torch.optim.Optimizer, int], Any]


def warm_up_then_cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    parts = [of_torch.LinearLR(optimizer, 0.1, 1.0, 4), of_torch.CosineAnnealingLR(optimizer, steps - 4)]
    return of_torch.SequentialLR(optimizer, parts, [4])


SCHEDULES: dict[str, Make] = {
    "jobkit's cosine": lambda optimizer, steps: cosine(optimizer, steps=steps, warmup=2),
    "cosine": lambda optimizer, steps: of_torch.CosineAnnealingLR(optimizer, steps, eta_min=1e-5),
    "linear": lambda optimizer, steps: of_torch.LinearLR(optimizer, 1.0, 0.1, total_iters=steps),
    "exponential": lambda optimizer, steps: of_torch.ExponentialLR(optimizer, 0.9),
    "steps": lambda optimizer, steps: of_torch.MultiStepLR(optimizer, [3, steps // 2, steps]),
    "one cycle": lambda optimizer, steps: of_torch.OneCycleLR(optimizer, optimizer.defaults["lr"], steps + 1),
    "in a row": warm_up_then_cosine,
    "factors": lambda optimizer, steps: of_torch.MultiplicativeLR(optimizer, lambda step: 0.9),
}


class Function:
    """What a training function makes, and its loop."""

    def __init__(self, lr: float, steps: int, make: Make | None = None, decay: float = 0.01) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.AdamW([self.weight], lr=lr, weight_decay=decay)
        self.objects = [self.optimizer, *([make(self.optimizer, steps)] if make else [])]
        self.built = [copy.deepcopy(built(one, {self.weight: "weight"})) for one in self.objects]

    def rates(self, steps: int) -> list[float]:
        """The learning rate of each of so many further steps."""
        found = []
        for _ in range(steps):
            self.weight.grad = torch.ones(2)
            found.append(self.optimizer.param_groups[0]["lr"])
            for one in self.objects:
                one.step()
        return found

    def start_from(self, other: Function) -> list[dict[str, Any]]:
        """As ctx.track does it; returns what was changed in each object."""
        found = []
        for own, theirs in zip(self.objects, other.objects, strict=True):
            own.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for own, before, now in zip(self.objects, other.built, self.built, strict=True):
            found.append(take_changes(own, {self.weight: "weight"}, before, now))
        for schedule, changed in zip(self.objects[1:], found[1:], strict=True):
            settle(schedule, changed)
        return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_if_it_had_been_the_new_one_from_the_beginning(name: str) -> None:
    parent, made, whole = (Function(lr, steps, SCHEDULES[name]) for lr, steps in ((0.3, 8), (0.01, 20), (0.01, 20)))
    parent.rates(8)
    made.start_from(parent)
    whole.rates(8)
    assert made.rates(8) == pytest.approx(whole.rates(8), rel=1e-6), "another rate, and more steps"


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_function_gives_as_before_goes_on_bit_for_bit(name: str) -> None:
    parent, made = (Function(0.3, 20, SCHEDULES[name]) for _ in range(2))
    parent.rates(7)
    assert made.start_from(parent) == [{}, {}]
    assert made.rates(9) == parent.rates(9)


def test_options_that_were_changed_hold_and_others_stay_where_the_loop_has_moved_them() -> None:
    parent, made = Function(0.3, 0), Function(0.3, 0, decay=0.5)
    parent.optimizer.param_groups[0]["lr"] = 0.2  # by the loop itself
    assert made.start_from(parent) == [{"weight_decay": (0.01, 0.5)}]
    group = made.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.2, 0.5)


def test_a_rate_in_a_tensor_and_a_group_without_names_take_changes_too() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    before = built(torch.optim.Adam([weight], lr=torch.tensor(0.3), capturable=False), {})
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5))
    now = built(optimizer, {})
    assert before is not None and now is not None
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    assert list(take_changes(optimizer, {}, before, now)) == ["lr"]
    assert optimizer.param_groups[0]["lr"].item() == 0.5
