"""What a run was given beside its YAML: as it is journalled, and as it is typed for another run."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobkit.run.config import Config
from jobkit.run.experiment import Experiment
from jobkit.run.given import as_typed, given_values, keys_of, values_of, without
from jobkit.run.places import Places
from jobkit.run.records import GivenValues

NUMBERS: list[Any] = [0.3, 1e-5, math.inf, 7, True, None]
TEXTS: list[Any] = ["a b", "1,2", "1e-3", "null", "", "x: y", "é\n", "${run_dir}/x", "${params.y}", "costs ${5}"]


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, [1, "2", [3.0]], {"a b": 1}, {}])
def test_a_value_is_typed_so_that_it_is_read_back(tmp_path: Any, value: Any) -> None:
    places = Places(path=tmp_path / "toy.yaml", lines={})
    experiment = Experiment({"name": "t", "task": "a:b", "params": {"y": 1}}, None, [], places, {})
    plain = experiment.config().config
    (text,) = as_typed({"params.x": value}, plain)
    assert text.startswith("+params.x=")
    config = experiment.config([text]).config
    assert config.params["x"] == value
    assert given_values(config, [], [text]).values == given_values(config, [text]).values == {"params.x": value}


def test_what_was_typed_and_what_is_inherited_are_told_apart() -> None:
    params = {"lr": 0.1, "opt": {"wd": 2, "token": "abc"}, "layers": [7, 2]}
    config = Config(name="t", task="a:b", params=params, seed=3)
    typed = ["params.opt={token: abc, gone: 1}", "name=t", "resources.nodes=2", "params.layers[0]=7"]
    found = given_values(config, typed, ["params.lr=0.1", "seed=4", "params.layers[0]=7"])
    values = {"params.lr": 0.1, "params.opt.token": "***", "params.layers[0]": 7}
    assert found == GivenValues(values=values, inherited=["params.lr"])
    assert values_of(config, ["params.layers[1]", "params.layers[9]", "params.lr.x"]) == {"params.layers[1]": 2}


def test_what_is_typed_replaces_what_is_in_it() -> None:
    given = {"params.layers[0]": 7, "params.opt.wd": 2, "params.opt.name": "adam", "params.layers2": 1}
    assert keys_of(["params.opt={wd: 1}"]) == ["params.opt.wd"]
    left = without(["params.layers=[9]", "params.opt={wd: 1}"], given)
    assert left == {"params.opt.name": "adam", "params.layers2": 1}
