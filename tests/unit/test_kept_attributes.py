"""What callbacks and modules keep as attributes, saved by one attempt and restored by another."""

from __future__ import annotations

import copy
import io
import logging
import random
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobkit.train.fields import names_set_by
from jobkit.train.kept_attributes import KeptAttributes


class Meter:
    def __init__(self) -> None:
        self.sum = 0.0


class Keeps:
    """What a callback keeps."""

    def __init__(self, model: nn.Module) -> None:
        self.mean: float | None = None
        self.seen: list[tuple[int, float]] = []
        self._count = 0
        self.patience = 5
        self.meter = Meter()
        self.generator, self.numbers = random.Random(3), np.random.default_rng(4)
        self.model = model
        self.average = copy.deepcopy(model)
        self.shadow = [one.detach().clone() for one in model.parameters()]
        self.level = torch.zeros(2, requires_grad=True)
        self.of_model = model[0].weight.data  # type: ignore[index]

    def step(self, loss: float) -> None:
        self.mean = loss if self.mean is None else 0.9 * self.mean + 0.1 * loss
        self.seen.append((self._count, loss))
        self._count += 1
        self.meter.sum += loss + self.generator.random() + self.numbers.random()
        for average, shadow, now in zip(self.average.parameters(), self.shadow, self.model.parameters(), strict=True):
            average.data.lerp_(now.data, 0.1)
            shadow.data.lerp_(now.data, 0.1)
        with torch.no_grad():
            self.level += loss


def made() -> tuple[nn.Sequential, Keeps]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 30), nn.Dropout(0.2), nn.BatchNorm1d(30))
    return model, Keeps(model)


def train(model: Any, keeps: Keeps, steps: int) -> None:
    for _ in range(steps):
        with torch.no_grad():
            model[0].weight.mul_(0.9)
        model[1].p += 0.01
        model[2].momentum *= 0.9
        keeps.step(model[0].weight.sum().item())


def kept(model: Any, keeps: Keeps) -> KeptAttributes:
    owners = {"callback": keeps, **{f"module {name}": one for name, one in model.named_modules()}}
    return KeptAttributes(owners, [model], one_disk=False)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def end(model: Any, keeps: Keeps) -> Any:
    found = [keeps.mean, keeps.seen, keeps._count, keeps.meter.sum, keeps.level.tolist(), model[1].p, model[2].momentum]
    return [*found, *(one.tolist() for one in (*keeps.average.parameters(), *keeps.shadow))]


def test_an_attempt_goes_on_with_what_the_one_before_had_kept() -> None:
    whole = made()
    train(*whole, 6)
    first = made()
    before = kept(*first)
    train(*first, 4)
    saved, weights = through_a_file(before.changed()), copy.deepcopy(first[0].state_dict())
    assert "patience" not in saved["callback"]  # as the code says, which may have been changed
    assert not {"model", "of_model"} & saved["callback"].keys()  # the framework's, and a view of its weights
    second = made()
    after = kept(*second)
    second[0].load_state_dict(weights)
    level = second[1].level
    after.restore(saved)
    assert second[1].level is level  # which an optimizer may have
    assert second[1].of_model.data_ptr() == second[0][0].weight.data_ptr()
    train(*second, 2)
    assert end(*second) == end(*whole)


def test_nothing_is_saved_that_has_not_changed() -> None:
    model, keeps = made()
    before = kept(model, keeps)
    assert before.changed() == {}
    keeps.average.eval()
    assert before.changed() == {}


def test_an_earlier_moment_is_kept_while_the_objects_go_on() -> None:
    model, keeps = made()
    before = kept(model, keeps)
    train(model, keeps, 2)
    moment = before.snapshot()
    keeps.seen.append((9, 9.0))
    assert len(before.changed(moment)["callback"]["seen"][1].made()) == 2
    assert "average" in before.changed(moment)["callback"]


def test_what_is_made_too_late_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, keeps = made()
    before = kept(model, keeps)
    keeps.late = copy.deepcopy(model)  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "jobkit"):
        before.changed()
        before.changed()
    assert caplog.messages == [
        "callback.late begins anew in each attempt: it is made after the training has begun: make it in __init__"
    ]


def test_names_that_a_class_sets_are_found_in_its_methods() -> None:
    assert names_set_by([Keeps]) >= {"mean", "_count", "average"}


class Phase(Enum):
    WARM, MAIN = 1, 2


@dataclass(slots=True)
class Slots:
    sum: float = 0.0


SHARED: list[int] = []


class Odd:
    """Values of all kinds that scripts have as attributes."""

    def __init__(self) -> None:
        self.of_losses: list[Any] = []
        self.counts: Any = defaultdict(lambda: 0)
        self.phase, self.slots, self.meters, self.several = Phase.WARM, Slots(), {"loss": Meter()}, [Meter()]
        self.shared = SHARED
        self.given = SHARED
        self.evaluated = torch.zeros(2)
        self.table = np.zeros(3, dtype=[("a", "i4"), ("b", "f4")])
        self.late: Any = None
        self.average: Any = nn.BatchNorm1d(2)
        self.average.updates = 0

    def change(self) -> None:
        self.of_losses.append(torch.ones(1, requires_grad=True) * (1 + len(self.of_losses)))
        self.counts[3] += 1
        self.phase = Phase.MAIN
        self.slots.sum += 1
        self.meters["loss"].sum += 1
        self.several[0].sum += 1
        self.shared.append(len(self.shared))
        self.given = [*self.given, 7]
        with torch.inference_mode():
            self.evaluated = self.evaluated + 1
        self.table["a"][1] += 1
        self.late = (self.late or 0) + 1
        self.average.updates += 1

    def seen(self) -> Any:
        held = [self.slots.sum, self.meters["loss"].sum, self.several[0].sum, list(self.shared), self.given]
        tensors = [one.item() for one in self.of_losses], self.evaluated.tolist(), self.table.tolist()
        return [*held, *tensors, dict(self.counts), self.phase, self.late, self.average.updates]


def test_values_of_all_kinds_go_on() -> None:
    SHARED.clear()
    whole = Odd()
    whole.change()
    before = KeptAttributes({"callback": whole}, one_disk=False)
    whole.change()
    before.snapshot()
    saved = through_a_file(before.changed())
    whole.change()
    end = whole.seen()
    SHARED.clear()
    second = Odd()
    second.change()
    KeptAttributes({"callback": second}, one_disk=False).restore(saved)
    second.change()
    assert second.seen() == end
    assert second.shared is SHARED  # as whoever else holds it
    assert second.counts["new"] == 0


def in_itself() -> Any:
    found: list[Any] = []
    found.append(found)
    return found


def deep() -> Any:
    found: list[Any] = []
    for _ in range(100_000):
        found = [found]
    return found


def dead() -> Any:
    return weakref.proxy(Meter())


class Refuses:
    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Fails(nn.Module):
    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("not now")


@pytest.mark.parametrize("make", [in_itself, deep, dead, Refuses, Fails, lambda: nn.LazyLinear(2)])
def test_values_that_cannot_be_kept_end_no_run(make: Callable[[], Any]) -> None:
    keeps = Meter()
    keeps.odd = make()  # type: ignore[attr-defined]
    before = KeptAttributes({"callback": keeps}, one_disk=False)
    keeps.sum += 1
    before.snapshot()
    assert through_a_file(before.changed())["callback"].keys() == {"sum"}


def test_an_object_that_is_made_anew_in_each_epoch_is_kept() -> None:
    class Holds:
        def __init__(self) -> None:
            self.meter = Meter()

    holds, other = Holds(), Holds()
    before = KeptAttributes({"callback": holds}, one_disk=False)
    holds.meter = Meter()
    holds.meter.sum = 3.0
    KeptAttributes({"callback": other}, one_disk=False).restore(before.changed())
    assert other.meter.sum == 3.0


class Watched(nn.Module):
    """Lets its last outputs be looked at, and carries a hidden state from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = self.attention = self.bank = None
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden: torch.Tensor | None = self.linear(x if self.hidden is None else x + self.hidden.detach())
        self.attention: torch.Tensor | None = self.hidden.sum() * torch.ones(1 << 19)
        self.bank: torch.Tensor | None = torch.zeros(17 << 20)
        return self.hidden


def test_a_module_s_hidden_state_is_kept_and_its_large_outputs_are_not(caplog: pytest.LogCaptureFixture) -> None:
    model = Watched()
    kept = KeptAttributes({"module": model}, [model])
    model(torch.ones(2, 4))
    with caplog.at_level(logging.WARNING, "jobkit"):
        assert kept.changed()["module"].keys() == {"hidden"}
    assert [record.getMessage() for record in caplog.records] == [
        "module.bank begins anew in each attempt: it has 68 MB: what register_buffer is given is saved"
    ]


class Counts:
    def __init__(self) -> None:
        self.of_epoch: dict[int, float] = defaultdict(lambda: 1.0)


def test_a_dict_that_cannot_be_pickled_stays_what_it_is_where_it_was_made_anew() -> None:
    first, second = Counts(), Counts()
    before = KeptAttributes({"callback": first}, one_disk=False)
    first.of_epoch = defaultdict(lambda: 1.0)
    first.of_epoch[3] += 1
    KeptAttributes({"callback": second}, one_disk=False).restore(through_a_file(before.changed()))
    assert second.of_epoch == {3: 2.0} and second.of_epoch[4] == 1.0


def test_a_dict_that_cannot_be_pickled_is_not_replaced_by_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Counts(), Counts()
    del first.of_epoch, second.of_epoch
    before = KeptAttributes({"callback": first}, one_disk=False)
    first.of_epoch = defaultdict(lambda: 1.0)
    with caplog.at_level(logging.WARNING, "jobkit"):
        KeptAttributes({"callback": second}, one_disk=False).restore(through_a_file(before.changed()))
    assert not hasattr(second, "of_epoch") and "callback.of_epoch begins anew" in caplog.text
