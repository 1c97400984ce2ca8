"""The parts of ctx that no other test of a whole run calls: boundaries of a foreign loop, ctx.map, averages, and what
a finished run gives to others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from harness.runs import Launch, Project
from harness.training import points, result
from torch import nn

import jobkit
from jobkit.errors import InputError

TASK = """\
import time
import torch
from torch import nn
import jobkit
from training_task import digest, mark, pause

SEED = 5623625283957523004

def by_boundary(ctx):
    mark(ctx)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if ctx.checkpoint is not None:
        state = torch.load(ctx.checkpoint / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save(folder):
        if ctx.is_main:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")

    ctx.boundary(ctx.step, save, total=60)
    for step in range(ctx.step, 60):
        loss = (model(torch.rand(4, 2)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log({"train/loss": loss})
        pause(ctx)
        ctx.boundary(step + 1, save, total=60)
    return {"digest": digest(model.state_dict())}

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))

def uses_everything(ctx):
    assert jobkit.current() is ctx
    assert (ctx.world_size, ctx.rank in (0, 1), ctx.local_rank) == (2, True, 0)  # each on a node of its own
    assert (ctx.is_main, ctx.attempt, ctx.seed, ctx.params.steps) == (ctx.rank == 0, 1, 3, 60)
    assert (ctx.device.type, torch.distributed.get_backend()) == ("cpu", "gloo")
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert jobkit.derive_seed(ctx.seed, "noise") == SEED
    with ctx.main_first():
        if ctx.is_main:
            (ctx.run_dir / "outputs" / "prepared").mkdir()
        assert (ctx.run_dir / "outputs" / "prepared").exists()
    model = ctx.parallelize(Tied())
    optimizer = ctx.optimizer(model, jobkit.optim.EmaAdamW, lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    data = torch.arange(30.0).reshape(10, 3)
    for step in ctx.steps(5):
        assert step == ctx.step
        with ctx.autocast():
            loss = model(data).square().mean()
        loss.backward()
        ctx.update(optimizer)
        if step == 2:
            ctx.log({"train/loss": loss})
            ctx.log_image("image", torch.rand(3, 4, 4))
            ctx.log_video("video", torch.rand(3, 1, 4, 4))
            ctx.log_text("text", "words")
    before = model(data)
    with ctx.averaged(optimizer):
        averaged = model(data)
    assert torch.equal(model(data), before) and not torch.equal(averaged, before)

    def outputs(batch, ids):
        with torch.no_grad():
            return {"y": model.module(batch), "id": ids}

    folder = ctx.run_dir / "outputs" / "mapped"
    everywhere = ctx.map(outputs, data, to="all", batch_size=3)
    here = ctx.map(outputs, data, batch_size=3)
    ctx.map(outputs, data, to=folder, batch_size=3)
    ctx.barrier()
    parts = [torch.load(file)["id"] for file in sorted(folder.glob("batch_*.pt"))]
    assert torch.cat(parts).tolist() == everywhere["id"].tolist() == list(range(10))
    assert torch.equal(everywhere["y"], before) and (here is None) == (ctx.rank > 0)
    samples = ctx.evaluate_samples(lambda batch, ids: batch[:, 0], data, batch_size=3)
    assert samples.tolist() == data[:, 0].tolist()
    return {"mean": ctx.evaluate(lambda batch, ids: {"x": batch[:, 0]}, data, batch_size=4)["x"]}
"""


def run(folder: Path, task: str, ranks: int, *words: str, **params: object) -> Launch:
    more = f"resources: {{tasks_per_node: {ranks}}}\ncheckpoint: {{every: 5, memory: off}}\n"
    made = Project(folder, yaml=f"name: context\ntask: context_task:{task}\nparams: {{steps: 60}}\n{more}", plain=False)
    shutil.copy(Path(__file__).parents[1] / "harness" / "training_task.py", folder)
    made.write("context_task.py", TASK)
    return made.submit("--local", "--detach", *words, **params)


def test_a_foreign_loop_with_its_own_files_goes_on_exactly(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", "by_boundary", 2)
    launch = run(tmp_path / "interrupted", "by_boundary", 2, step_seconds=0.2, last_attempt=3)
    launch.wait_for_step(12).kill_rank(1).wait_for_attempt(2)
    launch.wait_for_step(25).project.jobkit("preempt", "-y", launch.run.name)
    assert result(launch) == result(straight)
    assert launch.causes == ["killed", "preempted", "finished"]
    assert points(launch, "train/loss") == list(range(60))


def test_every_part_of_the_context_on_two_ranks(tmp_path: Path) -> None:
    imports = tmp_path / "imports"
    (tmp_path / "counted.py").write_text(f"import os\nopen({str(imports)!r}, 'a').write(f'{{os.getpid()}}\\n')\n")
    keys = ("preload=[counted]", "deterministic=warn", "backend=gloo", "device=cpu", "seed=3", "resources.nodes=2")
    launch = run(tmp_path, "uses_everything", 1, *keys)
    assert result(launch) == {"mean": 13.5}
    assert len(imports.read_text().split()) == 1  # by the agent, before it forked two ranks
    assert [points(launch, tag) for tag in ("train/loss", "image", "video", "text/text_summary")] == [[2]] * 4
    opened = jobkit.open_run(launch.run.path)
    assert (opened.result, opened.params["steps"]) == ({"mean": 13.5}, 60)
    assert (opened.config.seed, opened.config.preload) == (3, ["counted"])
    weights = opened.weights()
    assert torch.equal(weights["first.weight"], weights["second.weight"])
    module = nn.Module()
    module.first, module.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    module.load_state_dict(weights)
    with pytest.raises(InputError):
        jobkit.open_run(tmp_path / "nothing")
