"""vars(args) of a script is taken for params as it is; what cannot be written down is named."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobkit.errors import InputError
from jobkit.group import RankGroup
from jobkit.run.config import Config
from jobkit.worker.params import check_same_run, own_arguments, plain_params


class Mode(enum.Enum):
    FAST = 1


def test_values_of_a_script_become_plain() -> None:
    given = {
        "out": Path("a/b"),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "mode": Mode.FAST,
        "betas": (0.9, np.float32(0.5)),
        "names": {"b", "a"},
        "sizes": {"x": torch.tensor(3)},
        "local_rank": 3,
    }
    assert plain_params(given) == {
        "out": "a/b",
        "device": "cpu",
        "dtype": "torch.bfloat16",
        "mode": "FAST",
        "betas": [0.9, 0.5],
        "names": ["a", "b"],
        "sizes": {"x": 3},
    }


@pytest.mark.parametrize(("value", "named"), [(print, "f is a builtin_function"), ([object()], r"f\[0\] is a object")])
def test_what_cannot_be_written_down_is_named(value: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        plain_params({"f": value})


def group(others: list[Any]) -> RankGroup:
    return RankGroup(0, 2, lambda value: [value, others[0]])


@pytest.fixture
def config() -> Iterator[Config]:
    yield Config(name="a", task="a:b", params={"lr": 1, "out": "x", "api_key": "secret"})


def test_a_param_that_differs_by_rank_is_named(config: Config) -> None:
    check_same_run(group([("a", {"lr": "1", "out": "'x'", "api_key": "'***'"})]), config)
    with pytest.raises(InputError, match="out is 'x' on rank 0 and 'y' on rank 1: all ranks are one run"):
        check_same_run(group([("a", {"lr": "1", "out": "'y'", "api_key": "'***'"})]), config)
    with pytest.raises(InputError, match="lr is 1 on rank 0 and missing on rank 1"):
        check_same_run(group([("a", {"out": "'x'", "api_key": "'***'"})]), config)
    with pytest.raises(InputError, match="the run is 'a' on rank 0 and 'b' on rank 1"):
        check_same_run(group([("b", {})]), config)


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["train.py", "--local-rank=1", "--lr", "3"], {"arguments": ["--lr", "3"]}),
        (["/a/train.py", "--local_rank", "1", "x=2"], {"arguments": ["x=2"]}),
        (["train.py"], {}),
        (["/lib/submitit/core/_submit.py", "/logs/17"], {}),
        (["-c", "1"], {}),
    ],
)
def test_the_arguments_of_a_script_without_params_tell_its_run(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], found: dict[str, Any]
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert own_arguments() == found
