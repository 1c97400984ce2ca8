"""A loss that is not a number: the run ends on the spot, or does what `on_nan` says."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, events, status

TASK = """
import torch
from torch import nn


def train(ctx):
    p = ctx.params
    model = ctx.parallelize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    x[p.bad] = torch.nan
    loader = ctx.loader(torch.utils.data.TensorDataset(x, torch.arange(32)), global_batch_size=8)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    for step in ctx.steps(8):
        x, ids = next(loader)
        if p.bad in ids.tolist():
            print("bad in step", step, flush=True)
        if p.by_hand:
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            if step == p.broken and ctx.attempt == 1:  # as of a GPU that computes wrongly
                x = x * torch.inf
            loss = ctx.backward(model, x, lambda y, x: (y - x).square().mean(), x)
            ctx.update(optimizer)
        ctx.log({"train/loss": loss, "val/loss": float("nan")})
    state = getattr(model, "module", model).state_dict()
    weight = state["0.weight"].double().sum().item()
    return {"weight": weight, "finite": all(bool(one.isfinite().all()) for one in state.values())}
"""

YAML = "name: d\ntask: mytask:train\nparams: {bad: 5, by_hand: false, broken: -1}\nresources: {tasks_per_node: 2}\n"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path)
    (made.path / "mytask.py").write_text(TASK)
    (made.path / "toy.yaml").write_text(YAML)
    return made


def steps_of_bad(run: Path) -> list[tuple[int, int]]:
    """(step, rank) of each batch that had the bad sample, in order."""
    return sorted(
        (int(line.split()[-1]), int(file.stem.split("_")[1]))
        for file in (run / "logs").glob("*/rank_*.out")
        for line in file.read_text().splitlines()
        if line.startswith("bad in step ")
    )


@pytest.mark.parametrize("by_hand", ["false", "true"])
def test_the_run_ends_at_once_and_names_step_rank_and_samples(project: Project, by_hand: str) -> None:
    told = project.submit("--local", f"params.by_hand={by_hand}", expect=1).stderr
    (run,) = project.runs
    step, rank = steps_of_bad(run)[0]
    found = status(run)
    assert (found["state"], len(found["attempts"])) == ("failed", 1), "not tried again"
    failure = found["attempts"][0]["failure"]
    assert (failure["step"], failure["rank"]) == (step, rank)
    assert 5 in failure["samples"] and len(failure["samples"]) == 4
    said = jobkit(project, "status", "d").stdout
    assert f"error: rank {rank}: NotFinite: the loss of step {step} is nan: it is the data's or the model's" in said
    assert f"failed at: rank {rank}, step {step}" in said and "samples of that rank's batch: " in said
    assert f"failed at step {step}/8: rank {rank}: NotFinite: " in told, "not the step of the newest checkpoint"
    assert "rewind" not in told and "on_nan: skip leaves such batches out" in told, "there is no checkpoint"
    assert "Correct what the traceback names first. There is no checkpoint yet; then the same command" in told
    assert "Submitted job triggered" not in told, "Submitit's own, before the traceback"
    logs = [file.read_text() for file in (run / "logs").glob("*/rank_*.*")]
    assert any("Traceback" in text for text in logs) and not any("Submitted job" in text for text in logs)


def test_a_batch_is_left_out_on_all_ranks_and_counted(project: Project) -> None:
    project.submit("--local", "on_nan=skip", "checkpoint.every=1")
    (run,) = project.runs
    found = status(run)
    assert found["state"] == "finished" and found["result"]["finite"], "weights and running means are numbers"
    steps = sorted({step for step, _ in steps_of_bad(run)})
    assert sorted(map(int, found["skipped_batches"])) == steps and len(steps) == 2, "one in each epoch"
    assert all(5 in ids and len(ids) == 8 for ids in found["skipped_batches"].values()), "those of all ranks"
    said = jobkit(project, "status", "d").stdout
    assert f"left out 2 batch(es) whose loss was no number: the last of step {steps[1]}, samples " in said

    # It is as if the batch had not been there, and by hand nothing could leave it out.
    refused = project.submit("--local", "on_nan=skip", "params.by_hand=true", expect=1)
    assert "on_nan: skip leaves out what ctx.backward(model, ...) and ctx.update(optimizer) compute" in refused.stderr


def test_steps_are_repeated_where_only_the_hardware_may_be_at_fault(project: Project) -> None:
    clean = ("params.bad=[]", "checkpoint.every=2", "checkpoint.memory=off")
    project.submit("--local", *clean, "on_nan=rerun", "params.broken=5")
    run = project.run_of(*clean, "params.broken=5")
    found = status(run)
    assert [attempt["cause"] for attempt in found["attempts"]] == ["crashed", "finished"]
    assert found["attempts"][0]["failure"]["not_finite"] and found["attempts"][0]["failure"]["step"] == 5
    assert [(e["step"], e["node"]) for e in events(run) if e["event"] == "hardware_fault"] == [(5, None)]
    project.submit("--local", *clean)
    assert found["result"] == status(project.run_of(*clean))["result"], "as if it had not happened, bit for bit"


def test_what_is_no_number_twice_is_the_datas_or_the_models(project: Project) -> None:
    project.submit("--local", "on_nan=rerun", expect=1)
    (run,) = project.runs
    found, (step, _) = status(run), steps_of_bad(run)[0]
    assert (found["state"], len(found["attempts"]), found["attempts"][1]["failure"]["step"]) == ("failed", 2, step)
    assert "is nan, and was when it was first computed: it is the data's or the model's" in found["error"]
    assert "hardware_fault" not in [event["event"] for event in events(run)]


ELSEWHERE = """
import torch
from torch import nn


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(2))

    def forward(self, factors):
        return (self.rows * factors).sum()


def train(ctx):
    model = ctx.parallelize(Rows())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(8):
        is_bad = step == 3 and ctx.rank == 0
        loss = model(torch.tensor([1.0, torch.nan if is_bad else 1.0]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ctx.log({"train/loss": loss})
"""


def test_harm_in_another_ranks_part_of_the_model_is_found_before_it_is_saved(project: Project) -> None:
    (project.path / "mytask.py").write_text(ELSEWHERE)
    project.submit("--local", "parallel=zero3", "checkpoint.every=1", expect=1)
    (run,) = project.runs
    failure = status(run)["attempts"][0]["failure"]
    assert (failure["rank"], failure["step"]) == (0, 3) and "NotFinite" in failure["error"]
    assert "`jobkit rewind RUN --step N --skip-samples IDS` leaves samples out" in failure["error"]
    assert max(int(one.name.split("_")[1]) for one in (run / "checkpoints").glob("step_*")) <= 3


WRONG = """
import torch
from torch import nn


class Wrong(nn.Module):
    # As a device that computes wrongly now and then: the second time that it is asked.
    def __init__(self, ctx):
        super().__init__()
        self.net, self.times = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)), 0
        self.here = ctx.params.wrong and ctx.attempt == 1 and ctx.rank == 1
        self.ctx = ctx

    def forward(self, x):
        self.times += self.here and self.ctx.step == 5
        return self.net(x) * (1 + 1e-6 * (self.times == 2))


def train(ctx):
    model = ctx.parallelize(Wrong(ctx))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.randn(32, 4)), global_batch_size=8)
    noise = torch.Generator().manual_seed(ctx.rank)
    ctx.track(model=model, optimizer=optimizer, loader=loader, noise=noise)

    def loss(y, x):
        return (y - x + 0.1 * torch.randn(x.shape, generator=noise)).square().mean()

    for step in ctx.steps(8):
        (x,) = next(loader)
        ctx.backward(model, x, loss, x, micro_batch_size=3)
        ctx.update(optimizer)
    state = getattr(model, "module", model).state_dict()
    return {name: one.double().sum().item() for name, one in state.items()}
"""


def test_every_so_many_steps_are_computed_again_and_change_nothing(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(WRONG)
    (project.path / "toy.yaml").write_text(YAML.replace("{bad: 5, by_hand: false, broken: -1}", "{wrong: false}"))
    checkpoints = ("checkpoint.every=2", "checkpoint.memory=off")
    project.submit("--local", *checkpoints)
    plain = status(project.run_of())
    project.submit("--local", *checkpoints, "verify_every=3", "--fresh")
    assert status(project.runs[-1])["result"] == plain["result"], "bit for bit"
    project.submit("--local", *checkpoints, "verify_every=3", "params.wrong=true")
    run = project.run_of("params.wrong=true")
    first, last = status(run)["attempts"]
    assert "HardwareFault: step 5 had another result when it was repeated: rank 1 on " in first["failure"]["error"]
    assert [(e["step"], e["rank"]) for e in events(run) if e["event"] == "hardware_fault"] == [(5, 1)]
    assert (last["cause"], last["first_step"], status(run)["result"]) == ("finished", 4, plain["result"])
    for override, said in (
        ("parallel=zero3", "verify_every: found a number of steps, but ranks that share a model out"),
        ("verify_every=-1", "verify_every: found -1"),
    ):
        refused = jobkit(project, "submit", "toy.yaml", "--local", "verify_every=3", override, expect=2)
        assert said in refused.stderr
