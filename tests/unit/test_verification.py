"""What verify_every takes for a fault of the hardware: what is wrong once, and nothing that a program does itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from jobkit.errors import UsageError
from jobkit.train.tracked_generator import TrackedGenerator
from jobkit.train.verification import computes_alike

X = torch.linspace(-1, 1, 32).reshape(8, 4)


class Model(nn.Module):
    """One that keeps a moving average of what it has computed, in a buffer or a parameter."""

    average: torch.Tensor

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.linear, self.kept, self.calls = nn.Linear(4, 4), kept, 0
        self.register_buffer("average", torch.zeros(4))
        self.code = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.calls += 1
        new = y.detach().mean(0)
        if self.kept == "another tensor":
            self.average = 0.9 * self.average + 0.1 * new
        elif self.kept == "in place":
            self.average.lerp_(new, 0.1)
        elif self.kept == "parameter":
            with torch.no_grad():
                self.code.lerp_(new, 0.1)
        elif self.kept == "counter":
            y = y * self.calls
        elif self.kept == "wrong once" and self.calls == 2:
            y = y * 1.001
        return y - self.average - self.code


def is_alike(kept: str) -> bool:
    model = Model(kept)
    buffer = model.average
    found = computes_alike(model, lambda: _backward(model, X), [torch.device("cpu")])
    assert model.average is buffer and not buffer.any()
    assert model.linear.weight.grad is None
    return found


def _backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def test_what_a_program_keeps_is_put_back_and_what_is_wrong_once_is_found() -> None:
    assert is_alike("another tensor")
    assert is_alike("in place")
    assert not is_alike("wrong once")


def test_the_bits_of_a_conjugated_gradient_are_compared() -> None:
    weight = nn.Parameter(torch.tensor([1 + 2j]))
    model = nn.ParameterList([weight])
    calls = []

    def compute() -> torch.Tensor:
        calls.append(0)
        loss = (weight.conj() * (1.001 if len(calls) == wrong else 1)).abs().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None and weight.grad.is_conj(), "a view, of which torch has no bytes"
        return loss

    for wrong in (0, 2):
        calls.clear()
        assert computes_alike(model, compute, [torch.device("cpu")]) == (wrong == 0)


@pytest.mark.parametrize(
    ("kept", "told"),
    [("counter", "others each time"), ("parameter", "the forward changes the parameter code: make it a buffer")],
)
def test_what_cannot_be_put_back_is_no_fault_of_the_hardware(kept: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"verify_every: .*{told}"):
        is_alike(kept)


def test_generators_that_are_tracked_go_on_as_if_nothing_had_been_drawn() -> None:
    model, own = Model(""), torch.Generator().manual_seed(1)
    before = own.get_state()

    def compute() -> torch.Tensor:
        return _backward(model, X + torch.rand(X.shape, generator=own))

    assert computes_alike(model, compute, [torch.device("cpu")], [TrackedGenerator(own)])
    assert torch.equal(own.get_state(), before)
    with pytest.raises(UsageError, match=r"a generator that ctx\.track was not given"):
        computes_alike(model, compute, [torch.device("cpu")])
