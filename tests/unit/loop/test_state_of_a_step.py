"""What a training step is made of beside the ranks: schedules, fp16's scale, gradients that are state."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jobkit import schedule
from jobkit.errors import InputError
from jobkit.loop.tracked import PendingGradients
from jobkit.parallel.gradients import LossScaler

SCHEDULES: list[tuple[str, dict[str, Any], dict[int, float]]] = [
    ("constant", {}, {0: 1.0, 100: 1.0}),
    ("constant", {"warmup": 4}, {0: 0.25, 3: 1.0, 9: 1.0}),
    ("linear", {"steps": 10}, {0: 1.0, 5: 0.5, 10: 0.0, 20: 0.0}),
    ("linear", {"steps": 12, "warmup": 2, "floor": 0.5}, {0: 0.5, 1: 1.0, 7: 0.75, 12: 0.5}),
]


@pytest.mark.parametrize(("name", "options", "expected"), SCHEDULES)
def test_the_rate_at_a_step(name: str, options: dict[str, Any], expected: dict[int, float]) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=3.0)
    scheduler = schedule.schedule(name, optimizer, **options)
    rates = []
    for _ in range(max(expected) + 1):
        rates.append(optimizer.param_groups[0]["lr"] / 3.0)
        optimizer.step()
        scheduler.step()
    assert {step: rates[step] for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [("cosin", {}), ("linear", {}), ("cosine", {"steps": 5, "warmup": 5}), ("constant", {"warmup": -1})],
)
def test_a_schedule_that_cannot_be_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        schedule.schedule(name, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), **options)


def test_the_scale_of_fp16_halves_at_an_overflow_and_doubles_after_quiet() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3)
    assert [scaler.accepts(torch.tensor(norm)) for norm in (1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0)] == [
        *(True, False, True, True, True, False, True)
    ]
    assert scaler.scale == 4.0  # 8, 4, doubled after three good steps, halved; one good step since
    other = LossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert scaler.begin(lambda: True) == 1.0  # gradients that are there have the factor from before
    assert scaler.begin(lambda: False) == 4.0


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_a_sparse_gradient_comes_back_as_it_was(is_coalesced: bool) -> None:
    model = nn.Embedding(3, 2, sparse=True)
    tracked: Any = SimpleNamespace(
        optimizers=[torch.optim.SGD(model.parameters())], stepped={}, on_step=None, has_begun=True
    )
    model(torch.tensor([2, 0, 2])).square().sum().backward()
    before = model.weight.grad
    assert before is not None
    if is_coalesced:
        before = model.weight.grad = before.coalesce()
    gradients = PendingGradients(tracked)
    state = gradients.state_dict()
    model.weight.grad = None
    gradients.load_state_dict(state)
    after = model.weight.grad
    assert after is not None and after.is_coalesced() == is_coalesced and after.shape == before.shape
    assert torch.equal(after._indices(), before._indices()) and torch.equal(after._values(), before._values())


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_are_state_exactly_where_a_backward_followed_the_last_step(count: int, to_none: bool) -> None:
    models = [nn.Linear(2, 2) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    tracked: Any = SimpleNamespace(optimizers=optimizers, stepped={}, on_step=None, has_begun=True)
    gradients = PendingGradients(tracked)

    def backward() -> None:
        torch.stack([model(torch.ones(1, 2)).sum() for model in models]).sum().backward()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            tracked.stepped[id(optimizer)] = optimizer
            tracked.on_step(optimizer)

    def added() -> int:
        return len(gradients.state_dict()["added"])

    backward()
    assert added() == 2 * count
    step()
    assert added() == 0
    optimizers[0].zero_grad(to_none)
    optimizers[-1].zero_grad(to_none)
    backward()  # in the same step of the loop: it began with the optimizer
    assert added() == 2 * count
    tracked.stepped.clear()
    assert added() == 2 * count
    step()
    assert added() == 0
