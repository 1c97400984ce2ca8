"""EmaAdamW is torch's AdamW beside torch's AveragedModel; schedules are their formulas."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from harness.ranks import make_context, run_ranks
from oracle import plain, under_ctx
from oracle.under_ctx import difference
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import jobkit
from jobkit.wire.group import RankGroup

ADAM = {"lr": 0.02, "weight_decay": 0.1}
DECAY, STEPS = 0.3, 6
"""By n = 3 the decay has grown to it: (1 + n) / (10 + n)."""

Averages = tuple[plain.Seen, list[plain.Arrays]]


def averages(ranks: RankGroup, folder: Path, data: str, fused: bool | None) -> Averages:
    """Return what plain torch saw, and of ctx: weights, those within evaluating, those after it, and final/'s."""
    make = torch.optim.AdamW
    expected = plain.train(ranks, steps=STEPS, make=make, ema_decay=DECAY, fused=fused is None, **ADAM)
    ctx = make_context(folder, ranks, under_ctx.config(parallel={"data": data}))
    model = ctx.parallelize(plain.net())
    optimizer = ctx.optimizer(model, jobkit.optim.fused_ema_adam, ema_decay=DECAY, fused=fused, **ADAM)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(STEPS):
        batch = plain.share(ranks, plain.batch_of(step))
        ctx.backward(model, batch, plain.mse, global_batch_size=plain.BATCH)
        ctx.update(optimizer)
    seen = [plain.arrays(model.named_parameters())]
    with ctx.evaluating(model, optimizer):
        seen.append(plain.arrays(model.named_parameters()))
    seen.append(plain.arrays(model.named_parameters()))
    ctx.finish()
    ranks.barrier()
    return expected, [*seen, plain.arrays(load_file(ctx.run_dir / "final" / "model.safetensors").items())]


@pytest.mark.parametrize(
    ("data", "world_size", "fused"), [("ddp", 1, None), ("ddp", 1, False), ("ddp", 3, None), ("zero1", 3, None)]
)
def test_averages_are_those_of_an_averaged_model_and_the_final_weights(
    tmp_path: Path, data: str, world_size: int, fused: bool | None
) -> None:
    for expected, (trained, within, after, final) in run_ranks(averages, world_size, tmp_path, data, fused):
        for name, weight in expected.weights[-1].items():
            assert difference(trained[name], weight) == difference(after[name], weight) == 0.0
            average = expected.final[name]
            assert difference(average, weight) > 1e-3
            # The average is moved by lerp in one, by two products in the other.
            assert difference(within[name], average) < 1e-6 and difference(final[name], average) < 1e-6


@pytest.mark.parametrize("order", [("real", "complex"), ("complex", "real")])
def test_each_group_takes_the_kernel_that_it_may(order: tuple[str, str]) -> None:
    """torch's fused AdamW takes no complex numbers; the group of the others keeps it, in either order."""

    def parameter(kind: str) -> nn.Parameter:
        dtype = torch.complex64 if kind == "complex" else torch.float32
        return nn.Parameter(torch.randn(64, dtype=dtype, generator=torch.Generator().manual_seed(5)))

    optimizer = jobkit.optim.EmaAdamW([{"params": [parameter(kind)]} for kind in order], **ADAM)
    alone = {kind: torch.optim.AdamW([parameter(kind)], **ADAM, fused=kind == "real" or None) for kind in order}
    for step in range(STEPS):
        for kind, group in zip(order, optimizer.param_groups, strict=True):
            for same in (group["params"][0], alone[kind].param_groups[0]["params"][0]):
                same.grad = same.detach() * math.sin(step + 1)
            alone[kind].step()
        optimizer.step()
    for kind, group in zip(order, optimizer.param_groups, strict=True):
        assert group["fused"] is (True if kind == "real" else None)
        assert torch.equal(group["params"][0], alone[kind].param_groups[0]["params"][0])


def replicas(ranks: RankGroup, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Return a rank's own weights between two averages of local SGD, those within ctx.averaged, and those after it."""
    ctx = make_context(folder, ranks, under_ctx.config(comm={"local_sgd": 9}))
    model = ctx.parallelize(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    for _ in ctx.steps(1):
        ctx.backward(model, (torch.full((1, 3), ranks.rank + 1.0), torch.ones(1, 1)), plain.mse, global_batch_size=3)
        ctx.update(optimizer)
        own = model.weight[0].tolist()
        with ctx.averaged(optimizer):
            within = model.weight[0].tolist()
        after = model.weight[0].tolist()
    return own, within, after


def test_an_evaluation_under_local_sgd_is_of_the_mean_of_all_replicas(tmp_path: Path) -> None:
    owns, withins, afters = zip(*run_ranks(replicas, 3, tmp_path), strict=True)
    assert owns == afters and len(set(map(tuple, owns))) == 3
    for within in withins:
        assert within == pytest.approx(torch.tensor(owns).mean(0).tolist())


def test_the_cosine_is_torchs_after_its_warm_up() -> None:
    parameters = nn.Linear(1, 1).parameters
    ours = torch.optim.SGD(parameters(), lr=0.3)
    scheduler = jobkit.schedule.cosine(ours, steps=50, warmup=10, floor=0.1)
    theirs = torch.optim.SGD(parameters(), lr=0.3)
    rising, falling = LinearLR(theirs, 0.1, total_iters=9), CosineAnnealingLR(theirs, 40, eta_min=0.03)
    expected = SequentialLR(theirs, [rising, falling], [10])
    for step in range(50):
        rate = ours.param_groups[0]["lr"]
        assert rate == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-6)  # torch's is computed from step to step
        if step >= 10:
            assert rate == pytest.approx(0.03 + 0.27 * (1 + math.cos(math.pi * (step - 10) / 40)) / 2, rel=1e-12)
        for optimizer, schedule in ((ours, scheduler), (theirs, expected)):
            optimizer.step()
            schedule.step()
