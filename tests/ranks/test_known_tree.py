"""What a later save of the same state keeps from the one before, and what it must not keep."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch import nn

from jobkit.checkpoint import known_tree
from jobkit.checkpoint.known_tree import KnownTree
from jobkit.checkpoint.memory import SnapshotMemory
from jobkit.checkpoint.state import flatten, unflatten
from jobkit.checkpoint.store import Store
from jobkit.checkpoint.writer import Checkpointer
from jobkit.group import RankGroup
from jobkit.run.slots import environment_of, make_slots


def a_state() -> dict[str, Any]:
    versions: OrderedDict[str, Any] = OrderedDict({"a": torch.ones(3), "b": torch.zeros(2, 2)})
    versions.__dict__["_metadata"] = OrderedDict({"": {"version": 2}})
    return {
        "model": versions,
        "state": {0: {"step": torch.tensor(1.0), "average": torch.ones(4)}, 1: {"average": torch.ones(4)}},
        "groups": [{"lr": 0.5, "betas": (0.9, 0.99), "parameters": [0, 1], "maximize": False, "name": "x"}],
        "pair": (torch.ones(1), [3, None]),
        "parameter": nn.Parameter(torch.ones(2)),
        "last": torch.ones(5, dtype=torch.bfloat16),
    }


@pytest.fixture
def flattened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trees that were named and pickled as a whole."""
    found: list[Any] = []

    def noted(tree: Any) -> Any:
        found.append(tree)
        return flatten(tree)

    monkeypatch.setattr(known_tree, "flatten", noted)
    return found


def known(state: Any) -> KnownTree:
    tree = KnownTree()
    for _ in range(3):
        tree.flatten(state)
    return tree


def check(tree: KnownTree, state: Any) -> None:
    """What is saved of a state is what a save that knows nothing of it saves."""
    flat = tree.flatten(state)
    skeleton, tensors = flatten(state)
    assert list(flat.names) == list(tensors)
    assert all(ours is theirs for ours, theirs in zip(flat.tensors, tensors.values(), strict=True))
    copies = {name: tensor.detach() for name, tensor in tensors.items()}  # as they come from the disk
    assert seen(unflatten(flat.skeleton(), copies)) == seen(unflatten(skeleton, copies)) == seen(state)


def seen(node: Any) -> Any:
    """A tree as what can be compared: types, order, bits, the memory of tensors, attributes."""
    if isinstance(node, torch.Tensor):
        return type(node), node.requires_grad, node.shape, node.data_ptr()
    if isinstance(node, dict):
        return type(node), [(type(key), key, seen(value)) for key, value in node.items()], seen(vars_of(node))
    if isinstance(node, (list, tuple)):
        return type(node), [seen(value) for value in node]
    return type(node), repr(node)


def vars_of(node: Any) -> Any:
    return list(getattr(node, "__dict__", {}).items())


def test_a_state_of_the_same_form_is_not_pickled_again(flattened: list[Any]) -> None:
    tree, state = known(a_state()), a_state()  # all objects are new ones, as those of a state_dict
    flattened.clear()
    check(tree, state)
    assert not flattened


def test_a_modules_and_an_optimizers_state_dict_are_known_again(flattened: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def step() -> dict[str, Any]:
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        schedule.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    tree = KnownTree()
    for _ in range(2):
        tree.flatten(step())
    for _ in range(3):
        flattened.clear()
        check(tree, step())
        assert not flattened, "a learning rate is a value in a known place"


def change(**of_groups: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["groups"][0].update(of_groups)


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def act(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return act


def alias(state: dict[str, Any]) -> None:
    state["state"][1]["average"] = state["state"][0]["average"]


def alias_of_a_list(state: dict[str, Any]) -> None:
    state["groups"].append(state["groups"][0])


def other_order(state: dict[str, Any]) -> None:
    state["model"].move_to_end("a")


def other_key(state: dict[str, Any]) -> None:
    state["state"] = {(True if key == 1 else key): value for key, value in state["state"].items()}


def version(state: dict[str, Any]) -> None:
    state["model"]._metadata[""]["version"] = 3


def no_versions(state: dict[str, Any]) -> None:
    del state["model"].__dict__["_metadata"]


def requires_no_gradient(state: dict[str, Any]) -> None:
    state["parameter"].requires_grad_(False)


def other_data(state: dict[str, Any]) -> None:
    state["parameter"].data = torch.ones(7)


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "a number": change(lr=0.25),
    "the sign of zero": change(lr=-0.0),
    "not a number": change(lr=math.nan),
    "an int for a float": change(lr=1),
    "True for 1": put(True, "groups", 0, "parameters", 1),
    "a tuple": change(betas=(0.8, 0.99)),
    "a list in a tuple": change(betas=(0.9, [0.99])),
    "a tensor in a tuple": change(betas=(0.9, torch.ones(1))),
    "a longer list": lambda state: state["groups"][0]["parameters"].append(2),
    "a list in a fixed tuple": lambda state: state["pair"][1].append(1),
    "a value in a list in a tuple": put(4, "pair", 1, 0),
    "a tensor for a value": change(lr=torch.tensor(0.5)),
    "a value for a tensor": put(1.0, "state", 0, "step"),
    "another key": put(1, "new"),
    "one key less": lambda state: state.pop("pair"),
    "another order": other_order,
    "True for a key of 1": other_key,
    "another shape": put(torch.ones(2, 2, 1), "model", "b"),
    "a shape that could be spread": put(torch.ones(1), "state", 0, "average"),
    "another dtype": put(torch.ones(3, dtype=torch.float64), "model", "a"),
    "a parameter for a tensor": put(nn.Parameter(torch.ones(3)), "model", "a"),
    "no gradient": requires_no_gradient,
    "other data of the same parameter": other_data,
    "one tensor at two places": alias,
    "one list at two places": alias_of_a_list,
    "another version of a module": version,
    "no versions": no_versions,
    "a dict for an OrderedDict": lambda state: state.update(model=dict(state["model"])),
    "an object": put({1, 2}, "groups", 0, "name"),
}


@pytest.mark.parametrize("of", CHANGES)
def test_what_has_changed_in_a_known_state_is_saved_as_it_is_now(of: str) -> None:
    state = a_state()
    tree = known(state)
    CHANGES[of](state)
    for _ in range(3):  # and known from then on
        check(tree, state)
    check(tree, a_state())


@pytest.mark.parametrize("other", [torch.ones(3, device="meta"), torch.ones(3).to_sparse()])
def test_a_tensor_that_is_pickled_is_no_longer_named(other: torch.Tensor, flattened: list[Any]) -> None:
    state = a_state()
    tree = known(state)
    flattened.clear()
    state["model"]["a"] = other
    assert "model/a" not in tree.flatten(state).names
    assert flattened


def test_a_skeleton_is_that_of_the_save_and_not_of_a_change_after_it() -> None:
    state = a_state()
    tree = known(state)
    state["groups"][0]["lr"] = 0.25
    flat = tree.flatten(state)
    state["groups"][0]["lr"] = 0.125
    state["groups"][0]["parameters"].append(5)
    again = unflatten(flat.skeleton(), dict(zip(flat.names, flat.tensors, strict=True)))
    assert again["groups"][0]["lr"] == 0.25
    assert again["groups"][0]["parameters"] == [0, 1]


def test_a_state_that_changes_its_form_each_time_is_not_studied_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    studied: list[None] = []
    form_of = known_tree._form_of
    monkeypatch.setattr(known_tree, "_form_of", lambda *args: studied.append(None) or form_of(*args))
    tree, state = KnownTree(), {"weight": torch.ones(2), "losses": [0.0]}
    for _ in range(10):
        check(tree, state)
        state["losses"].append(1.0)
    assert len(studied) == 1


def state_of(step: int) -> dict[str, Any]:
    """With views, of which two are of one memory, and tensors whose bytes are not their values."""
    memory = torch.arange(6.0) + step
    whole = torch.tensor([1 + 2j, 3j]) * step
    return {
        **a_state(),
        "two views": [memory[:4], memory[2:]],
        "turned": (torch.arange(12.0) * step).view(3, 4).t(),
        "every third": (torch.arange(12.0) * step)[::3],
        "conjugate": whole.conj(),
        "negative": whole.conj().imag,
        "empty": torch.ones(0, 3),
        "step": step,
    }


def save_and_load(team: Team, root: Path) -> list[tuple[Any, Any]]:
    """What is loaded after each of several saves, and what was saved."""
    checkpointer = team.checkpointer(root)
    state, own = state_of(1), {"noise": torch.zeros(3) + team.rank}
    found: list[tuple[Any, Any]] = []
    for step in range(1, 7):
        if step == 5:
            state["model"]["a"] = torch.full((9,), 6.0)  # of another shape once it is known
        expected = bits({"state": state, "own": own})
        checkpointer.save(step, {"state": state}, own)
        state["two views"][0].add_(1)  # in place, while it is written
        state["turned"].mul_(2)
        state["conjugate"] = (torch.tensor([1 + 2j, 3j]) * step).conj()  # another object of the same form
        state["step"] = step + 1
        own["noise"].add_(1)
        loaded = checkpointer.load_newest()
        assert loaded is not None
        found.append((bits({"state": loaded.shared["state"], "own": loaded.local}), expected))
    checkpointer.close()
    return found


def bits(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        plain = tree.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        return type(tree).__name__, tree.shape, bytes(plain.view(torch.uint8).tolist()) if plain.numel() else b""
    if isinstance(tree, dict):
        return type(tree).__name__, [(key, bits(value)) for key, value in tree.items()]
    return [bits(value) for value in tree] if isinstance(tree, (list, tuple)) else (type(tree).__name__, repr(tree))


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_checkpoint_of_a_known_state_has_the_values_of_its_save(tmp_path: Path, ranks: int) -> None:
    for found in on_ranks(ranks, save_and_load, tmp_path):
        assert len(found) == 6
        for loaded, saved in found:
            assert loaded == saved


@pytest.mark.parametrize("last", [6, 7])
def test_a_known_state_in_memory_has_the_values_of_its_save(tmp_path: Path, last: int) -> None:
    slots = make_slots()
    assert slots is not None
    environment = environment_of(slots)
    memory = SnapshotMemory.find(environment, RankGroup.alone(), 1)
    checkpointer = Checkpointer(Store(tmp_path), memory=memory)
    assert checkpointer.load_newest() is None  # as each attempt begins
    state = state_of(1)
    expected: Any = None
    for step in range(1, last + 1):
        expected = bits(state)
        checkpointer.save(step, {"state": state}, to_disk=step % 2 == 0)
        state["two views"][0].add_(1)
        state["groups"][0]["lr"] = 1 / step
    checkpointer.wait()
    memory = SnapshotMemory.find(environment, RankGroup.alone(), 1)
    loaded = Checkpointer(Store(tmp_path), memory=memory).load_newest()
    assert loaded is not None and loaded.snapshot is not None
    assert loaded.step == last
    assert bits(loaded.shared["state"]) == expected


def test_a_save_within_inference_mode_leaves_memory_that_later_ones_can_copy_to(tmp_path: Path) -> None:
    checkpointer, state = Checkpointer(Store(tmp_path)), a_state()
    with torch.inference_mode():
        checkpointer.save(1, {"state": state}).wait()
    state["model"]["a"].add_(1)
    checkpointer.save(2, {"state": state}).wait()
    with torch.inference_mode():
        state["model"]["a"] = torch.full((3,), 5.0)
        checkpointer.save(3, {"state": state}).wait()
    loaded = checkpointer.load_newest()
    assert loaded is not None and loaded.step == 3
    assert bits(loaded.shared["state"]) == bits(state)


def save_and_differ(team: Team, root: Path) -> list[str | None]:
    """The error of each of several saves, of which rank 1 has another state at the fifth and the seventh."""
    checkpointer, found = team.checkpointer(root), list[str | None]()
    for step in range(1, 9):
        state = {"a": torch.ones(3) * step, "b": torch.ones(4), "c": torch.ones(5), "lr": 1 / step}
        if team.rank == 1 and step == 5:
            state["b"] = torch.ones(2, 2)
        if team.rank == 1 and step == 7:
            state["d"] = state.pop("c")
        error = checkpointer.save(step, {"state": state}).outcome().error
        found.append(None if error is None else str(error))
    loaded = checkpointer.load_newest()
    assert loaded is not None and bits(loaded.shared["state"]) == bits(state)
    checkpointer.close()
    return found


def test_a_known_state_that_changes_on_one_rank_alone_is_not_saved_and_the_next_one_is(tmp_path: Path) -> None:
    for found in on_ranks(2, save_and_differ, tmp_path):
        assert [step for step, error in enumerate(found, 1) if error is not None] == [5, 7]
        assert all("not the same on rank" in error for error in found if error is not None)
