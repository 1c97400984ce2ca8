"""Training on an NVIDIA GPU: killed and resumed to the last bit, verified, and copied while kernels still run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.runs import Launch, Project
from harness.training import curve, result

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.digests import weighted_sums
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.memory import Slot
from jobkit.checkpoint.shard import parse_header
from jobkit.checkpoint.staging import RankPosition, Stager
from jobkit.wire.group import RankGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")

YAML = """\
name: gpu
task: gpu_task:train
params: {steps: 60}
deterministic: true
checkpoint: {every: 10min}
resources: {gpus_per_task: 1}
"""

CASES = {
    "fp32": ["precision=fp32", "checkpoint.memory=off", "checkpoint.every=5"],
    "bf16": ["precision=bf16", "+params.workers=2"],
    "fp16": ["precision=fp16"],
    "compiled": ["precision=bf16", "+params.compile=true"],
}


def gpu_project(folder: Path) -> Project:
    project = Project(folder, yaml=YAML, plain=False)
    for file in (Path(__file__).with_name("gpu_task.py"), Path(__file__).parents[1] / "harness/training_task.py"):
        shutil.copy(file, folder)
    return project


@pytest.mark.parametrize("name", CASES)
def test_a_killed_rank_goes_on_with_the_same_bits(tmp_path: Path, name: str) -> None:
    def submit(folder: str, **params: Any) -> Launch:
        return gpu_project(tmp_path / folder).submit("--local", "--detach", *CASES[name], **params)

    expected = result(submit("straight", steps=60))
    launch = submit("killed", steps=60, step_seconds=0.3, last_attempt=2)
    launch.wait_for_step(12).kill_rank(0)
    assert result(launch) == expected
    assert launch.causes == ["killed", "finished"]
    assert launch.ends[1].first_step >= 5
    assert curve(launch, "train/done") == {step: step for step in range(60)}


def test_verify_proves_the_program(tmp_path: Path) -> None:
    project = gpu_project(tmp_path)
    done = project.jobkit("verify", str(project.yaml), "--local", "--steps", "15", "--json", check=False)
    assert json.loads(done.stdout)["equal"], done.stdout + done.stderr


SCRIPT = """
import torch
import jobkit

ctx = jobkit.init("two.yaml")
model = ctx.parallelize(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ctx.track(model=model, optimizer=optimizer)
for step in ctx.steps(4):
    loss = model(torch.randn(8, 4, device=ctx.device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ctx.log({"train/loss": loss})
ctx.finish({"ranks": ctx.world_size, "device": ctx.device.type})
"""


@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo")])  # NCCL takes one rank a GPU
def test_ranks_of_torchrun_train_in_ddp(tmp_path: Path, ranks: int, backend: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    resources = {"tasks_per_node": ranks, "gpus_per_task": 1}
    yaml = {"name": "two", "task": "train:train", "backend": backend, "resources": resources}
    (tmp_path / "two.yaml").write_text(json.dumps(yaml))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("runs/*/final/result.json")
    assert json.loads(file.read_text()) == {"ranks": ranks, "device": "cuda"}


def test_copies_are_those_of_the_moment_whatever_the_device_computes(tmp_path: Path) -> None:
    """The second and third copy go into memory that is there; kernels before are under way, those after overwrite."""
    matrix = torch.rand(2048, 2048, device="cuda") / 2048
    state = torch.nn.Module()
    state.register_buffer("product", torch.zeros_like(matrix))
    state.register_buffer(
        "images", torch.rand(8, 4, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last)
    )
    state.register_buffer("part", torch.rand(64, 64, device="cuda")[:, ::2])
    state.register_buffer("host", torch.ones(3))
    entries = [Entry(name="state", live=state)]
    stager, slot = Stager(RankPosition(), RankGroup.alone()), Slot(os.memfd_create("slot"))

    def memory(data: int, header: int) -> torch.Tensor:
        return torch.frombuffer(slot.memory(data + header, pin=True), dtype=torch.uint8)

    for number in range(4):
        product = matrix
        for _ in range(200):
            product = product @ matrix + number
        state.product.copy_(product)
        staged = stager.copy_to_host(entries) if number % 2 else stager.stage_into(entries, memory)
        assert staged is not None and len(staged.ready) == 1
        assert staged.data.is_pinned()
        state.product.zero_()
        staged.wait()
        expected = {name: value.cpu() for name, value in state.named_buffers()} | {"product": product.cpu()}
        pieces, _ = parse_header(staged.header)
        for item in pieces:
            name = item.piece.name.rpartition("/")[2]
            if name in expected:
                copy = staged.data[item.begin : item.end].view(item.piece.dtype).view(item.piece.shape)
                assert torch.equal(copy, expected.pop(name)), (number, name)
        assert not expected


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second NVIDIA GPU")
"""These were written without such a machine: what they show is by reasoning until they have run."""


@two_gpus
def test_a_copy_waits_for_the_kernels_of_a_second_device() -> None:
    """The first device has nothing to do, so its event comes long before the second one's copies."""
    matrix = torch.rand(2048, 2048, device="cuda:1") / 2048
    state = torch.nn.Module()
    state.register_buffer("first", torch.ones(4, device="cuda:0"))
    state.register_buffer("product", torch.zeros_like(matrix))
    entries, stager = [Entry(name="state", live=state)], Stager(RankPosition(), RankGroup.alone())
    for number in range(3):
        product = matrix
        for _ in range(200):
            product = product @ matrix + number
        state.product.copy_(product)
        staged = stager.copy_to_host(entries)
        assert len(staged.ready) == 2 and staged.data.is_pinned()
        state.product.zero_()
        staged.wait()
        expected = product.cpu()
        (item,) = [item for item in parse_header(staged.header)[0] if item.piece.name == "state/product"]
        copy = staged.data[item.begin : item.end].view(item.piece.dtype).view(item.piece.shape)
        assert torch.equal(copy, expected), number


@two_gpus
def test_a_model_over_two_devices_of_a_rank_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def submit(folder: str, **params: Any) -> Launch:
        changes = ["task=gpu_task:train_on_two", "resources.gpus_per_task=2", "checkpoint.every=5"]
        return gpu_project(tmp_path / folder).submit("--local", "--detach", *changes, **params)

    expected = result(submit("straight", steps=60))
    launch = submit("killed", steps=60, step_seconds=0.3, last_attempt=2)
    launch.wait_for_step(12).kill_rank(0)
    assert result(launch) == expected
    assert launch.ends[1].first_step >= 5


@two_gpus
def test_no_rank_takes_memory_on_the_device_of_another(tmp_path: Path) -> None:
    changes = ["task=gpu_task:train_and_look", "resources.tasks_per_node=2", "checkpoint.every=5"]
    assert result(gpu_project(tmp_path).submit("--local", "--detach", *changes, steps=30)) == {"others": [[1], [0]]}


def test_a_checkpoint_is_read_into_tensors_of_the_device(tmp_path: Path) -> None:
    def model(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).cuda()

    saved, read = model(0), model(1)
    writer = Checkpointer(tmp_path, RankGroup.alone(), RankPosition(), attempt=1, keep=1)
    writer.write(writer.copy_to_host(3, [Entry(name="model", live=saved)], {}), wait=True)
    reader = Checkpointer(tmp_path, RankGroup.alone(), RankPosition(), attempt=2, keep=1)
    reader.restore([Entry(name="model", live=read)])
    assert all(torch.equal(a, b) for a, b in zip(saved.state_dict().values(), read.state_dict().values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.complex64])
def test_a_digest_is_made_where_a_tensor_lies_and_of_the_same_bits(dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 1001, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    here = weighted_sums(tensor)
    there = weighted_sums(tensor.cuda())
    assert there.device.type == "cuda"
    assert torch.equal(here, there.cpu())
