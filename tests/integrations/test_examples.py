"""The examples for other loops: each is stopped and killed by `jobkit verify`, and equals its straight run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.runs import Project

EXAMPLES = Path(__file__).parents[2] / "examples"

DEEPSPEED = '''\
"""A stand-in with DeepSpeed's calls: it shows that the example's lines fit together, and nothing of DeepSpeed."""

import torch


class Engine:
    def __init__(self, model, parameters):
        self.module, self.optimizer = model, torch.optim.AdamW(parameters, lr=1e-2)
        self.device = torch.device("cpu")

    def __call__(self, x):
        return self.module(x)

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_checkpoint(self, save_dir):
        torch.save([self.module.state_dict(), self.optimizer.state_dict()], f"{save_dir}/state.pt")

    def load_checkpoint(self, load_dir):
        model, optimizer = torch.load(f"{load_dir}/state.pt")
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def initialize(*, model, model_parameters, config):
    return Engine(model, model_parameters), None, None, None
'''


def verify(folder: Path, yaml: str, *words: str) -> dict[str, Any]:
    """Return the report of `jobkit verify` in a folder with `train.py`."""
    made = Project(folder, yaml=yaml, plain=False)
    done = made.jobkit("verify", str(made.yaml), *words, "--local", "--json", check=False)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("example", "ranks", "params"),
    [
        ("plain", 1, "max_iters: 12"),
        ("framework", 1, "epochs: 9"),
        ("fabric", 2, "steps: 12"),
        ("torchtitan", 2, "steps: 12"),
        ("deepspeed", 1, "steps: 12"),
        ("lightning", 2, "epochs: 9"),
    ],
)
def test_an_example_is_exact(tmp_path: Path, example: str, ranks: int, params: str) -> None:
    shutil.copytree(EXAMPLES / example, tmp_path, dirs_exist_ok=True)
    if example == "deepspeed":
        (tmp_path / "deepspeed.py").write_text(DEEPSPEED)
    yaml = f"name: {example}\ntask: train:train\nparams: {{{params}}}\nresources: {{tasks_per_node: {ranks}}}\n"
    report = verify(tmp_path, yaml, "--steps", "12")
    assert report["equal"], report
    assert set(report["missing"]) <= {"evaluation", "epoch end"}, report
    assert not any("logged values" in line for line in report["lines"] if "not seen" in line), report


def test_a_loop_that_goes_on_beyond_the_steps_of_a_verification_is_refused(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "plain", tmp_path, dirs_exist_ok=True)
    made = Project(tmp_path, yaml="name: plain\ntask: train:train\nparams: {max_iters: 12}\n", plain=False)
    done = made.jobkit("verify", str(made.yaml), "--local", "--steps", "8", check=False)
    assert (done.returncode, "params.steps=8" in done.stderr) == (1, True), done.stderr
