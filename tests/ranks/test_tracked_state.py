"""What a checkpoint holds of the objects that a function tracks, and when none may be taken."""

from __future__ import annotations

import collections
import copy
import os
import random
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from torch.distributed.tensor import DTensor

from jobkit.train.optim import fused_ema_adam

EVERY_5 = "checkpoint: {every: 5}"


class Position:
    """A data loader of a user's own, reduced to what is saved of it."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offset = state["offset"]


def with_positions(ctx: Any, stop: bool) -> list[int]:
    position = Position(1000 * ctx.rank)
    ctx.track(per_rank={"position": position})
    seen = []
    for _ in ctx.steps(6):
        seen.append(position.offset)
        position.offset += 1
        if stop:
            stop_after(ctx, 2)
    return seen


def test_what_differs_by_rank_is_restored_on_the_rank_it_belongs_to(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, with_positions, True) == [STOPPED, STOPPED]
    fewer = attempt(1, tmp_path, with_positions, False)
    assert "was written by 2 rank(s), and 1 are here: position has a state of its own" in fewer[0]
    assert attempt(2, tmp_path, with_positions, False) == [[3, 4, 5], [1003, 1004, 1005]]


def with_positions_as_if_equal(ctx: Any) -> None:
    ctx.track(position=Position(8 + 1000 * ctx.rank))
    for _ in ctx.steps(6):
        pass


def with_another_rate(ctx: Any, difference: float) -> None:
    """As with ReduceLROnPlateau.step(a loss that each rank has for itself)."""
    model = ctx.parallelize(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(6):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if step == 3:
            optimizer.param_groups[0]["lr"] *= 1 + ctx.rank * difference


def test_ranks_that_differ_where_a_checkpoint_keeps_one_value_are_an_error(tmp_path: Path) -> None:
    both = attempt(2, tmp_path / "1", with_positions_as_if_equal)
    assert both[0] == both[1]
    assert "position: offset is 8 on rank 0 and 1008 on rank 1; if each rank is to have its own" in both[0]
    both = attempt(2, tmp_path / "2", with_another_rate, 0.5, config=EVERY_5)
    assert both[0] == both[1]
    assert "optimizer: param_groups.0.lr is 0.1 on rank 0 and 0.15000000000000002 on rank 1; it should" in both[0]
    assert attempt(2, tmp_path / "3", with_another_rate, 1e-5, config=EVERY_5) == [None, None]


def swapped_by_hand(model: Any, average: Any, **_: Any) -> None:
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), average.parameters(), strict=True):
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)


def swapped_through_data(model: Any, average: Any, **_: Any) -> None:
    for parameter, other in zip(model.parameters(), average.parameters(), strict=True):
        kept = parameter.data.clone()
        parameter.data.copy_(other.data)
        other.data.copy_(kept)


def pointed_elsewhere(model: Any, average: Any, **_: Any) -> None:
    for parameter, other in zip(model.parameters(), average.parameters(), strict=True):
        parameter.data, other.data = other.data, parameter.data


def with_a_scheduler_stepped(scheduler: Any, **_: Any) -> None:
    scheduler.step(1.0)


def with_a_number_of_numpy(**_: Any) -> None:
    np.random.rand()


def with_the_second_of_two_numbers(scheduler: Any, **_: Any) -> None:
    """It was drawn with the first, so that the generator itself does not change."""
    np.random.randn()


def with_a_number_of_python(**_: Any) -> None:
    random.random()


def with_the_second_of_two_numbers_of_python(**_: Any) -> None:
    random.gauss(0.0, 1.0)


def with_a_gradient(model: Any, **_: Any) -> None:
    model(torch.ones(1, 3)).sum().backward()


def with_another_state_of_ones_own(position: Any, **_: Any) -> None:
    position.offset += 1


def with_nothing_changed(model: Any, **_: Any) -> None:
    model(torch.ones(1, 3))


SWAPS = [swapped_by_hand, swapped_through_data, pointed_elsewhere]
CHANGES = [
    *SWAPS,
    with_a_scheduler_stepped,
    with_a_number_of_numpy,
    with_the_second_of_two_numbers,
    with_a_number_of_python,
    with_the_second_of_two_numbers_of_python,
    with_a_gradient,
    with_another_state_of_ones_own,
]


def evaluating_in_between(ctx: Any, change: Callable[..., None], stop: bool) -> tuple[Any, ...]:
    """Each step: something changes, an evaluation, which is told to stop in step 1, and an update."""
    model = ctx.parallelize(torch.nn.Linear(3, 3))
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    position = Position(0)
    objects = {"model": model, "average": average, "scheduler": scheduler, "position": position}
    ctx.track(optimizer=optimizer, **objects)
    held_out = torch.utils.data.TensorDataset(torch.ones(6, 3))

    def error(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        if stop and ctx.step == 1 and ids[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return model(batch[0]).sum(1)

    found = []
    for step in ctx.steps(4):
        change(**objects)
        found.append((step, ctx.evaluate(error, held_out, batch_size=2)))
        if change in SWAPS:
            change(**objects)  # and back
        optimizer.zero_grad()
        noise = random.random() + np.random.rand()
        (model(torch.ones(1, 3)) - noise).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), average.parameters(), strict=True):
                other.lerp_(parameter, 0.5)
        ctx._loop._timer.agree_at = 0
    weights = [parameter.tolist() for parameter in [*model.parameters(), *average.parameters()]]
    return weights, found, scheduler.state_dict(), position.offset


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_stop_in_an_evaluation_never_saves_what_a_step_has_half_changed(tmp_path: Path, change: Any) -> None:
    (whole,) = attempt(1, tmp_path / "whole", evaluating_in_between, change, False)
    assert attempt(1, tmp_path, evaluating_in_between, change, True) == [STOPPED]
    (resumed,) = attempt(1, tmp_path, evaluating_in_between, change, False)
    assert resumed[1] == whole[1][2:], "the step was not finished first"
    assert (resumed[0], resumed[2:]) == (whole[0], whole[2:])


def evaluating_averages(ctx: Any, stop: bool) -> list[int]:
    model = ctx.parallelize(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
    optimizer = ctx.optimizer(model, fused_ema_adam)
    ctx.track(model=model, optimizer=optimizer)
    held_out = torch.utils.data.TensorDataset(torch.ones(200, 3))  # more than one rank does at once

    def error(batch: Any, ids: torch.Tensor) -> torch.Tensor:
        if stop and ctx.step == 2 and ids[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return model(batch[0]).sum(1)

    done = []
    for step in ctx.steps(4):
        model.eval()
        with ctx.averaged(optimizer):
            ctx.evaluate(error, held_out, batch_size=2)
        ctx.evaluate(error, held_out, batch_size=2)
        model.train()
        done.append(step)
        model(torch.randn(4, 3)).square().sum().backward()
        ctx.update(optimizer)
    return done


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_of_averages_or_of_what_nothing_changed_is_stopped_at_once(tmp_path: Path, ranks: int) -> None:
    assert attempt(ranks, tmp_path, evaluating_averages, True) == [STOPPED] * ranks
    assert attempt(ranks, tmp_path, evaluating_averages, False) == [[2, 3]] * ranks


def stepping_every_fourth(ctx: Any, how: str, stop: bool) -> list[Any]:
    """Gradients of four steps of the loop make one of the optimizer; ranks add theirs up at the last or at each."""
    model = ctx.parallelize(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(10):
        last = step % 4 == 3
        samples = torch.arange(12.0).view(4, 3) * (step + 1 + ctx.rank) / 100
        with nullcontext() if last or how != "no_sync" or ctx.world_size == 1 else model.no_sync():
            model(samples).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=how != "zeros")
        if stop:
            stop_after(ctx, 5)
    return [getattr(one, "full_tensor", lambda one=one: one)().tolist() for one in model.parameters()]


@pytest.mark.parametrize(
    ("ranks", "how", "strategy"),
    [(1, "", "ddp"), (1, "zeros", "ddp"), (2, "each", "ddp"), (2, "no_sync", "ddp"), (2, "each", "zero3")],
)
def test_gradients_that_the_next_step_adds_to_are_in_the_checkpoint(
    tmp_path: Path, ranks: int, how: str, strategy: str
) -> None:
    config = f"parallel: {strategy}\nresources: {{tasks_per_node: {ranks}}}"
    whole = attempt(ranks, tmp_path / "whole", stepping_every_fourth, how, False, config=config)
    assert attempt(ranks, tmp_path, stepping_every_fourth, how, True, config=config) == [STOPPED] * ranks
    assert attempt(ranks, tmp_path, stepping_every_fourth, how, False, config=config) == whole


def stepping_each_time(ctx: Any, zero: str) -> list[bool]:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    found = []
    for _ in ctx.steps(5):
        if zero == "before":
            optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad()
        shared, _, _ = ctx._tracked.trees()
        found.append("model#gradients" in shared)
    return found


def test_gradients_that_an_optimizer_has_used_are_not_in_the_checkpoint(tmp_path: Path) -> None:
    assert attempt(1, tmp_path / "1", stepping_each_time, "after") == [[False] * 5]
    # After the first step nobody knows yet that the next one does not add to them.
    assert attempt(1, tmp_path / "2", stepping_each_time, "before") == [[True, False, False, False, False]]
    assert attempt(1, tmp_path / "3", stepping_each_time, "never") == [[True] * 5]


class Registry:
    """State of a kind that equal processes write down in different ways."""

    def __init__(self, rank: int) -> None:
        words = ["one", "two", "three"]
        self.state: dict[str, Any] = {
            "words": {"".join(list(word)) for word in words},
            "table": dict(reversed([(word, 1) for word in words]) if rank else [(word, 1) for word in words]),
            "last": collections.deque([torch.ones(3), torch.zeros(2)]),
            "rate": np.float64(0.1 + rank * 1e-12),
            "mask": torch.tensor([-torch.inf, 1.0 + rank * 1e-7]),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def with_a_registry(ctx: Any) -> None:
    ctx.track(registry=Registry(ctx.rank))
    for _ in ctx.steps(3):
        pass


def test_equal_state_is_found_equal_however_a_process_writes_it_down(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, with_a_registry) == [None, None]


def with_strides(ctx: Any) -> list[float]:
    """Every third element of a table, and one alone: no two neighbours in memory, or one that has none."""
    table = torch.arange(12.0).view(4, 3)
    net, values = torch.nn.Linear(1, 1), Registry(0)
    net.bias = torch.nn.Parameter(torch.zeros(2)[::2])
    values.state = {"rates": table[:, 0], "last": table[3:, 0], "alike": torch.ones(1).expand(4)}
    ctx.track(net=ctx.parallelize(net), values=values)
    for _ in ctx.steps(4):
        with torch.no_grad():
            net.bias += 1
        if ctx.attempt == 1:
            stop_after(ctx, 1)
    bias = net.bias.full_tensor() if isinstance(net.bias, DTensor) else net.bias
    return torch.cat([*values.state.values(), bias.detach()]).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_may_lie_in_memory_at_any_distances(tmp_path: Path, ranks: int) -> None:
    config = "parallel: {data: zero3}" if ranks > 1 else ""
    assert attempt(ranks, tmp_path, with_strides, config=config) == [STOPPED] * ranks
    for found in attempt(ranks, tmp_path, with_strides, config=config):
        assert found == [0, 3, 6, 9, 9, 1, 1, 1, 1, 4]


class Phase(torch.nn.Module):
    """A complex parameter, the gradient of which is a view of its conjugate, and a buffer without elements that begins
    every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.register_buffer("none", torch.zeros(5)[::2][:0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.conj() * x).abs()


def with_conjugates(ctx: Any, stops: bool) -> list[complex]:
    """Gradients that no optimizer step sets back, and a state that is a view of another tensor's conjugate."""
    os.environ["JOBKIT_CODE"] = "/code/one"  # a map after the loop is kept then, of these weights, bit for bit
    model, values = ctx.parallelize(Phase()), Registry(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = torch.tensor([1 + 2j, 3 + 4j])
    values.state = {"conjugate": first.conj(), "negative": first.conj().imag}
    ctx.track(model=model, optimizer=optimizer, values=values)
    for _ in ctx.steps(4):
        model(torch.tensor([1j, 2])).sum().backward()
        optimizer.step()
        if stops and ctx.attempt == 1:
            stop_after(ctx, 1)
    assert values.state["conjugate"].tolist() == [1 - 2j, 3 - 4j] and values.state["negative"].tolist() == [-2, -4]
    weight = next(iter(model.parameters())).detach()
    return ctx.map(lambda numbers, ids: weight[ids], 2, batch_size=1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_conjugate_that_is_a_view_is_kept_and_compared_by_its_values(tmp_path: Path, ranks: int) -> None:
    uninterrupted = attempt(ranks, tmp_path / "whole", with_conjugates, False)
    assert attempt(ranks, tmp_path / "stopped", with_conjugates, True) == [STOPPED] * ranks
    assert attempt(ranks, tmp_path / "stopped", with_conjugates, True) == uninterrupted


def what_cannot_be_saved(ctx: Any) -> None:
    registry = Registry(0)
    registry.state["rule"] = lambda: 1
    ctx.track(rule=registry)
    for _ in ctx.steps(3):
        pass


def two_of_one_name(ctx: Any) -> None:
    for _ in range(2):
        ctx.track(position=Position(1))


def test_what_no_checkpoint_could_hold_is_refused_at_once(tmp_path: Path) -> None:
    (refused,) = attempt(1, tmp_path / "1", what_cannot_be_saved)
    assert "rule: its state_dict holds what cannot be saved" in refused
    (refused,) = attempt(1, tmp_path / "2", two_of_one_name)
    assert "ctx.track(position=...): another object has that name" in refused


class Counted(torch.nn.Module):
    """A layer that reads a buffer which each rank has for itself, as statistics of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.mean()
        return self.layer(x) * (1 + self.seen.detach())


def with_buffers_of_its_own(ctx: Any, stop: bool, evaluate: bool = False) -> list[Any]:
    model = ctx.parallelize(Counted())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(8):
        if evaluate:
            ctx.evaluate(lambda batch, ids: ids * model.seen, range(4), batch_size=1)
        model(torch.ones(2, 3) * (ctx.rank + step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop:
            stop_after(ctx, 4)
    return [float(model.seen), *(one.full_tensor().tolist() for one in model.parameters())]


def test_checkpoints_and_evaluations_change_no_ranks_own_buffers(tmp_path: Path) -> None:
    config = "parallel: zero3\nresources: {tasks_per_node: 2}\ncheckpoint: {every: "
    whole = attempt(2, tmp_path / "rare", with_buffers_of_its_own, False, config=config + "1000}")
    assert whole[0][0] == sum(range(1, 9)) and whole[1][0] == sum(range(2, 10))
    assert attempt(2, tmp_path / "often", with_buffers_of_its_own, False, config=config + "2}") == whole
    assert attempt(2, tmp_path / "and", with_buffers_of_its_own, False, True, config=config + "1000}") == whole
    assert attempt(2, tmp_path, with_buffers_of_its_own, True, config=config + "1000}") == [STOPPED, STOPPED]
    assert attempt(2, tmp_path, with_buffers_of_its_own, False, config=config + "1000}") == whole


def changed_after_track(ctx: Any, how: str, steps: int = 40) -> None:
    model = ctx.parallelize(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(9, 3)), global_batch_size=3)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    if how == "schedule":
        torch.optim.lr_scheduler.LinearLR(optimizer)
    if how == "batch":
        next(loader)
    if how == "weights":
        torch.nn.init.ones_(model.weight)
    if how == "rate":  # which may be set anew in each attempt
        optimizer.param_groups[0]["lr"] = 0.2
    for _ in ctx.steps(steps):
        if how == "":
            stop_after(ctx, 3)


def test_what_each_resume_would_change_again_is_refused(tmp_path: Path) -> None:
    def told(how: str) -> str:
        return str(attempt(1, tmp_path, changed_after_track, how)[0])

    assert "a learning-rate schedule of optimizer was made after ctx.track" in told("schedule")
    assert "loader: a batch was drawn between ctx.track and the first step" in told("batch")
    assert told("") == STOPPED
    assert "model: weight was changed after ctx.track had restored it" in told("weights")
    assert told("rate") == "None"


class Slow(torch.optim.SGD):
    """What keeps a state of its own: by another key, and by another layout of its state_dict."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["updates"] = self.state.get("updates", 0) + 1


class Lookahead(Slow):
    def state_dict(self) -> dict[str, Any]:
        return {"slow": super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["slow"])


def with_state_of_its_own(ctx: Any, kind: type[torch.optim.Optimizer], stop: bool) -> Any:
    model = ctx.parallelize(torch.nn.Linear(3, 1))
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(8):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop:
            stop_after(ctx, 3)
    return optimizer.state["updates"], model.weight.tolist()


@pytest.mark.parametrize("kind", [Slow, Lookahead])
def test_an_optimizer_may_keep_state_in_its_own_way(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    whole = attempt(1, tmp_path / "whole", with_state_of_its_own, kind, False)
    assert whole[0][0] == 8
    assert attempt(1, tmp_path, with_state_of_its_own, kind, True) == [STOPPED]
    assert attempt(1, tmp_path, with_state_of_its_own, kind, False) == whole


class Masters(torch.optim.SGD):
    """SGD of bfloat16 parameters with copies in float32, which take the steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("master", parameter.float())
            state["master"] -= 1e-3 * parameter.grad.float()
            parameter.copy_(state["master"])


def with_masters(ctx: Any, stop: bool) -> list[float]:
    model = ctx.parallelize(torch.nn.Linear(3, 1).bfloat16())
    optimizer = Masters(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(30):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop:
            stop_after(ctx, 3)
    return [float(one) for one in optimizer.state[model.weight]["master"].flatten()]


def with_another_group(ctx: Any, stop: bool) -> None:
    model = ctx.parallelize(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(30):
        if step == 2:
            optimizer.add_param_group({"params": list(model[1].parameters())})
        if stop:
            stop_after(ctx, 3)


def test_an_optimizers_state_keeps_its_types_and_loses_no_parameter(tmp_path: Path) -> None:
    (whole,) = attempt(1, tmp_path / "whole", with_masters, False)
    assert attempt(1, tmp_path / "1", with_masters, True) == [STOPPED]
    assert attempt(1, tmp_path / "1", with_masters, False) == [whole]
    assert attempt(1, tmp_path / "2", with_another_group, True) == [STOPPED]
    (refused,) = attempt(1, tmp_path / "2", with_another_group, False)
    assert "it has '1.weight', which no group of this one has: add_param_group before ctx.track" in refused


def with_parameters_beside(ctx: Any, stop: bool) -> list[Any]:
    """A head that has grown since ctx.parallelize, and a parameter that is in no module that was spread."""
    model: Any = ctx.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)))
    if ctx.world_size == 1:
        model[1] = torch.nn.Linear(4, 3)
    temperature = torch.nn.ParameterList([torch.ones(1)])
    optimizer = torch.optim.Adam([*model.parameters(), *temperature.parameters()], lr=0.1)
    ctx.track(optimizer=optimizer, model=model, temperature=temperature)
    for _ in ctx.steps(6):
        (model(torch.ones(2, 4)) * temperature[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if stop:
            stop_after(ctx, 2)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in [*model.parameters(), *moments]]
    return [*(one.tolist() for one in whole), temperature[0].item()]


@pytest.mark.parametrize(("ranks", "config"), [(1, EVERY_5), (2, "parallel: {data: zero3}")], ids=["ddp", "zero3"])
def test_an_optimizer_may_have_parameters_of_several_tracked_modules(tmp_path: Path, ranks: int, config: str) -> None:
    uninterrupted = attempt(ranks, tmp_path / "whole", with_parameters_beside, False, config=config)
    assert attempt(ranks, tmp_path / "stopped", with_parameters_beside, True, config=config) == [STOPPED] * ranks
    assert attempt(ranks, tmp_path / "stopped", with_parameters_beside, False, config=config) == uninterrupted


HELD_OUT = torch.utils.data.TensorDataset(torch.arange(20.0))


def made_within_the_loop(ctx: Any) -> None:
    for _ in ctx.steps(1):
        ctx.loader(HELD_OUT, global_batch_size=4)


def made_after_a_break(ctx: Any, kind: str) -> int:
    for number in ctx.steps(4) if kind == "steps" else ctx.epochs(4):
        if number == 2:
            break
    loader = ctx.loader(HELD_OUT, global_batch_size=4)
    return len(next(loader)[0])


@pytest.mark.parametrize("kind", ["steps", "epochs"])
def test_a_loader_may_be_made_after_a_break_out_of_the_loop(tmp_path: Path, kind: str) -> None:
    assert attempt(1, tmp_path, made_after_a_break, kind) == [4]


def failing_in_a_step(ctx: Any) -> list[Any]:
    found = []
    try:
        for step in ctx.steps(4):
            if step == 2:
                raise KeyError
    except KeyError:
        found.append(ctx.ending.position()[0])
    return found


def test_an_exception_of_a_step_is_known_to_be_of_it(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, failing_in_a_step) == [[2]]


def test_a_loader_that_is_made_within_the_loop_is_refused(tmp_path: Path) -> None:
    assert "UsageError: ctx.loader comes before ctx.steps" in attempt(1, tmp_path, made_within_the_loop)[0]


def with_a_frozen_many(ctx: Any, stop: bool) -> list[float]:
    """An average of very many parameters, which is written to through `.data`."""
    average = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1), requires_grad=False) for _ in range(2100)])
    model = ctx.parallelize(torch.nn.Linear(2, 1))
    ctx.track(model=model, average=average)
    for _ in ctx.steps(4):
        for one in average:
            one.data.add_(1.0)
        if stop:
            stop_after(ctx, 1)
    return [float(one) for one in average]


def test_of_very_many_frozen_parameters_none_that_was_changed_is_left_out(tmp_path: Path) -> None:
    trainable = "checkpoint: {weights: trainable}"
    assert attempt(1, tmp_path, with_a_frozen_many, True, config=trainable) == [STOPPED]
    assert attempt(1, tmp_path, with_a_frozen_many, False, config=trainable) == [[4.0] * 2100]


def in_fp16_of_the_head(ctx: Any) -> list[float]:
    """Nobody sets the gradients of the other layer to None: they are no reason to keep a scale that overflows."""
    model: Any = ctx.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-6)
    ctx.track(model=model, optimizer=optimizer)
    norms = []
    for _ in ctx.steps(14):
        x = torch.full((2, 4), 100.0)
        ctx.backward(model, x, lambda output, _: (output * 10).mean(), x, global_batch_size=2)
        norms.append(float(ctx.update(optimizer)))
    return norms


def test_gradients_that_no_optimizer_uses_do_not_keep_the_loss_scale(tmp_path: Path) -> None:
    (norms,) = attempt(1, tmp_path, in_fp16_of_the_head, config="precision: fp16")
    assert not np.isfinite(norms[0]) and np.isfinite(norms[-1])
