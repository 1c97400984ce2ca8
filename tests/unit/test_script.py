"""The arguments of jobkit.init, and a YAML beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from jobkit.errors import InputError
from jobkit.run.load import load
from jobkit.run.schema import AUTO
from jobkit.worker import script
from jobkit.worker.launcher import Topology
from jobkit.worker.values import Values


def test_arguments_of_init_win_over_its_yaml(tmp_path: Path) -> None:
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("name: mine\nseed: 5\nparams: {lr: 1, kept: 2}\ncheckpoint: {every: 7}\n")
    values = script._values({"lr": 0.5, "out": Path("out"), "local_rank": 0, "text": "a: [b"}, Topology())
    for seed, expected in ((AUTO, 5), (0, 0), (3, 3), (None, None)):
        config = load(yaml, script._words("other", values, seed), ["python", "x.py"]).config
        assert (config.name, config.seed, config.checkpoint.every) == ("other", expected, 7)
        assert config.params == {"lr": 0.5, "kept": 2, "out": "out", "text": "a: [b"}


@pytest.mark.parametrize("words", ["jobkit.init(name='../up')", "jobkit.init({'lr': 1})", "jobkit.init(gpus=2)"])
def test_wrong_arguments_of_init_start_nothing(tmp_path: Path, words: str) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    program = [sys.executable, "-c", f"import jobkit; {words}"]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert list(tmp_path.rglob("*")) == [folder]


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
