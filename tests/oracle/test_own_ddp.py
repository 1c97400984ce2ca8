"""DistributedDataParallel of a script's own goes on after a kill as plain torch's that nothing interrupts."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import make_context, run_ranks
from oracle import plain, under_ctx
from oracle.under_ctx import difference
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

from jobkit.config.schema import CheckpointConfig
from jobkit.log import log
from jobkit.wire.group import RankGroup

STEPS, SIZE, KILLED = 6, 12, 5
"""The kill comes between the two batches of an update that accumulates them; the next step would hide other buffers."""

Weights = dict[str, plain.Arrays]


def attempt(ranks: RankGroup, folder: Path, number: int, is_killed: bool) -> tuple[int, Weights]:
    """Return the step in which an attempt begins, and the weights of each DDP when it is over."""
    config = under_ctx.config(checkpoint=CheckpointConfig(every=1, memory="off"))
    early = plain.OwnDdp()  # a script that forms the process group may make it before jobkit.init
    ctx = make_context(folder, ranks, config, number)
    tried: plain.OwnDdp | None = plain.OwnDdp()
    if not ranks.is_main:  # a rank that gave it up may have it until Python frees it
        tried = None
        gc.collect()
    pair = dist.new_group([0, 1])
    beside = plain.OwnDdp(process_group=pair) if ranks.rank < 2 else None
    trained = {name: early if name == "early" else plain.OwnDdp(**way) for name, way in plain.OWN_DDP.items()}
    models: dict[str, Any] = {name: own.model for name, own in trained.items()}
    models["in_another"] = nn.ModuleDict({"net": models["in_another"]})
    models["tracked_inside"] = models["tracked_inside"].module
    models["average"] = AveragedModel(models["averaged"])
    ctx.track(**models, **{f"{name}_optimizer": own.optimizer for name, own in trained.items()})
    first = ctx.step
    for step in ctx.steps(STEPS):
        ctx._checkpointer.wait()
        if is_killed and step == KILLED:
            break
        for own in trained.values():
            own.step(step, plain.share(ranks, plain.batch_of_points(step, SIZE)))
        models["average"].update_parameters(models["averaged"])
    assert [tried is None, beside is None] == [not ranks.is_main, ranks.rank == 2]
    return first, {name: plain.arrays(own.model.state_dict().items()) for name, own in trained.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Weights], list[Weights], list[Weights]]:
    """The weights of each rank: of plain torch, of jobkit without an interruption, and after a kill."""
    folder = tmp_path_factory.mktemp("own_ddp")
    plainly = run_ranks(plain.train_own_ddp, 3, STEPS, SIZE)
    straight = run_ranks(attempt, 3, folder / "straight", 1, False)
    run_ranks(attempt, 3, folder / "killed", 1, True)
    continued = run_ranks(attempt, 3, folder / "killed", 2, False)
    assert [first for first, _ in continued] == [KILLED] * 3
    return plainly, [weights for _, weights in straight], [weights for _, weights in continued]


@pytest.mark.parametrize("way", plain.OWN_DDP)
def test_a_killed_ddp_of_a_script_ends_with_the_weights_of_plain_torch(trained: Any, way: str) -> None:
    """A static graph has its buckets laid out a step before torch would: only jobkit itself has the same bits."""
    plainly, straight, continued = trained
    for right, weights in zip(straight if way.startswith("static") else plainly, continued, strict=True):
        assert set(right[way]) == set(weights[way])
        assert max(difference(right[way][name], weights[way][name]) for name in right[way]) == 0.0


def in_backward() -> nn.Module:
    net = plain.crossed()
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.05})
    return net


def lines(ranks: RankGroup, folder: Path) -> list[str]:
    """Return the warnings of an attempt up to its loop."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    ctx = make_context(folder, ranks, under_ctx.config())
    net, kind = plain.crossed(), _MixedPrecision(param_dtype=torch.bfloat16)
    delayed = {"delay_all_reduce_named_params": [("last.bias", net.last.bias)]}
    models = [
        DistributedDataParallel(net, **delayed, param_to_hook_all_reduce=net.first.weight),
        DistributedDataParallel(plain.crossed(), mixed_precision=kind),
        DistributedDataParallel(in_backward()),
        DistributedDataParallel(plain.crossed()),
        DistributedDataParallel(plain.crossed(), find_unused_parameters=True),
    ]
    for model in models[-2:]:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    ctx.track(models=nn.ModuleList([*models, AveragedModel(models[0])]))
    next(iter(ctx.steps(1)))
    return seen


def test_a_ddp_whose_order_cannot_be_kept_is_said_by_one_rank_of_three_or_more(tmp_path: Path) -> None:
    """DDP that looks for unused parameters never changes its buckets, and a copy in an average has no gradients."""
    first, *others = run_ranks(lines, 3, tmp_path / "three")
    said = ["delay_all_reduce_named_params", "mixed_precision", "an optimizer that steps in backward", "a built-in"]
    assert [len([line for line in first if f"DistributedDataParallel with {words}" in line]) for words in said] == [
        1
    ] * 4
    assert len(first) == 4 and others == [[], []]
    assert run_ranks(lines, 2, tmp_path / "two") == [[], []]
