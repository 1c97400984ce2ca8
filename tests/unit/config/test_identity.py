"""The name of a run says what it computes, and not where."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jobkit.config.identity import identity, run_name
from jobkit.config.schema import CheckpointConfig, CommConfig, Config, ParallelConfig, Resources

BASE = Config(name="toy", task="mytask:train", params={"lr": 1, "net": {"widths": [8, 8]}, "pad_token": "<pad>"})


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "mytask:other"},
        {"task": "", "command": ["python", "x.py"]},
        {"params": {**BASE.params, "lr": 1.5}},
        {"params": {**BASE.params, "pad_token": "<eos>"}},
        {"seed": None},
        {"precision": "bf16"},
        {"deterministic": True},
        {"parallel": ParallelConfig(data="zero3")},
        {"comm": CommConfig(local_sgd=4)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_another_result_is_another_run(changes: dict[str, Any]) -> None:
    assert identity(dataclasses.replace(BASE, **changes)) != identity(BASE)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"resources": Resources(nodes=4)},
        {"checkpoint": CheckpointConfig(every=5)},
        {"clusters": {"slurm": {"partition": "x"}}},
        {"inputs": ["x"]},
        {"params": {"net": {"widths": [8.0, 8]}, "lr": 1.0, "pad_token": "<pad>"}},
        {"parallel": ParallelConfig()},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_another_place_is_the_same_run(changes: dict[str, Any]) -> None:
    assert identity(dataclasses.replace(BASE, **changes)) == identity(BASE)


def test_the_name_has_the_hash_and_the_start_is_part_of_it() -> None:
    assert len(identity(BASE)) == 64
    assert run_name(BASE) == f"toy-{identity(BASE)[:8]}"
    assert run_name(BASE, "other-12345678@500") != run_name(BASE)
    assert run_name(BASE) == "toy-1895d334"  # runs keep their names from version to version


@pytest.mark.parametrize(("given", "hash8"), [({}, "8c25c11b"), ({"seed": 0}, "8c25c11b"), ({"seed": 3}, "e319c4fe")])
def test_a_seed_in_the_params_changes_no_name(given: dict[str, int], hash8: str) -> None:
    assert run_name(Config(name="toy", task="mytask:train", params={"seed": 3}, **given)) == f"toy-{hash8}"
