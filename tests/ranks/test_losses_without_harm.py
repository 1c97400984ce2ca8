"""A loss that is no number while all gradients are numbers, as of labels that are all masked: the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.attempts import attempt
from torch import Tensor, nn
from torch.nn import functional

from jobkit.run.rundir import RunDir
from jobkit.worker.losses import UNUSED_IN_A_ROW

MASKED = -100
SAMPLES, STEPS = 32, 8


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Of one sample the label is masked, or the input no number."""

    def __init__(self, bad: int, masked: bool) -> None:
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
        self.y = torch.arange(SAMPLES) % 3
        if masked:
            self.y[bad] = MASKED
        else:
            self.x[bad] = torch.nan

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def train(ctx: Any, way: str, masked: bool) -> Any:
    model = ctx.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)
    loader = ctx.loader(Data(5, masked), global_batch_size=4 if way in ("micro", "pipeline") else 2)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    losses = []
    for _ in ctx.steps(STEPS):
        x, y = next(loader)
        if way in ("by hand", "logged first"):
            loss = functional.cross_entropy(model(x), y)
            if way == "logged first":
                ctx.log({"train/loss": loss})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ctx.log({"train/loss": loss})
        else:
            micro = {"micro_batch_size": 1} if way == "micro" else {}
            loss = ctx.backward(model, x, functional.cross_entropy, y, **micro)
            ctx.update(optimizer, max_norm=1.0)
        losses.append(float(loss))
    return losses


CONFIGS = {
    "ddp": "",
    "micro": "",
    "by hand": "",
    "logged first": "",
    "rerun": "on_nan: rerun\n",
    "zero1": "parallel: zero1\n",
    "zero3": "parallel: zero3\n",
    "pipeline": "parallel: {pipeline: 2}\n",
}


def run_of(folder: Path) -> RunDir:
    (run,) = folder.glob("run-*")
    return RunDir(run)


def weights(folder: Path) -> bytes:
    return (run_of(folder).path / "final" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("way", CONFIGS)
def test_masked_labels_of_one_rank_end_no_run_and_change_nothing(tmp_path: Path, way: str) -> None:
    config = "checkpoint: {every: 2, memory: 'off'}\n" + CONFIGS[way]
    found = attempt(2, tmp_path / "on", train, way, True, config="seed: 3\n" + config)
    assert all(isinstance(losses, list) for losses in found), found
    assert any(loss != loss for losses in found for loss in losses)
    told = [one for one in run_of(tmp_path / "on").journal.read() if one["event"] == "loss_without_harm"]
    assert len(told) == 1 and 5 in told[0]["samples"]
    off = "seed: 3\non_nan: 'off'\n" + config.replace("on_nan: rerun\n", "")
    attempt(2, tmp_path / "off", train, way, True, config=off)
    assert weights(tmp_path / "on") == weights(tmp_path / "off")


@pytest.mark.parametrize("way", ["ddp", "micro", "by hand", "logged first", "zero3"])
def test_what_is_no_number_ends_the_run_before_a_checkpoint_holds_it(tmp_path: Path, way: str) -> None:
    config = "seed: 3\ncheckpoint: {every: 1, memory: 'off'}\n" + CONFIGS[way]
    said = attempt(1, tmp_path, train, way, False, config=config)[0]
    assert said.startswith("NotFinite: the loss of step ") and " is nan: " in said, said
    step = int(said.split("step ")[1].split()[0])
    saved = [int(one.name.removeprefix("step_")) for one in (run_of(tmp_path).path / "checkpoints").glob("step_*")]
    assert all(one <= step for one in saved)


def never_used(ctx: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(2 * UNUSED_IN_A_ROW):
        if step == 0:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ctx.log({"loss": float("nan")})  # as of a loss scale of its own, which uses none of the gradients


def test_a_run_whose_losses_nobody_uses_any_more_ends(tmp_path: Path) -> None:
    said = attempt(1, tmp_path, never_used)[0]
    assert said.startswith(f"NotFinite: the loss of step {UNUSED_IN_A_ROW + 1} is nan"), said


def with_files_of_its_own(ctx: Any, masked: bool) -> int:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save = lambda folder: torch.save(model.state_dict(), folder / "own.pt")  # noqa: E731
    step = 0
    while True:
        ctx.boundary(step, save, total=STEPS)
        if step == STEPS:
            return step
        x, y = torch.randn(2, 4), torch.tensor([MASKED if masked and step == 2 else 1] * 2)
        loss = functional.cross_entropy(model(x if masked or step != 2 else x * torch.nan), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        ctx.log({"train/loss": loss})


@pytest.mark.parametrize("masked", [True, False])
def test_what_a_script_saves_itself_is_looked_at_too(tmp_path: Path, masked: bool) -> None:
    found = attempt(2, tmp_path, with_files_of_its_own, masked, config="seed: 3\n")
    assert found == [STEPS] * 2 if masked else "NotFinite: the loss of step 2 is nan" in found[0], found
    told = [one for one in run_of(tmp_path).journal.read() if one["event"] == "loss_without_harm"]
    assert [one["step"] for one in told] == ([2] if masked else [])
