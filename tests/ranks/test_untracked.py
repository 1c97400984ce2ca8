"""An optimizer whose state no checkpoint would hold is refused by name; one whose state is saved somehow is not."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import attempt
from torch import nn

from jobkit.worker import fingerprint

Make = Callable[[Any, nn.Module], Iterator[Callable[[], object]]]
"""Tracks what it likes, then gives what each step does."""

REFUSED = "UsageError: the SGD that trains the tracked model is not tracked"


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Wrapper:
    """What has optimizers and saves their states in a way of its own."""

    def __init__(
        self, optimizers: list[torch.optim.Optimizer], saved: Callable[[Any], Any] = lambda state: state
    ) -> None:
        self.optimizers, self.saved = optimizers, saved

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [self.saved(one.state_dict()) for one in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing is restored here")


def train(ctx: Any, make: Make) -> str:
    model = ctx.parallelize(nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 1)))
    steps = make(ctx, model)
    next(steps)
    for _ in ctx.steps(6):
        model(torch.ones(1, 3)).sum().backward()
        next(steps)
        model.zero_grad()
    return "ok"


# Forgotten


def of_the_whole_model(ctx: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = momentum(model.parameters())
    ctx.track(model=model)
    while True:
        yield
        optimizer.step()


def that_begins_later(ctx: Any, model: Any) -> Iterator[Any]:
    optimizer, other = momentum(model[0].parameters()), momentum(model[1].parameters())
    ctx.track(model=model, optimizer=optimizer)
    while True:
        yield
        optimizer.step()
        if ctx.step >= 2:
            other.step()


def that_steps_now_and_then(ctx: Any, model: Any) -> Iterator[Any]:
    optimizer, other = momentum(model[0].parameters()), momentum(model[1].parameters())
    ctx.track(model=model, optimizer=optimizer)
    while True:
        yield
        optimizer.step()
        if ctx.step % 3 == 1:
            other.step()


def whose_scheduler_is_tracked(ctx: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = momentum(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ctx.track(model=model, scheduler=scheduler)
    while True:
        yield
        optimizer.step()
        scheduler.step()


def beside_quantized_weights(ctx: Any, model: nn.Module) -> Iterator[Any]:
    base = nn.Module()
    base.register_buffer("codes", torch.zeros(100_000, dtype=torch.uint8))
    optimizer = momentum(model.parameters())
    ctx.track(model=model, base=base)
    while True:
        yield
        optimizer.step()


FORGOTTEN = [
    of_the_whole_model,
    that_begins_later,
    that_steps_now_and_then,
    whose_scheduler_is_tracked,
    beside_quantized_weights,
]


@pytest.mark.parametrize("make", FORGOTTEN, ids=lambda make: make.__name__)
def test_a_forgotten_optimizer_is_refused_by_name(tmp_path: Path, make: Make) -> None:
    assert REFUSED in attempt(1, tmp_path, train, make)[0]


# Saved, or nothing to save


def without_state(ctx: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model)
    while True:
        yield
        optimizer.step()


def of_what_is_not_tracked(ctx: Any, model: nn.Module) -> Iterator[Any]:
    probe = nn.Linear(2, 1)
    optimizer, other = momentum(model.parameters()), momentum(probe.parameters())
    ctx.track(model=model, optimizer=optimizer)
    while True:
        yield
        probe(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        other.step()


def one_for_each_of_very_many(ctx: Any, model: nn.Module) -> Iterator[Any]:
    many = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(1100)])
    optimizers = [momentum([one]) for one in [*many, *model.parameters()]]
    ctx.track(model=model, many=many, optimizers=Wrapper(optimizers))
    while True:
        yield
        sum(many).backward()
        for optimizer in optimizers:
            optimizer.step()


class WithOptimizers(nn.Module):
    """A module whose extra state has those of the optimizers in it."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], saved: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.optimizers, self.saved = optimizers, saved

    def get_extra_state(self) -> Any:
        return [self.saved(one.state_dict()) for one in self.optimizers]


def in_a_modules_extra_state(ctx: Any, model: nn.Module) -> Iterator[Any]:
    holder = WithOptimizers([momentum(model.parameters())], lambda state: state)
    ctx.track(model=model, holder=holder)
    while True:
        yield
        holder.optimizers[0].step()


def in_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def in_a_modules_bytes(ctx: Any, model: nn.Module) -> Iterator[Any]:
    holder = WithOptimizers([momentum(model.parameters())], in_bytes)
    ctx.track(model=model, holder=holder)
    while True:
        yield
        holder.optimizers[0].step()


def copied(ctx: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = momentum(model.parameters())
    ctx.track(model=model, wrapper=Wrapper([optimizer], copy.deepcopy))
    while True:
        yield
        optimizer.step()


def as_arrays(state: Any) -> Any:
    return {key: one["momentum_buffer"].numpy().copy() for key, one in state["state"].items()}


def copied_to_arrays(ctx: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = momentum(model.parameters())
    ctx.track(model=model, wrapper=Wrapper([optimizer], as_arrays))
    while True:
        yield
        optimizer.step()


def per_rank(ctx: Any, model: nn.Module) -> Iterator[Any]:
    optimizer = momentum(model.parameters())
    ctx.track(model=model, per_rank={"wrapper": Wrapper([optimizer])})
    while True:
        yield
        optimizer.step()


def made_anew_in_each_step(ctx: Any, model: nn.Module) -> Iterator[Any]:
    """As in Reptile and in adaptation at test time."""
    ctx.track(model=model)
    kept = []
    while True:
        yield
        optimizer = momentum(model.parameters())
        kept.append(optimizer)
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()


def lbfgs_made_anew(ctx: Any, model: nn.Module) -> Iterator[Any]:
    ctx.track(model=model)

    def loss() -> torch.Tensor:
        model.zero_grad()
        found = model(torch.ones(1, 3)).square().sum()
        found.backward()
        return found  # type: ignore[no-any-return]

    while True:
        yield
        torch.optim.LBFGS(model.parameters(), max_iter=3).step(loss)


SAVED = [
    without_state,
    of_what_is_not_tracked,
    one_for_each_of_very_many,
    in_a_modules_extra_state,
    in_a_modules_bytes,
    copied,
    copied_to_arrays,
    per_rank,
    made_anew_in_each_step,
    lbfgs_made_anew,
]


@pytest.mark.parametrize("make", SAVED, ids=lambda make: make.__name__)
def test_an_optimizer_whose_state_is_saved_or_is_of_one_step_is_not_refused(tmp_path: Path, make: Make) -> None:
    found = attempt(1, tmp_path, train, make)
    assert found == ["ok"]


def under_another_framework(ctx: Any) -> str:
    model = nn.Linear(3, 1)
    optimizer = momentum(model.parameters())
    ctx.track(model=model)
    for step in range(5):
        ctx.boundary(step, lambda folder: torch.save(optimizer.state_dict(), folder / "optimizer.pt"))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return "ok"


def test_what_another_framework_saves_by_itself_is_not_refused(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, under_another_framework) == ["ok"]


# What it costs


class Asked(Wrapper):
    """How often its state is asked for."""

    times = 0

    def state_dict(self) -> dict[str, Any]:
        self.times += 1
        return super().state_dict()


def asking(ctx: Any, is_tracked: bool) -> list[int]:
    # Fingerprints ask, too: in each step, and not only where they have been cheap, as they are on an idle machine.
    fingerprint._FREE_SECONDS = math.inf  # in the process of this attempt
    model = ctx.parallelize(nn.Linear(3, 1))
    optimizer = momentum(model.parameters())
    asked = Asked([optimizer])
    ctx.track(model=model, asked=asked, **({"optimizer": optimizer} if is_tracked else {}))
    found = []
    for _ in ctx.steps(8):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        found.append(asked.times)
    return found


def test_states_are_asked_for_once_and_only_for_an_optimizer_that_is_not_tracked_itself(tmp_path: Path) -> None:
    without_saves = "checkpoint: {every: 1000, memory: off}"
    found = [attempt(1, tmp_path / str(is_), asking, is_, config=without_saves)[0] for is_ in (False, True)]
    assert [one - other for one, other in zip(*found, strict=True)] == [0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("parallel", ["zero1", "zero3"])
def test_an_optimizer_that_is_shared_out_is_known(tmp_path: Path, parallel: str) -> None:
    found = attempt(2, tmp_path, shared_out, config=f"parallel: {{data: {parallel}}}")
    assert found == ["ok", "ok"]


def shared_out(ctx: Any) -> str:
    model = ctx.parallelize(nn.Linear(3, 2))
    optimizer = ctx.optimizer(model, torch.optim.AdamW, lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(4):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return "ok"
