"""Deaths, stops and damage around the last step: the result stays the same, and little is repeated."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from harness.runs import Launch, Project
from harness.training import points

import jobkit

TASK = """\
import os, signal, time
import torch
from torch import nn
from torch.utils.data import DataLoader
import jobkit.loop.context as inner

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def trains(ctx):
    model = ctx.parallelize(nn.Linear(2, 2))
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(10):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        ctx.update(optimizer)
        ctx.log({"train/loss": loss})
    return {"loss": loss.item()}

def dies_before_final(ctx):
    if ctx.attempt == 1:
        inner.write_final = die
    return trains(ctx)

def dies_after_final(ctx):
    if ctx.attempt == 1:
        ctx.close = die
    return trains(ctx)

def improves(ctx):
    ctx.track(model=ctx.parallelize(nn.Linear(2, 2)))
    def validate():
        return {"error": -float(ctx.step)} if ctx.is_main else None
    for step in ctx.steps(12, every={validate: 5}):
        pass

def accumulates(ctx):
    model = ctx.parallelize(nn.Linear(1500, 1500))
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    state = ctx.values(count=0)
    for step in ctx.steps(150):
        assert state.count == step
        model(torch.ones(1, 1500)).sum().backward()
        state.count += 1
        time.sleep(0.1 if ctx.attempt == 1 else 0)
        while ctx.attempt == 1 and step == 60 and not ctx._rank.page.stop_asked:  # not to be over before that
            time.sleep(0.02)
    return {"count": state.count}

def rots_within_an_epoch(ctx):
    model = ctx.parallelize(nn.Linear(64, 64))
    state = ctx.values(count=0)
    for epoch in ctx.epochs(1, model=model):
        if ctx.attempt == 2:
            file = ctx.run_dir / "checkpoints" / "latest" / "rank_0.safetensors"
            content = bytearray(file.read_bytes())
            content[-5000] ^= 255
            file.write_bytes(content)
        for batch in ctx.batches(DataLoader(torch.arange(60), batch_size=1)):
            assert state.count == ctx.step
            state.count += 1
            if ctx.attempt == 1 and ctx.step == 35:
                die()
    return {"count": state.count}

def breaks_early(ctx):
    model = ctx.parallelize(nn.Linear(2, 2))
    ctx.log({"parameters": 6})
    ctx.log_text("notes", "before the loop")
    ctx.track(model=model)
    def validate():
        ctx.log({"validation/seen": ctx.step})
        return {"error": ctx.step / 3}
    for step in ctx.steps(100, every={validate: 5}):
        ctx.log({"train/loss": step})
        if step == 8 and ctx.attempt == 1:
            die()
        if step == 9:
            break
    ctx.log({"test/loss": 0.5})
    return {"best": 1}

def evaluates(ctx):
    ctx.log({"test/loss": 0.5})
    return {"mean": ctx.evaluate(lambda batch, ids: batch[:, 0], torch.arange(4.0)[:, None], batch_size=2)}

def evaluates_after_epochs(ctx):
    model = ctx.parallelize(nn.Linear(2, 2))
    data = torch.arange(400.0)[:, None]
    def error(batch, ids):
        while ctx.attempt == 1 and not ctx._rank.page.stop_asked:  # not to be over before that
            time.sleep(0.02)
        return batch[:, 0]
    for epoch in ctx.epochs(2, model=model):
        for batch in ctx.batches(DataLoader(data, batch_size=8)):
            pass
    (ctx.run_dir / "outputs").mkdir(exist_ok=True)
    (ctx.run_dir / "outputs" / "after").touch()
    return {"mean": ctx.evaluate(error, data, batch_size=4)}
"""
YAML = "name: ends\ntask: ends_task:{task}\nresources: {{tasks_per_node: {ranks}}}\n"


def run(folder: Path, task: str, ranks: int = 1, more: str = "") -> Launch:
    made = Project(folder, yaml=YAML.format(task=task, ranks=ranks) + more, plain=False)
    made.write("ends_task.py", TASK)
    return made.submit("--local", "--detach")


@pytest.mark.parametrize(
    ("task", "ranks"), [("dies_before_final", 1), ("dies_after_final", 1), ("dies_after_final", 2)]
)
def test_a_death_after_the_loop_changes_no_result(tmp_path: Path, task: str, ranks: int) -> None:
    straight = run(tmp_path / "straight", "trains", ranks).wait_until_over()
    launch = run(tmp_path / "dies", task, ranks).wait_until_over()
    assert launch.causes == ["killed", "finished"]
    assert launch.status.result == straight.status.result is not None
    assert points(launch, "train/loss") == list(range(10))


def test_the_last_checkpoint_can_be_the_best(tmp_path: Path) -> None:
    best = "checkpoint: {best: {metric: error, mode: min}}\n"
    launch = run(tmp_path, "improves", 2, more=best).wait_until_over()
    assert str((launch.run.checkpoints / "best").readlink()) == "step_00000012"


def test_a_metric_that_no_evaluation_returns_is_warned_of(tmp_path: Path) -> None:
    launch = run(tmp_path, "improves", more="checkpoint: {best: {metric: eror, mode: min}}\n").wait_until_over()
    progress = launch.run.progress()
    assert progress is not None
    assert ["eror" in warning and "error" in warning for warning in progress.warnings] == [True]


def test_results_and_curves_survive_a_death_after_the_last_evaluation(tmp_path: Path) -> None:
    launch = run(tmp_path, "breaks_early", more="checkpoint: {every: 2, memory: off}\n").wait_until_over()
    assert launch.causes == ["killed", "finished"]
    assert launch.status.result == {"error": 5 / 3, "best": 1}
    curves = ("parameters", "notes/text_summary", "train/loss", "validation/seen", "error", "test/loss")
    assert [points(launch, tag) for tag in curves] == [[0], [0], list(range(10)), [0, 5], [0, 5], [10]]
    assert launch.ends[-1].differs_at is None


def test_a_checkpoint_that_rots_within_an_epoch_takes_the_place_back_too(tmp_path: Path) -> None:
    launch = run(tmp_path, "rots_within_an_epoch", more="checkpoint: {every: 10, memory: off}\n").wait_until_over()
    assert launch.causes == ["killed", "crashed", "finished"]
    assert launch.status.result == {"count": 60}


def test_a_program_without_a_loop_has_curves_too(tmp_path: Path) -> None:
    launch = run(tmp_path, "evaluates").wait_until_over()
    assert points(launch, "test/loss") == [0]
    assert jobkit.open_run(launch.run.path).result == launch.status.result == {"mean": 1.5}


def test_damage_in_gradients_alone_takes_the_step_back_too(tmp_path: Path) -> None:
    launch = run(tmp_path, "accumulates", more="checkpoint: {every: 20, memory: off}\n").wait_for_step(50)
    launch.project.jobkit("cancel", "-y", str(launch.run.path))
    launch.wait_until_over()
    file = launch.run.checkpoints / "latest" / "rank_0.safetensors"
    with file.open("r+b") as shard:
        size = struct.unpack("<Q", shard.read(8))[0]
        header = json.loads(shard.read(size))
        begin, end = header["0:jobkit.gradients/added/0 0"]["data_offsets"]
        place = 8 + size + (begin + end) // 2
        shard.seek(place)
        byte = shard.read(1)[0]
        shard.seek(place)
        shard.write(bytes([byte ^ 255]))
    launch.project.submit("--local", "--detach")
    launch.wait_until_over()
    assert launch.causes == ["cancelled", "finished"]
    assert launch.status.result == {"count": 150}
    assert list(launch.run.checkpoints.glob("damaged_step_*"))


def test_a_stop_after_the_epochs_repeats_the_last_step_alone(tmp_path: Path) -> None:
    launch = run(tmp_path, "evaluates_after_epochs")
    launch.wait_until(lambda launch: (launch.run.path / "outputs" / "after").exists(), "the lines after the loop")
    launch.project.jobkit("preempt", "-y", str(launch.run.path))
    launch.wait_until_over()
    assert launch.causes == ["preempted", "finished"]
    assert [ended.first_step for ended in launch.ends] == [0, 99]
