"""The copy of a rank: every element once over all ranks, and each change of the leaves seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from jobkit.checkpoint.leaves import Entry, finder_of, names_of
from jobkit.checkpoint.shard import BLOCK, parse_header, sums_of, write_shard
from jobkit.checkpoint.staging import PAGE, RankPosition, Stager, divide
from jobkit.loop.tracked import PendingGradients
from jobkit.wire.group import RankGroup


@pytest.mark.parametrize("sizes", [[3, 5], [1], [0, 7, 0], [10, 1, 1, 1], []])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_a_division_covers_each_element_once_and_is_balanced(sizes: list[int], parts: int) -> None:
    shares = divide(sizes, parts)
    covered = sorted((item, index) for share in shares for item, begin, end in share for index in range(begin, end))
    assert covered == [(item, index) for item, size in enumerate(sizes) for index in range(size)]
    counts = [sum(end - begin for _, begin, end in share) for share in shares]
    assert max(counts) - min(counts) <= 1


def stager() -> Stager:
    return Stager(RankPosition(), RankGroup.alone())


def entries(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Entry]:
    made = [Entry(name="model", live=model)]
    return made if optimizer is None else [*made, Entry(name="optimizer", live=optimizer)]


def saved(staged: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a staged shard."""
    header, data = staged.header, staged.data  # type: ignore[attr-defined]
    pieces, _ = parse_header(header)
    return {
        item.piece.key: data[item.begin : item.end].view(item.piece.dtype).view(item.piece.shape).clone()
        for item in pieces
    }


def replace(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.full((2, 2), 7.0))


def grow(model: nn.Linear) -> None:
    model.register_buffer("extra", torch.ones(3))


def cast(model: nn.Linear) -> None:
    model.double()


def assign(model: nn.Linear) -> None:
    model.weight.data = model.weight.data + 1


CHANGES: dict[str, Callable[[nn.Linear], None]] = {
    "a new parameter": replace,
    "a new buffer": grow,
    "a dtype": cast,
    "new memory of the same parameter": assign,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("looks_between", [False, True])
def test_a_change_of_the_leaves_is_seen(name: str, looks_between: bool) -> None:
    model, kept = nn.Linear(2, 2), stager()
    kept.copy_to_host(entries(model))
    CHANGES[name](model)
    if looks_between:  # a digest of the state must not hide the change from the next save
        kept.lives(entries(model))
    tensors = saved(kept.copy_to_host(entries(model)))
    for key, value in model.state_dict().items():
        assert torch.equal(tensors[f"model/{key}"], value)


def test_an_optimizers_state_appears_with_its_first_step() -> None:
    model, kept = nn.Linear(2, 2), stager()
    optimizer = torch.optim.AdamW(model.parameters())
    assert "optimizer/state/model/weight/exp_avg" not in saved(kept.copy_to_host(entries(model, optimizer)))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors = saved(kept.copy_to_host(entries(model, optimizer)))
    state = optimizer.state[model.weight]
    assert torch.equal(tensors["optimizer/state/model/weight/exp_avg"], state["exp_avg"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def load(optimizer: torch.optim.Optimizer) -> None:
    """Put the optimizer back to a state of the same form, in new dicts and new tensors."""
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"].fill_(9.0)
    optimizer.load_state_dict(state)


def begin_anew(optimizer: torch.optim.Optimizer) -> None:
    parameters = optimizer.param_groups[0]["params"]
    optimizer.state.clear()
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()


@pytest.mark.parametrize("change", [load, begin_anew])
def test_an_optimizers_state_in_new_dicts_is_the_state_that_is_saved(
    change: Callable[[torch.optim.Optimizer], None],
) -> None:
    model, kept = nn.Linear(2, 2), stager()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    kept.copy_to_host(entries(model, optimizer))
    change(optimizer)
    tensors = saved(kept.copy_to_host(entries(model, optimizer)))
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert torch.equal(tensors[f"optimizer/state/model/weight/{key}"], optimizer.state[model.weight][key])


def test_an_optimizers_state_that_belongs_to_no_parameter_is_saved() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state["average"] = {"loss": torch.tensor(3.0), "count": 5}
    finder = finder_of(Entry(name="optimizer", live=optimizer), {})
    live = finder.find()
    other = torch.optim.AdamW(model.parameters())
    again = finder_of(Entry(name="optimizer", live=other), {})
    shapes = {path: (leaf.dtype, tuple(leaf.shape)) for path, leaf in live.tensors.items()}
    again.adopt(live.skeleton, shapes)
    again.finish(live.skeleton, live.tensors, may_unpickle=False)
    assert other.state["average"] == {"loss": torch.tensor(3.0), "count": 5}


@pytest.mark.parametrize("has_room", [True, False])
def test_a_gradient_that_was_saved_keeps_no_memory_until_the_next_save(has_room: bool) -> None:
    model, kept = nn.Linear(2, 2), stager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked: Any = SimpleNamespace(optimizers=[optimizer], stepped={}, on_step=None, has_begun=True)
    entry = Entry(name="gradients", live=PendingGradients(tracked), scope="rank")
    for number in range(3):
        model(torch.ones(1, 2)).sum().backward()
        gradient = StorageWeakRef(model.weight.grad.untyped_storage())
        copies = saved(kept.copy_to_host([*entries(model), entry]))
        assert copies["0:gradients/added/0 0"].tolist() == [[1.0, 1.0], [1.0, 1.0]], number
        if not has_room:
            assert kept.stage_into([*entries(model), entry], lambda data, header: None) is None
        optimizer.zero_grad()
        assert gradient.expired()


def test_the_parameters_of_a_replaced_submodule_are_saved() -> None:
    model, kept = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), stager()
    kept.copy_to_host(entries(model))
    model[1] = nn.Linear(2, 2)
    assert torch.equal(saved(kept.copy_to_host(entries(model)))["model/1.weight"], model[1].weight)


def test_tied_weights_are_saved_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert sum("weight" in key for key in saved(stager().copy_to_host(entries(model)))) == 1


def test_a_shard_is_a_safetensors_file_whose_data_begin_at_a_page(tmp_path: object) -> None:
    model = nn.Sequential(nn.Linear(1000, 1100), nn.BatchNorm1d(3))
    model[1].half()
    staged = stager().copy_to_host(entries(model))
    file = tmp_path / "rank_0.safetensors"  # type: ignore[operator]
    info = write_shard(file, staged)
    assert info == sums_of(staged.header, staged.data.numpy().data)
    assert (info.header % PAGE, len(info.blocks)) == (0, -(-(info.size - info.header) // BLOCK))
    assert file.stat().st_size == info.size
    with safe_open(file, "pt") as opened:
        for key, value in model.state_dict().items():
            assert torch.equal(opened.get_tensor(f"model/{key}"), value)


def test_a_compiled_or_wrapped_module_has_the_names_of_the_module_within() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    assert list(finder_of(Entry(name="m", live=compiled), {}).find().tensors) == ["0.weight", "0.bias"]
    assert names_of([("m", compiled)]) == names_of([("m", model)])


class Transition(NamedTuple):
    state: torch.Tensor


class Replay:
    """A buffer of transitions, each of which is pickled."""

    def state_dict(self) -> dict[str, list[Transition]]:
        return {"items": [Transition(torch.zeros(1)) for _ in range(1000)]}

    def load_state_dict(self, state: dict[str, list[Transition]]) -> None:
        raise NotImplementedError


def test_of_thousands_of_pickled_values_a_few_are_named() -> None:
    staged = stager().copy_to_host([Entry(name="replay", live=Replay())])
    assert 0 < len(staged.pickled) < 10


def test_frozen_parameters_are_saved_once_they_have_been_trained() -> None:
    model, stage = nn.Linear(2, 2), stager().copy_to_host
    entry = Entry(name="model", live=model, frozen={"bias"})
    for trains, expected in ((False, ["weight"]), (True, ["bias", "weight"]), (False, ["bias", "weight"])):
        model.bias.requires_grad_(trains)
        assert sorted(saved(stage([entry]))) == [f"model/{name}" for name in expected]
