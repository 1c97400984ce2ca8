"""What `parallel:`, `comm:` and `precision:` make of a training is what torch's own parts make of it by hand."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from oracle import plain, under_ctx
from oracle.under_ctx import difference, differences

from jobkit.config.schema import CheckpointConfig
from jobkit.wire.group import RankGroup

LONG = 13
"""PowerSGD sends whole gradients in its first ten steps."""

BF16, FP16 = torch.bfloat16, torch.float16
overflows: dict[str, Any] = {"batches": plain.with_overflow, "max_norm": 0.5}

CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero1": (3, {"spread": plain.zero1}, {"parallel": {"data": "zero1"}}),
    "zero2": (3, {"spread": partial(plain.sharded, reshard=False)}, {"parallel": {"data": "zero2"}}),
    "zero3": (3, {"spread": partial(plain.sharded, reshard=True)}, {"parallel": {"data": "zero3"}, "own": True}),
    "zero3-clipped": (
        3,
        {"spread": partial(plain.sharded, reshard=True), "max_norm": 0.05},
        {"parallel": {"data": "zero3"}, "max_norm": 0.05},
    ),
    "hsdp": (
        4,
        {"spread": partial(plain.sharded, reshard=True, replicas=2)},
        {"parallel": {"data": "hsdp", "shards": 2}},
    ),
    "tensor": (2, {"place": plain.ALONE, "spread": plain.tensor}, {"parallel": {"tensor": "all"}}),
    "tensor-by-hand": (2, {"place": plain.ALONE, "spread": plain.tensor}, {"parallel": {"tensor": "all"}, "own": True}),
    "pipeline": (
        3,
        {"place": plain.ALONE, "spread": plain.whole, "max_norm": 0.05},
        {"parallel": {"pipeline": "all"}, "max_norm": 0.05},
    ),
    "local-sgd": (3, {"spread": plain.whole, "average_every": 3}, {"comm": {"local_sgd": 3}}),
    "fp16-hook": (3, {"spread": partial(plain.hooked, power_sgd=False)}, {"comm": {"hook": "fp16"}}),
    "powersgd": (
        2,
        {"spread": partial(plain.hooked, power_sgd=True), "steps": LONG},
        {"comm": {"hook": "powersgd", "powersgd_rank": 2}, "steps": LONG},
    ),
    "bf16": (3, {"dtype": BF16}, {"precision": "bf16"}),
    "fp16": (2, {"dtype": FP16, **overflows}, {"precision": "fp16", **overflows}),
    "bf16-sharded": (3, {"dtype": BF16}, {"precision": "bf16", "parallel": {"data": "zero3"}}),
    "fp16-sharded": (
        2,
        {"dtype": FP16, **overflows},
        {"precision": "fp16", "parallel": {"data": "zero2"}, **overflows},
    ),
    "fp16-on-one-rank": (1, {"dtype": FP16, **overflows}, {"precision": "fp16", **overflows}),
}
"""By name: the ranks, options of plain.train, options of under_ctx.train."""

ROUNDED = {"pipeline": 1e-6, "zero3-clipped": 1e-6, "bf16-sharded": 1e-6, "fp16-sharded": 1e-6}
"""A pipeline's micro-batches add up in another order than a whole batch, and torch adds a norm up tensor by tensor over
the ranks; in all other cases torch does the same by hand."""

OWN_LOSS = ("local-sgd", "zero3", "tensor-by-hand")
"""Here a rank sees the loss of its own samples."""


def trainings(ranks: RankGroup, folder: Path, name: str, attempt: int = 1) -> tuple[plain.Seen, plain.Seen]:
    _, plainly, options = CASES[name]
    return plain.train(**{"place": ranks, **plainly}), under_ctx.train(ranks, folder, attempt=attempt, **options)


@pytest.mark.parametrize("name", CASES)
def test_a_way_to_train_is_the_one_of_torch(tmp_path: Path, name: str) -> None:
    for expected, seen in run_ranks(trainings, CASES[name][0], tmp_path, name):
        assert max(differences(expected, seen).values()) <= ROUNDED.get(name, 0.0), differences(expected, seen)
        assert name in OWN_LOSS or seen.losses == pytest.approx(expected.losses, rel=1e-6)
        assert seen.norms == pytest.approx(expected.norms, rel=1e-6, nan_ok=True)
        assert name in ("pipeline", "bf16-sharded", "fp16-sharded") or seen.kept == expected.kept
        if name.startswith("fp16-on"):  # the one update that is left out, and the scale after it
            values = [weights["0.up.weight"] for weights in seen.weights]
            assert [difference(*pair) == 0.0 for pair in pairwise(values)] == [False, True, False]


def dies(ranks: RankGroup, folder: Path, name: str) -> None:
    options = CASES[name][2]
    die_at = options.get("steps", plain.STEPS) - 1
    under_ctx.train(ranks, folder, die_at=die_at, checkpoint=CheckpointConfig(every=die_at, memory="off"), **options)


@pytest.mark.parametrize("name", ["zero3", "local-sgd", "powersgd", "fp16"])
def test_its_last_step_is_the_one_of_torch_after_a_kill(tmp_path: Path, name: str) -> None:
    run_ranks(dies, CASES[name][0], tmp_path, name)
    for expected, seen in run_ranks(trainings, CASES[name][0], tmp_path, name, 2):
        assert len(seen.weights) == 1  # the checkpoint was that of the step before
        expected.gradients, expected.weights = expected.gradients[-1:], expected.weights[-1:]
        assert max(differences(expected, seen).values()) == 0.0, differences(expected, seen)
