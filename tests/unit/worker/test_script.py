"""The arguments of jobkit.init, and a YAML beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from jobkit.config.load import load
from jobkit.config.schema import AUTO
from jobkit.errors import InputError
from jobkit.loop.values import Values
from jobkit.worker import script
from jobkit.worker.launchers import Topology


def test_arguments_of_init_win_over_its_yaml(tmp_path: Path) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("name: mine\nseed: 5\nparams: {lr: 1, kept: 2}\ncheckpoint: {every: 7}\n")
    values = script._values({"lr": 0.5, "out": Path("out"), "local_rank": 0, "text": "a: [b"}, Topology())
    for seed, expected in ((AUTO, 5), (0, 0), (3, 3), (None, None)):
        config = load(yaml, script._words("other", values, seed), ["python", "x.py"]).config
        assert (config.name, config.seed, config.checkpoint.every) == ("other", expected, 7)
        assert config.params == {"lr": 0.5, "kept": 2, "out": "out", "text": "a: [b"}


@pytest.mark.parametrize(
    "words",
    [
        "jobkit.init(name='../up')",
        "jobkit.init({'lr': 1})",
        "jobkit.init(gpus=2)",
        "jobkit.init(params={'dim': 4, 'width': '${model.dim}'})",
    ],
)
def test_wrong_arguments_of_init_start_nothing(tmp_path: Path, words: str) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    program = [sys.executable, "-c", f"import jobkit; {words}"]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert list(tmp_path.rglob("*")) == [folder]
    assert done.stderr.startswith("error: jobkit.init"), done.stderr


@pytest.mark.parametrize("has_yaml", [False, True])
@pytest.mark.parametrize(
    ("values", "key", "way"),
    [
        ({"dim": 4, "width": "${model.dim}"}, "width", "OmegaConf.to_container(cfg, resolve=True)"),
        ({"net": {"widths": [1, "${now:%Y}"]}}, "net.widths.1", "OmegaConf.to_container(cfg, resolve=True)"),
        ({"home": "${oc.env:NOBODY_SET_THIS}"}, "home", "export NOBODY_SET_THIS="),
        ({"net": {"layers": [1, object()]}}, "net.layers.1", "leave it out"),
        ({"net": OmegaConf.create({"width": "${dim}"})}, "net.width", "give it a value"),
        (OmegaConf.create({"width": "???"}), "width", "give it a value"),
    ],
)
def test_a_param_that_cannot_be_taken_is_named_as_the_script_has_it(
    tmp_path: Path, values: Any, key: str, way: str, has_yaml: bool
) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("name: mine\nparams: {lr: 1}\n")
    with pytest.raises(InputError) as refusal:
        params = script._values(values, Topology())
        if has_yaml:
            load(yaml, script._words(None, params, AUTO), ["python", "x.py"])
        else:
            script._loaded("mine", params, AUTO)
    line = str(script._of_init(refusal.value))
    assert line.startswith(f"jobkit.init(params=...): {key}: ") and way in line, line


def test_what_the_yaml_itself_has_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("name: mine\nparams: {width: '${model.dim}'}\n")
    with pytest.raises(InputError) as refusal:
        load(yaml, script._words(None, {"lr": 1}, AUTO), ["python", "x.py"])
    assert str(script._of_init(refusal.value)).startswith(f"{yaml}:2: params.width: ")


def test_a_config_of_omegaconf_is_taken_with_its_values() -> None:
    config = OmegaConf.create({"dim": 4, "widths": [1, "${dim}"]})
    assert script._values(config, Topology()) == {"dim": 4, "widths": [1, 4]}
    assert script._values({"cfg": config}, Topology()) == {"cfg": {"dim": 4, "widths": [1, 4]}}


@pytest.mark.parametrize(
    ("file", "expected"),
    [("train v2 (copy).py", "train-v2-copy"), ("_vae.py", "vae"), ("-c", "interactive"), ("", "interactive")],
)
def test_a_script_without_a_name_gives_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if file.endswith(".py"):
        Path(file).touch()
    monkeypatch.setattr(sys, "argv", [file])
    assert script._loaded(None, {}, 0).config.name == expected
    with pytest.raises(InputError):
        script._loaded("my exp", {}, 0)


def test_lists_of_params_are_plain_in_values() -> None:
    state = Values({"betas": OmegaConf.create([0.9, 0.95])}).state_dict()
    assert state == {"betas": [0.9, 0.95]} and type(state["betas"]) is list
