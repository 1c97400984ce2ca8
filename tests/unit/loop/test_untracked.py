"""What a look at a process finds, and what it leaves alone."""

from __future__ import annotations

import collections
import random
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from queue import LifoQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from jobkit.checkpoint.digests import storage_of
from jobkit.loop import untracked
from jobkit.loop.untracked import Looker
from jobkit.run.records import Seen


class Holder:
    __slots__ = ("__dict__", "in_slot")

    def __init__(self) -> None:
        self.in_slot = torch.zeros(2)
        self.shadow = {"weight": torch.zeros(2)}

    @property
    def trap(self) -> Any:
        raise AssertionError("nobody may ask an object for its attributes")


def looked(looker: Looker, tracked: nn.Module | None = None, **names: Any) -> dict[str, Seen]:
    """Look with names in a frame of this file; returns what the look finds of them, by their paths."""
    storages = {storage_of(tensor) for tensor in tracked.state_dict().values()} if tracked is not None else set()
    found = looker.look(storages, {id(tracked)})
    modules = tuple(f"{name}." for name in sys.modules)  # those of other tests are looked at as well
    found = {name: seen for name, seen in found.items() if not name.startswith(modules)}
    looker.left_out = {name: nbytes for name, nbytes in looker.left_out.items() if not name.startswith(modules)}
    return {name.replace("names['", "").replace("']", "", 1): seen for name, seen in found.items()}


def strong(found: dict[str, Seen]) -> list[str]:
    return [name for name, seen in found.items() if seen.kind != "value"]


def test_each_kind_of_thing_is_found_by_the_expression_that_leads_to_it() -> None:
    model = nn.Linear(2, 2)
    names = {
        "ema": AveragedModel(model),
        "own": Holder(),
        "queue": collections.deque([np.zeros(3)]),
        "generator": torch.Generator(),
        "rng": np.random.default_rng(0),
        "dice": random.Random(0),
        "best": 0.5,
        "arguments": SimpleNamespace(centre=torch.zeros(1)),
        "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1),
    }
    found = {name: seen.kind for name, seen in looked(Looker(), model, **names).items()}
    assert {name: kind for name, kind in found.items() if kind != "value"} == {
        "ema": "state",
        "own.in_slot": "tensor",
        "own.shadow['weight']": "tensor",
        "queue[0]": "tensor",
        "generator": "generator",
        "rng": "generator",
        "dice": "generator",
        "arguments.centre": "tensor",
        "optimizer": "state",
    }
    assert found["best"] == "value"


CHANGES: dict[str, Any] = {
    "ema": lambda ema: ema.update_parameters(nn.Linear(2, 2)),
    "own": lambda own: own.shadow["weight"].add_(1),
    "array": lambda array: array.fill(3),
    "generator": lambda generator: torch.rand(1, generator=generator),
    "rng": lambda rng: rng.random(),
    "dice": lambda dice: dice.random(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_seen_and_the_object_is_the_same(name: str) -> None:
    things = {
        "ema": AveragedModel(nn.Linear(2, 2)),
        "own": Holder(),
        "array": np.zeros(3),
        "generator": torch.Generator(),
        "rng": np.random.default_rng(0),
        "dice": random.Random(0),
    }
    looker, thing = Looker(), things[name]
    before = looked(looker, **{name: thing})
    CHANGES[name](thing)
    after = looked(looker, **{name: thing})
    changed = [key for key in strong(after) if before[key].digest != after[key].digest]
    assert changed == [key for key in changed if key.startswith("thing")] != []
    assert after[changed[0]].is_same
    assert not before[changed[0]].is_same


def test_what_is_tracked_is_no_thing_of_its_own_and_a_part_of_a_whole_is_not_named_beside_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ema = AveragedModel(nn.Linear(2, 2))
    names = {
        "tracked_model": model,
        "weight": model[0].weight,
        "layer": model[0],
        "view": model[0].weight.data[:1],
        "inner": ema.module,
        "ema": ema,
        "bias": ema.module.bias,
    }
    assert strong(looked(Looker(), model, **names)) == ["ema"]


def test_the_iterator_of_a_loader_is_found_where_the_program_keeps_it_and_in_a_generator() -> None:
    loader = DataLoader(range(10), batch_size=2)  # type: ignore[arg-type]

    def cycle(loader: Any) -> Any:
        while True:
            yield from loader

    batches, endless = iter(loader), cycle(loader)
    begins, other = cycle(loader), (number for number in range(3))
    next(batches)
    next(endless)
    next(endless)
    looker = Looker()
    found = looked(looker)
    counts = {name: seen.digest for name, seen in found.items() if " batch" in seen.digest}
    assert counts == {"batches": "1 batch", "endless": "2 batches", "begins": "0 batches"}
    assert begins is not other
    assert looker.about["endless"].way == "loader"


def test_a_scheduler_within_a_scheduler_is_a_part() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    warm, then = (torch.optim.lr_scheduler.StepLR(optimizer, number) for number in (2, 5))
    whole = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], [3])
    assert strong(looked(Looker(), warm=warm, then=then, whole=whole)) == ["whole", "optimizer"]


def test_a_buffer_that_a_tracked_module_does_not_keep_is_named_by_its_module() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.register_buffer("mean", torch.zeros(1), persistent=False)

    model, looker = Norm(), Looker()
    found = looked(looker, model, tracked_model=model)
    assert strong(found) == ["model.mean"]
    about = looker.about["model.mean"]
    assert (about.way, about.owner, about.name, about.holder) == ("attributes", "model", "mean", "Norm")


def test_an_average_that_holds_the_trained_model_is_one_thing() -> None:
    class Ema(nn.Module):
        def __init__(self, online: nn.Module) -> None:
            super().__init__()
            self.online, self.average = online, nn.Linear(2, 2)
            self.register_buffer("step", torch.zeros(()))

    model = nn.Linear(2, 2)
    looker, ema = Looker(), Ema(model)
    assert strong(looked(looker, model, mean=ema)) == ["ema"]
    assert (looker.about["ema"].way, looker.about["ema"].owner) == ("track", "ema")


class AsksItself:
    __slots__ = ("value",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class WithoutInit(nn.Module):
    def __init__(self) -> None:
        pass


class Exits:
    def state_dict(self) -> Any:
        raise SystemExit

    def load_state_dict(self, state: Any) -> None:
        raise SystemExit


ODD: dict[str, Callable[[], Any]] = {
    "a dead proxy": lambda: weakref.proxy(WithoutInit()),
    "__getattr__ that raises": AsksItself,
    "a mock of a list": lambda: Mock(spec=list),
    "a mock of a module": lambda: Mock(spec=nn.Module),
    "a lazy layer": lambda: nn.LazyLinear(2),
    "a module without its own __init__": WithoutInit,
    "a conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "a meta tensor": lambda: torch.ones(2, device="meta"),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a number of many digits": lambda: 10**5000,
    "objects in an array": lambda: np.array([None, "text"], dtype=object),
    "a state_dict that exits": Exits,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ODD)
def test_an_odd_object_is_passed_by_and_what_stands_beside_it_is_seen(name: str) -> None:
    looker = Looker()
    for _ in range(2):
        found = looked(looker, odd=ODD[name](), ema=nn.Linear(1, 1))
        assert found["ema"].kind == "state"


class Averaging(UserDict[str, Any]):
    """As a callback of Lightning: a base of a library, whose state_dict is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_callback_is_found_in_the_list_of_a_librarys_object() -> None:
    looker, fitting = Looker(), LifoQueue[Any]()
    vars(fitting)["callbacks"] = [Averaging()]
    assert strong(looked(looker, trainer=fitting)) == ["fitting.callbacks[0].shadow"]
    about = looker.about["fitting.callbacks[0].shadow"]
    assert (about.way, about.keeper) == ("attributes", "fitting.callbacks[0]")


def test_what_is_too_large_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untracked, "HOST_BYTES", 100)
    looker = Looker()
    found = looked(looker, large=torch.zeros(26), small=torch.zeros(24))
    assert ("small" in found, "large" in found) == (True, False)
    assert looker.left_out == {"names['large']": 104}


def test_of_a_dataset_in_memory_the_ends_are_looked_at_and_what_stands_behind_it_is_found() -> None:
    samples = [{"id": number, "caption": "text"} for number in range(30_000)]
    looker = Looker()
    found = looked(looker, holder=SimpleNamespace(samples=samples, deeper={"ema": {"shadow": torch.zeros(2)}}))
    assert "holder.deeper['ema']['shadow']" in strong(found)
    assert looker.left_out == {}


def test_a_large_process_is_looked_at_up_to_a_number_of_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untracked, "MOST_OBJECTS", 50)
    looker = Looker()
    looked(looker, many=[{"each": number} for number in range(1000)])
    assert "" in looker.left_out


def test_an_object_whose_state_dict_fails_and_a_jobkit_object_are_passed_by() -> None:
    class Broken:
        def state_dict(self) -> Any:
            raise RuntimeError

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    assert strong(looked(Looker(), broken=Broken())) == []
