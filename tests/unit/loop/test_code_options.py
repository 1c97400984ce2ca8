"""Options that the code gives otherwise than the other run's code did hold; schedules go on as if made with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from jobkit.loop.code_options import CodeOptions, merged
from jobkit.schedule import cosine


@pytest.mark.parametrize(
    ("saved", "then", "now", "goes_on"),
    [
        (0.15, 0.3, 0.3, 0.15),
        (0.3, 0.3, 0.01, 0.01),
        (0.15, 0.3, 0.01, 0.005),
        (0.1, 0, 0.2, 0.2),
        (True, False, True, True),
        ((0.9, 0.99), [0.9, 0.99], [0.9, 0.999], (0.9, 0.999)),
        ([1, 2], [1, 2], [1, 2, 3], [1, 2, 3]),
        ({"a": 1, "b": object}, {"a": 1}, {"a": 2}, {"a": 2, "b": object}),
        (None, None, 5, 5),
    ],
)
def test_what_is_given_otherwise_holds(saved: Any, then: Any, now: Any, goes_on: Any) -> None:
    value = merged(saved, then, now)
    assert value == pytest.approx(goes_on) if isinstance(goes_on, float) else value == goes_on
    assert type(value) is type(goes_on)


Make = Callable[[torch.optim.Optimizer], LRScheduler]


def trained(
    lr: float, make: Make, steps: int, **options: Any
) -> tuple[torch.optim.Optimizer, LRScheduler, CodeOptions]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr, **options)
    schedule = make(optimizer)
    code = CodeOptions()
    code.note("optimizer", optimizer)
    code.note("schedule", schedule)
    for _ in range(steps):
        optimizer.step()
        schedule.step()
    return optimizer, schedule, code


def warmed(warmup: int, steps: int) -> Make:
    """Return torch's own warm-up and cosine: two schedules, one after the other."""
    return lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=warmup), lr_scheduler.CosineAnnealingLR(o, steps)], [warmup]
    )


SCHEDULES: dict[str, tuple[Make, Make]] = {
    "step": (lambda o: lr_scheduler.StepLR(o, 3, 0.5),) * 2,
    "gamma": (lambda o: lr_scheduler.StepLR(o, 3, 0.5), lambda o: lr_scheduler.StepLR(o, 3, 0.9)),
    "milestones": (lambda o: lr_scheduler.MultiStepLR(o, [3, 9]), lambda o: lr_scheduler.MultiStepLR(o, [2, 4])),
    "warm-up from zero": (lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 7),) * 2,
    "more steps": (lambda o: cosine(o, steps=5), lambda o: cosine(o, steps=50, warmup=3)),
    "torch's cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 6), lambda o: lr_scheduler.CosineAnnealingLR(o, 40)),
    "sequence": (
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    )
    * 2,
    "sequence from its end": (warmed(2, 3), warmed(3, 40)),
    "sequence back in its warm-up": (warmed(2, 3), warmed(7, 40)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_as_if_it_had_been_made_with_the_new_rate(name: str) -> None:
    then, now = SCHEDULES[name]
    before, old, code_then = trained(0.3, then, 5)
    state, rates = old.state_dict(), [group["lr"] for group in before.param_groups]
    optimizer, schedule, code = trained(0.01, now, 0, weight_decay=0.5)
    options = {key: value for key, value in before.param_groups[0].items() if key != "params"}
    optimizer.param_groups[0].update(options)
    schedule.load_state_dict(state)
    code.is_start = True
    code.load_state_dict(code_then.state_dict())
    code.apply({"optimizer": optimizer, "schedule": schedule})

    expected, as_made, _ = trained(0.01, now, 5)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5
    for _ in range(4):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected.param_groups[0]["lr"])
        for pair in ((optimizer, schedule), (expected, as_made)):
            pair[0].step()
            pair[1].step()
    assert code.changes["optimizer.initial_lr"] == "0.3 -> 0.01"
    assert rates == [group["lr"] for group in before.param_groups]


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_a_change_no_bit_differs(name: str) -> None:
    make = SCHEDULES[name][0]
    before, old, code_then = trained(0.3, make, 5)
    optimizer, schedule, code = trained(0.3, make, 0)
    options = {key: value for key, value in before.param_groups[0].items() if key != "params"}
    optimizer.param_groups[0].update(options)
    schedule.load_state_dict(old.state_dict())
    code.is_start = True
    code.load_state_dict(code_then.state_dict())
    code.apply({"optimizer": optimizer, "schedule": schedule})
    assert code.changes == {}
    assert optimizer.param_groups[0]["lr"] == before.param_groups[0]["lr"]
    assert schedule.state_dict() == old.state_dict() or name in ("warm-up from zero", "more steps")


def test_a_schedule_that_is_made_after_the_restore_has_the_new_rate() -> None:
    code_then, code = CodeOptions(), CodeOptions()
    before = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)
    code_then.note("optimizer", before)
    old = lr_scheduler.ExponentialLR(before, 0.5)
    code_then.note("schedule", old)
    before.step()
    old.step()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    code.note("optimizer", optimizer)
    code.is_start = True
    code.load_state_dict(code_then.state_dict())
    optimizer.param_groups[0].update(lr=0.15, initial_lr=0.3)
    code.apply({"optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    code.note("schedule", schedule)
    optimizer.param_groups[0].update(lr=0.15, initial_lr=0.3)  # ctx.track reads everything once more
    schedule.load_state_dict(old.state_dict())
    code.apply({"optimizer": optimizer, "schedule": schedule})
    assert (optimizer.param_groups[0]["lr"], schedule.base_lrs) == (pytest.approx(0.05), [0.1])


def test_a_continued_run_keeps_what_its_first_attempt_gave() -> None:
    *_, first = trained(0.3, SCHEDULES["step"][0], 0)
    *_, again = trained(0.01, SCHEDULES["step"][0], 0)
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()


def test_an_option_that_a_checkpoint_replaces_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    optimizers = [torch.optim.SGD([torch.zeros(1)], lr=lr, foreach=lr > 0.1) for lr in (0.1, 0.2)]
    before, now = CodeOptions(), CodeOptions()
    before.note("optimizer", optimizers[0])
    now.note("optimizer", optimizers[1])
    for _ in range(2):
        now.load_state_dict(before.state_dict())
    assert [record.args for record in caplog.records] == [("optimizer", "lr", 0.1, 0.2)]
