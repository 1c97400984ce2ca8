"""`deterministic:` in whole runs: what a rank and a command get, and what follows where an operation has no such form.

On the CPU; of what it does on a GPU only the variables and torch's own switches are seen here.
"""

from __future__ import annotations

from pathlib import Path

from harness.project import Project, causes, describe, status

TASK = """
import os

import torch


def train(ctx):
    model = ctx.parallelize(torch.nn.Linear(8, 8))
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=1e-2)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(64, 8)), global_batch_size=16)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(6):
        (x,) = next(loader)
        ctx.backward(model, x, torch.nn.functional.mse_loss, x)
        ctx.update(optimizer)
        if step == 3:
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    cudnn = torch.backends.cudnn
    return [torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, os.environ["CUBLAS_WORKSPACE_CONFIG"]]
"""


def test_an_operation_without_a_deterministic_form_fails_once_or_is_let_pass(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(TASK)
    options = ("resources.nodes=1", "checkpoint.every=1")
    told = project.submit("--local", *options, "deterministic=true", expect=1)
    run = project.run_of(*options, "deterministic=true")
    assert causes(run) == ["crashed"], describe(run)  # not three times, though there was a checkpoint before
    assert "put_ does not have a deterministic implementation" in status(run)["error"]
    for text in (status(run)["error"], told.stdout + told.stderr):
        assert "set `deterministic: warn` to go on without it" in text
    project.submit("--local", *options, "deterministic=warn")
    assert status(project.run_of(*options, "deterministic=warn"))["result"] == [True, True, ":4096:8"]


def test_a_command_gets_the_variables_and_its_own_stay(tmp_path: Path) -> None:
    project = Project(tmp_path, {"NCCL_NVLS_ENABLE": "2"})
    code = "import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], os.environ['NCCL_NVLS_ENABLE'])"
    (project.path / "toy.yaml").write_text(f'name: toy\ncommand: [python, -c, "{code}"]\ndeterministic: warn\n')
    project.submit("--local")
    (run,) = project.runs
    assert ":4096:8 2" in next(run.glob("logs/*/rank_0.out")).read_text(), describe(run)
