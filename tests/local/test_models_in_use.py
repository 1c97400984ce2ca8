"""A whole run whose training function copies, saves and compiles what ctx.parallelize gave it."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.project import Project, describe, status
from safetensors.torch import load_file

TASK = """\
import copy

import torch
from torch import nn

WAYS = ("plain", "before", "after", "in_place")


def build(ctx, way):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))
    if way == "before":
        net = torch.compile(net, backend="eager")
    elif way == "in_place":
        net.compile(backend="eager")
    model = ctx.parallelize(net)
    return torch.compile(model, backend="eager") if way == "after" else model


def train(ctx):
    models = {way: build(ctx, way) for way in WAYS}
    optimizers = {f"of_{way}": ctx.optimizer(model, torch.optim.AdamW, lr=1e-2) for way, model in models.items()}
    data = torch.utils.data.TensorDataset(torch.randn(22, 8))
    loader = ctx.loader(data, global_batch_size=8)
    ctx.track(**models, **optimizers, loader=loader)
    found = {way: [] for way in WAYS}
    for step in ctx.steps(3):
        for way, model in models.items():

            def errors(batch, ids):
                return (model(batch[0]) - batch[0]).square().mean(1)

            model.eval()
            found[way].append(ctx.evaluate(errors, data, batch_size=3))  # 8 batches: ranks call it unequally often
            model.train()
        (x,) = next(loader)
        for way, model in models.items():
            ctx.backward(model, x, nn.functional.mse_loss, x, micro_batch_size=2)
            ctx.update(optimizers[f"of_{way}"])
    copy_and_save(ctx, models["plain"], x)
    return found


def copy_and_save(ctx, model, x):
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    torch.save(model, ctx.run_dir / f"model_{ctx.rank}.pt")
    loaded = torch.load(ctx.run_dir / f"model_{ctx.rank}.pt", weights_only=False)
    modules = (model, average, loaded, copied := copy.deepcopy(model))
    outputs = [module.eval()(x) for module in modules]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    copied(x).sum().backward()  # all-reduced, too
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_is_copied_averaged_saved_and_compiled(tmp_path: Path, ranks: int) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    project.submit("--local", "resources.nodes=1", f"resources.tasks_per_node={ranks}")
    (run,) = project.path.glob("runs/toy-*")
    assert status(run)["state"] == "finished", describe(run)
    plain = load_file(run / "final" / "plain.safetensors")
    for way, means in status(run)["result"].items():
        assert means == status(run)["result"]["plain"], way
        weights = load_file(run / "final" / f"{way}.safetensors")
        assert weights.keys() == plain.keys() and all((weights[name] == plain[name]).all() for name in plain), way
