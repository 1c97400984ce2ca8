"""Lightning's Trainer under jobkit: a callback, and what interrupts a run leaves no trace in its weights and curves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness.adopted import INTERRUPT, KILL, KILL_RANK, PYTHON, Adopted, assert_equal, submitted, torchrun
from harness.project import causes, status
from harness.reference import made_once

SCRIPT = """\
import copy
import os
import random
import time

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from jobkit.lightning import JobkitCallback


class Numbers(torch.utils.data.Dataset):
    def __init__(self, length):
        self.data = torch.randn(length, 6, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index] + 0.1 * torch.randn(6)
        return (sample.flip(0) if random.random() < 0.5 else sample) * float(np.random.rand() + 0.5)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"scale": np.float64(1.5)})
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 6))
        self.losses = []

    def training_step(self, batch, number):
        loss = (self.layers(batch) - batch).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.losses.append(float(loss))
        time.sleep(0.1 if os.path.exists("slow") else 0)
        return loss

    def on_train_epoch_end(self):
        self.log("mean_of_list", float(np.mean(self.losses)))
        self.logger.experiment.add_scalar("own", float(np.sum(self.losses)), self.global_step)
        self.logger.experiment.add_histogram("weights", self.layers[0].weight, self.global_step)
        self.losses.clear()

    def validation_step(self, batch, number):
        self.log("val_loss", (self.layers(batch) - batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Own(L.Callback):
    def on_train_start(self, trainer, module):
        self.average, self.steps = copy.deepcopy(module.layers), 0

    def on_train_batch_end(self, trainer, module, *_):
        self.steps += 1
        for average, now in zip(self.average.parameters(), module.layers.parameters()):
            average.data.lerp_(now.data, 1 / (1 + self.steps))

    def on_train_epoch_end(self, trainer, module):
        module.layers[1].p *= 0.9


if __name__ == "__main__":
    ranks = int(os.environ.get("RANKS", 1))
    L.seed_everything(1)
    trainer = L.Trainer(
        max_epochs=6,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=[
            *(own := Own(), job := JobkitCallback()),
            *(EarlyStopping("val_loss", patience=6), ModelCheckpoint(save_last=True)),
        ],
        val_check_interval=0.5,
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    model = Net()
    train = torch.utils.data.DataLoader(Numbers(44 * ranks), 4, shuffle=True)
    trainer.fit(model, train, torch.utils.data.DataLoader(Numbers(8), 4), ckpt_path=CHECKPOINT)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "weights.pt")
        torch.save([*own.average.parameters(), torch.tensor(own.steps)], "weights_own.pt")
"""
SCRIPT = SCRIPT.replace("CHECKPOINT", "job.checkpoint")


FABRIC = """\
import os
import time

import lightning as L
import torch

import jobkit

ctx = jobkit.init(seed=None)
ranks = int(os.environ.get("RANKS", 1))
fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
fabric.launch()
torch.manual_seed(1 + fabric.global_rank)
model = torch.nn.Linear(4, 4)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
state = {"model": model, "optimizer": optimizer, "step": 0}
if ctx.checkpoint is not None:
    fabric.load(ctx.checkpoint / "fabric.ckpt", state)


def save(folder):
    fabric.save(folder / "fabric.ckpt", state)


ctx.boundary(state["step"], save, total=40)
while state["step"] < 40:
    loss = model(torch.randn(8, 4)).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    ctx.log({"train/loss": loss})
    state["step"] += 1
    time.sleep(0.1 if os.path.exists("slow") else 0)
    ctx.boundary(state["step"], save, total=40)
if fabric.is_global_zero:
    torch.save(model.state_dict(), "weights.pt")
ctx.finish({"loss": loss.item()})
"""
"""A loop of Fabric's, which has no callbacks: with the boundary between its steps."""


def adopted(folder: Path, ranks: int = 1) -> Adopted:
    return Adopted(folder, SCRIPT, {"RANKS": str(ranks)})


@pytest.fixture
def whole_on_two(tmp_path_factory: pytest.TempPathFactory) -> Adopted:
    """On two ranks, uninterrupted; whoever starts them, the numbers are the same."""
    folder = made_once(tmp_path_factory, "lightning", lambda folder: adopted(folder, 2).run(torchrun(2)))
    return adopted(folder, 2)


def files(one: Adopted) -> list[str]:
    """Those that ModelCheckpoint has written."""
    return sorted(file.name for file in one.run_dir.glob("lightning/checkpoints/*"))


def test_a_run_by_python_continues_after_ctrl_c_and_after_a_kill(tmp_path: Path) -> None:
    whole = adopted(tmp_path / "whole")
    whole.run(PYTHON)
    assert 40 < len(whole.points()["train/loss_step"]) < 66  # EarlyStopping has ended it
    run = adopted(tmp_path / "interrupted")
    assert run.interrupt(PYTHON, 5, INTERRUPT) == 75
    assert run.interrupt(PYTHON, 20, KILL) < 0
    run.run(PYTHON)
    assert_equal(whole, run)
    assert len(run.points()["own"]) == len(run.points()["train/loss_epoch"])
    assert files(run) == files(whole)
    assert "last.ckpt" in files(run)
    assert {file.name for file in run.folder.iterdir()} - {"none.yaml"} == {
        *("adopted.yaml", "output.txt", "runs", "train.py", "weights.pt", "weights_own.pt")
    }
    run.run(PYTHON)  # which says so, and trains nothing
    assert "already finished" in run.output


def test_two_ranks_of_torchrun_continue_after_ctrl_c_and_after_the_death_of_one(
    tmp_path: Path, whole_on_two: Adopted
) -> None:
    run = adopted(tmp_path / "interrupted", 2)
    run.interrupt(torchrun(2), 5, INTERRUPT)
    assert status(run.run_dir)["state"] == "interrupted"
    run.interrupt(torchrun(2), 5, KILL_RANK)
    run.run(torchrun(2))
    assert_equal(whole_on_two, run)


def test_a_submitted_run_starts_a_killed_rank_again_and_continues_after_ctrl_c(
    tmp_path: Path, whole_on_two: Adopted
) -> None:
    run = adopted(tmp_path / "interrupted", 2)
    assert run.interrupt(submitted(2), 8, INTERRUPT) == 75
    assert run.interrupt(submitted(2), 8, KILL_RANK) == 0
    assert_equal(whole_on_two, run)
    assert causes(run.run_dir) == ["user", "killed", "finished"]


def test_a_loop_of_fabric_continues_by_its_boundary(tmp_path: Path) -> None:
    whole = Adopted(tmp_path / "whole", FABRIC, {"RANKS": "2"})
    whole.run(torchrun(2))
    run = Adopted(tmp_path / "interrupted", FABRIC, {"RANKS": "2"})
    run.interrupt(torchrun(2), 5, INTERRUPT)
    assert status(run.run_dir)["state"] == "interrupted"
    run.run(torchrun(2))
    assert_equal(whole, run)


def test_processes_that_lightning_would_start_are_told_how_to_be_started(tmp_path: Path) -> None:
    one = adopted(tmp_path / "one", 2)
    one.run(PYTHON, expect=1)
    assert "torchrun --nproc-per-node=2 train.py" in one.output
    assert "tasks_per_node: 2" in one.output


def test_a_checkpoint_that_is_not_passed_on_is_named(tmp_path: Path) -> None:
    one = Adopted(tmp_path / "one", SCRIPT.replace("job.checkpoint", "None"))
    assert one.interrupt(PYTHON, 5, INTERRUPT) == 75
    one.run(PYTHON, expect=1)
    assert "trainer.fit(..., ckpt_path=job.checkpoint)" in one.output


@pytest.mark.parametrize("forbidden", ["lightning,pytorch_lightning"])
def test_without_lightning_one_line_says_what_to_install(forbidden: str) -> None:
    code = (
        "import importlib.util as util; found = util.find_spec\n"
        f"util.find_spec = lambda name, *rest: None if name in {forbidden.split(',')} else found(name, *rest)\n"
        "import jobkit.lightning"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    assert done.returncode == 1
    assert "in the clone of jobkit, pip install '.[lightning]'" in done.stderr.splitlines()[-1]
