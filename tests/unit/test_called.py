"""What a kept evaluation is known by: another text for another function, object or dataset."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobkit.worker.called import called

DATA = torch.utils.data.TensorDataset(torch.arange(8.0))


class Scorer:
    """A callable object."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    def __call__(self, batch: Any, ids: torch.Tensor) -> torch.Tensor:
        return batch[0] * self.scale

    def method(self, batch: Any, ids: torch.Tensor) -> torch.Tensor:
        return self(batch, ids)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, batch: Any, ids: torch.Tensor) -> torch.Tensor:
        return batch[0] * self.scale


class SlottedMore(Slotted):
    __slots__ = ("shift",)


@dataclass(frozen=True)
class Settings:
    scale: float
    names: tuple[str, ...] = ("a", "b")


class Listed(list[Any]):
    """A list with an attribute."""

    scale = 0.0


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("mean", torch.zeros(2))


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, root: str, labels: list[Any]) -> None:
        self.root, self.labels, self.lock, self.path = Path(root), labels, threading.Lock(), {Path(root)}

    def __len__(self) -> int:
        return len(self.labels)


def scored(settings: Any, batch: Any, ids: torch.Tensor) -> torch.Tensor:
    return batch[0] * settings


def closure(value: Any) -> Callable[..., Any]:
    def score(batch: Any, ids: torch.Tensor) -> Any:
        return batch[0] * value

    return score


def attribute(value: Any) -> Callable[..., Any]:
    score = closure(0)
    score.scale = value  # type: ignore[attr-defined]
    return score


def listed(scale: float) -> Listed:
    made = Listed([1, 2])
    made.scale = scale
    return made


def module(scale: float) -> Scaled:
    torch.manual_seed(0)
    return Scaled(scale)


def buffered(scale: float) -> nn.Module:
    made = nn.Sequential(Scaled(1.0))
    made[0].mean.fill_(scale)
    return made


def training(scale: float) -> nn.Module:
    return nn.Dropout(0.5).train(scale == 1.0)


def drawing(scale: float) -> np.random.Generator:
    return np.random.default_rng(int(scale))


def seeded(scale: float) -> torch.Generator:
    return torch.Generator().manual_seed(int(scale))


def optimizer(scale: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=scale)


def long(scale: float) -> list[Any]:
    return [0] * 3000 + [scale] + [0] * 3000


def unordered(scale: float) -> dict[Any, Any]:
    return {"names": {"ab", "cd", "ef", scale}, ("key", 1): scale, Path("x"): {Path("a"), Path("b")}}


HOLDING: dict[str, Callable[[float], Any]] = {
    "a callable object": Scorer,
    "a bound method": lambda scale: Scorer(scale).method,
    "an object's object": lambda scale: Scorer(Settings(scale)).method,
    "a partial's object": lambda scale: functools.partial(scored, Settings(scale)),
    "a partial's keyword": lambda scale: functools.partial(scored, settings=[Slotted(scale)]),
    "a partial of a method": lambda scale: functools.partial(Scorer(scale).method, extra=1),
    "slots": Slotted,
    "slots of a class above": SlottedMore,
    "a closure's object": lambda scale: closure(Settings(scale)),
    "a closure's function": lambda scale: closure(closure(closure(closure(closure(closure(closure(scale))))))),
    "a function's attribute": attribute,
    "a list's attribute": lambda scale: closure(listed(scale)),
    "a module's attribute": lambda scale: closure(nn.Sequential(module(scale))),
    "a module's buffer": lambda scale: closure(buffered(scale)),
    "a module's mode": lambda scale: closure(training(scale)),
    "a generator of NumPy": lambda scale: closure(drawing(scale)),
    "a generator of torch": lambda scale: closure(seeded(scale)),
    "an optimizer's options": lambda scale: closure(optimizer(scale)),
    "a long list of numbers": lambda scale: closure(long(scale)),
    "a deque": lambda scale: closure(collections.deque([scale])),
    "a set and a dict": lambda scale: closure(unordered(scale)),
    "an array of objects": lambda scale: closure(np.array([None, Settings(scale)])),
    "an array that is read only": lambda scale: closure(np.broadcast_to(np.array([scale]), 10)),
    "an array of texts": lambda scale: closure(np.array(["a", str(scale)])),
    "a sparse tensor": lambda scale: closure(torch.tensor([0.0, scale]).to_sparse()),
    "a nested tensor": lambda scale: closure(nested(scale, torch.jagged)),
    "a nested tensor of the older kind": lambda scale: closure(nested(scale, torch.strided)),
}


def nested(scale: float, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((2,), scale), torch.zeros(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("holding", HOLDING.values(), ids=list(HOLDING))
def test_a_function_is_known_by_all_that_it_holds(holding: Callable[[float], Any]) -> None:
    assert called(holding(1.0), DATA) == called(holding(1.0), DATA)
    assert called(holding(1.0), DATA) != called(holding(2.0), DATA)


def test_a_dataset_is_known_by_all_that_it_holds() -> None:
    function = closure(1)
    texts = {
        called(function, data) for _ in range(2) for data in (Images("a", [1]), Images("b", [1]), Images("a", [2]))
    }
    assert len(texts) == 3
    parts = [torch.utils.data.Subset(DATA, indices) for indices in ([0, 1, 2, 7], [0, 3, 2, 7])]
    assert len({called(function, part) for part in parts}) == 2


def test_a_dataset_of_very_many_files_is_looked_at_in_parts() -> None:
    files = [(f"{number}.png", number % 10) for number in range(200_000)]
    one, other = Images("a", files), Images("a", [(name, 1) for name, _ in files])
    assert called(closure(1), one) == called(closure(1), Images("a", list(files))) != called(closure(1), other)


def lists(depth: int = 3) -> Any:
    return [lists(depth - 1) for _ in range(30)] if depth else [0, Settings(1.0)]


def objects() -> Any:
    return {number: [Scorer(Settings(float(one))) for one in range(200)] for number in range(100)}


@pytest.mark.parametrize("holding", [lists, objects])
def test_what_holds_too_much_is_never_taken_for_what_was_kept(holding: Callable[[], Any]) -> None:
    held = holding()
    assert called(closure(held), DATA) != called(closure(held), DATA)


def test_what_holds_itself_is_known() -> None:
    def of(scale: float) -> Scorer:
        made = Scorer([scale])
        made.scale.append(made)
        return made

    assert called(of(1.0), DATA) == called(of(1.0), DATA) != called(of(2.0), DATA)


@dataclass
class Deep:
    inner: Any
    others: list[Any] = field(default_factory=list)


def test_what_is_very_deep_is_known() -> None:
    def of(scale: float) -> Deep:
        made = Deep(scale)
        for _ in range(1000):
            made = Deep(made)
        return made

    assert called(closure(of(1.0)), DATA) == called(closure(of(1.0)), DATA) != called(closure(of(2.0)), DATA)


class Raising:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("looked at")


def test_tensors_without_values_and_objects_that_cannot_be_looked_at_end_no_evaluation() -> None:
    meta = nn.Linear(2, 2, device="meta")
    for held in (nn.LazyLinear(3), meta, meta.weight, nn.UninitializedParameter(), threading.Lock(), open):
        assert called(closure(held), DATA) == called(closure(held), DATA)
    assert called(closure(Raising()), DATA)


SHIFT = 1.0


def test_a_plain_global_of_an_inner_function_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(batch: Any, ids: torch.Tensor) -> Any:
        return [one + SHIFT for one in (lambda: batch)()]

    def nested_score(batch: Any, ids: torch.Tensor) -> Any:
        return (lambda: batch[0] + SHIFT)()

    for function in (score, nested_score):
        before = called(function, DATA)
        monkeypatch.setitem(globals(), "SHIFT", 2.0)
        assert called(function, DATA) != before
        monkeypatch.setitem(globals(), "SHIFT", 1.0)
