"""Learning-rate schedules: where they start, where they end, and that a resumed run is on the same curve."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from jobkit.errors import InputError
from jobkit.train import schedule

LR = 3e-4


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def rates(make: Callable[[torch.optim.Optimizer], LambdaLR], steps: int) -> list[float]:
    """The learning rate that each of the first `steps` steps is taken with."""
    optimizer = adamw()
    scheduler = make(optimizer)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_linear_is_one_minus_step_by_steps_to_the_last_bit() -> None:
    plain = rates(lambda optimizer: LambdaLR(optimizer, lambda step: 1 - step / 500), 501)
    assert rates(lambda optimizer: schedule.linear(optimizer, steps=500), 501) == plain


def test_constant_stays() -> None:
    assert rates(schedule.constant, 5) == [LR] * 5


def test_a_warm_up_rises_linearly_and_its_last_step_has_the_whole_rate() -> None:
    found = rates(lambda optimizer: schedule.constant(optimizer, warmup=4), 6)
    assert found == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR, LR, LR])


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 20])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_decay_falls_from_the_rate_to_the_floor_and_stays_there(name: str, warmup: int, floor: float) -> None:
    found = rates(lambda optimizer: schedule.schedule(name, optimizer, steps=100, warmup=warmup, floor=floor), 110)
    decay = found[warmup:101]
    assert max(found) == decay[0] == LR
    assert decay == sorted(decay, reverse=True)
    assert len(set(decay)) == len(decay), "every step has its own rate"
    assert found[100:] == pytest.approx([floor * LR] * 10, abs=1e-20)


def test_cosine_is_half_a_cosine_between_the_rate_and_the_floor() -> None:
    found = rates(lambda optimizer: schedule.cosine(optimizer, steps=100, floor=0.1), 101)
    for step in (0, 25, 50, 75, 100):
        assert found[step] == pytest.approx(LR * (0.55 + 0.45 * math.cos(math.pi * step / 100)))


def test_each_schedule_of_the_table_can_be_named() -> None:
    for name in schedule.SCHEDULES:
        by_name = rates(lambda optimizer, name=name: schedule.schedule(name, optimizer, steps=10, warmup=2), 10)
        own = getattr(schedule, name)
        options = {"warmup": 2} if name == "constant" else {"warmup": 2, "steps": 10}
        assert by_name == rates(lambda optimizer, own=own, options=options: own(optimizer, **options), 10)


@pytest.mark.parametrize("name", sorted(schedule.SCHEDULES))
@pytest.mark.parametrize("stop", [1, 3, 8])
def test_a_resumed_run_is_on_the_same_curve_to_the_last_bit(name: str, stop: int) -> None:
    def make(optimizer: torch.optim.Optimizer) -> LambdaLR:
        return schedule.schedule(name, optimizer, steps=12, warmup=4, floor=0.1)

    expected = rates(make, 12)
    optimizer = adamw()
    scheduler = make(optimizer)
    for _ in range(stop):
        optimizer.step()
        scheduler.step()
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, file)
    file.seek(0)
    saved: dict[str, Any] = torch.load(file)

    resumed = adamw()
    continued = make(resumed)
    resumed.load_state_dict(saved["optimizer"])
    continued.load_state_dict(saved["scheduler"])
    found = []
    for _ in range(stop, 12):
        found.append(resumed.param_groups[0]["lr"])
        resumed.step()
        continued.step()
    assert found == expected[stop:]


def test_several_parameter_groups_keep_their_ratio() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [parameters[0]], "lr": 1e-2}, {"params": [parameters[1]], "lr": 1e-3}])
    scheduler = schedule.linear(optimizer, steps=4)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.75e-2, 0.75e-3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "cosin"}, ["'cosin'", "constant, linear, cosine", "did you mean 'cosine'?"]),
        ({"name": "linear", "steps": 0}, ["linear needs the number of steps", "found 0"]),
        ({"name": "cosine"}, ["cosine needs the number of steps", "found None"]),
        ({"name": "cosine", "steps": 10, "warmup": 11}, ["warm-up of 11 steps", "none of 10", "cosine"]),
        ({"name": "linear", "steps": 10, "warmup": 10}, ["warm-up of 10 steps", "none of 10"]),
        ({"name": "constant", "warmup": -1}, ["warmup = -1", "0 or more"]),
        ({"name": "linear", "steps": 10, "floor": 1.5}, ["floor = 1.5", "0 to 1"]),
    ],
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        schedule.schedule(optimizer=adamw(), **options)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)
