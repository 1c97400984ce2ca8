"""A run on the device whose rank is killed ends with the same bits: generators, precision, the optimizer, compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.gpu import overrides
from harness.project import Project, causes, describe, events, logged_steps, status

TASK = """
import hashlib
import os
import signal

import torch
from torch import nn
from torch.nn import functional as F

from jobkit.train.optim import fused_ema_adam


def digest(*tensors):
    found = hashlib.sha256()
    for one in tensors:
        found.update(one.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(ctx):
    p = ctx.params
    assert ctx.device.type == p.device, ctx.device
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.Dropout(0.2), nn.GELU(), nn.Flatten(), nn.Linear(512, 4)
    )
    model = ctx.parallelize(net.to(memory_format=torch.channels_last))
    optimizer = ctx.optimizer(model, fused_ema_adam, lr=1e-2)
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 4)
    loader = ctx.loader(dataset, global_batch_size=16)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    forward = torch.compile(model) if p.compile else model

    def errors(batch, ids):
        x, y = batch
        return F.cross_entropy(model(x + torch.rand_like(x)), y, reduction="none")

    for step in ctx.steps(6):
        if step == 4:
            with ctx.averaged(optimizer):
                ctx.log({"validation/loss": ctx.evaluate(errors, dataset, batch_size=16)})
        x, y = next(loader)
        x = x + 0.1 * torch.randn_like(x)
        loss = ctx.backward(forward, x, F.cross_entropy, y, micro_batch_size=8)
        ctx.update(optimizer, max_norm=1.0)
        ctx.log({"train/loss": loss})
        if step == 5:
            averages = [state["ema"] for state in optimizer.state.values()]
            (ctx.run_dir / f"digest_{ctx.attempt}").write_text(digest(loss, *model.parameters(), *averages))
            if ctx.attempt == 1:
                ctx.ending.wait_for_checkpoint()
                os.kill(os.getpid(), signal.SIGKILL)
    return loss.item()
"""

CASES = {
    "bf16": ["precision=bf16"],
    "fp32, no snapshots in memory": ["precision=fp32", "checkpoint.memory=off"],
    "fp16": ["precision=fp16"],
    "compiled": ["precision=bf16", "params.compile=true"],
}
LONG = [pytest.param(name, marks=pytest.mark.long) for name in CASES if name != "bf16"]


@pytest.mark.parametrize("name", ["bf16", *LONG])
def test_a_killed_rank_goes_on_with_the_same_bits(device: torch.device, tmp_path: Path, name: str) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    params = f"+params={{compile: false, device: {device.type}}}"
    exact = ["deterministic=true", "checkpoint.every=3"]
    project.submit(params, *overrides(device), *exact, *CASES[name])
    (run,) = project.runs
    assert causes(run)[-1] == "finished", describe(run)
    resumed = [event for event in events(run) if event["event"] == "resumed"]
    assert len(resumed) == 2 and resumed[1]["step"] >= 3, describe(run)
    assert (run / "digest_1").read_text() == (run / "digest_2").read_text()
    assert logged_steps(run) == list(range(6))


SCRIPT = """
import torch
import jobkit

ctx = jobkit.init("two.yaml")
model = ctx.parallelize(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ctx.track(model=model, optimizer=optimizer)
for step in ctx.steps(4):
    loss = model(torch.randn(8, 4, device=ctx.device)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    ctx.log({"train/loss": loss})
ctx.finish([ctx.world_size, ctx.device.type])
"""


@pytest.mark.long
def test_two_ranks_of_torchrun_share_the_device(device: torch.device, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    gpus = 0 if device.type == "cpu" else 1
    yaml = {"name": "two", "task": "train:train", "device": device.type, "backend": "gloo"}
    (tmp_path / "two.yaml").write_text(json.dumps({**yaml, "resources": {"tasks_per_node": 2, "gpus_per_task": gpus}}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "JOBKIT_SHARE_DEVICES": "1", "JOBKIT_CONFIG": "none"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = (file.parent for file in tmp_path.glob("runs/*/status.json"))
    assert status(run)["result"] == [2, device.type]
