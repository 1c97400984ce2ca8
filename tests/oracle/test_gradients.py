"""Gradients and steps of `ctx` are plain torch's, on 1, 2 and 3 ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import make_context, run_ranks
from oracle import plain, under_ctx
from oracle.under_ctx import differences

from jobkit.wire.group import RankGroup

ROUNDED = 1e-6
"""Where the same numbers are added up in another order, or a norm is squared and its root taken."""

Both = dict[str, tuple[plain.Seen, plain.Seen]]


def uneven(step: int) -> plain.Batch:
    """Return a batch that neither 2 nor 3 ranks divide."""
    return plain.batch_of(step, 13)


def trainings(ranks: RankGroup, folder: Path) -> Both:
    """Train both ways in these processes; the plain one first, which knows nothing of the other."""
    count = {1: 3, 2: 3, 3: 2}[ranks.world_size]  # micro-batches of one size
    once = plain.train(ranks)
    whole = plain.train(plain.ALONE, plain.whole, batches=uneven)
    micro, clipped = plain.train(ranks, count=count), plain.train(ranks, max_norm=0.05)
    plainly = {"own": once, "ctx": once, "micro": micro, "uneven": whole, "uneven micro": whole, "clipped": clipped}
    options: dict[str, dict[str, Any]] = {
        "own": {"own": True},
        "ctx": {},
        "micro": {"micro_batch_size": 12 // ranks.world_size // count},
        "uneven": {"batches": uneven},
        "uneven micro": {"batches": uneven, "micro_batch_size": 2},
        "clipped": {"max_norm": 0.05},
    }
    return {name: (plainly[name], under_ctx.train(ranks, folder / name, **options[name])) for name in options}


BITS = ("own", "ctx", "micro", "clipped")
"""Of these the same numbers are added up in the same order."""


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_and_weights_are_those_of_plain_torch(tmp_path: Path, world_size: int) -> None:
    for both in run_ranks(trainings, world_size, tmp_path):
        for name, (expected, seen) in both.items():
            allowed = 0.0 if name in BITS else ROUNDED
            assert max(differences(expected, seen).values()) <= allowed, (name, differences(expected, seen))
            assert name == "own" or seen.losses == pytest.approx(expected.losses, rel=ROUNDED), name
            assert seen.norms == pytest.approx(expected.norms, rel=ROUNDED), name


def messages(ranks: RankGroup, folder: Path, data: str, micro_batch_size: int | None) -> tuple[Any, ...]:
    """Return, of a ctx.backward, how often torch sent gradients and gathered weights, and the sizes of the batches."""
    ctx = make_context(folder, ranks, under_ctx.config(parallel={"data": data}))
    model, sizes = ctx.parallelize(plain.net()), []
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    batch = plain.share(ranks, plain.batch_of(0))
    for _ in range(2):  # DDP's first backward is a rehearsal
        sizes.clear()
        with torch.profiler.profile() as profile:
            ctx.backward(model, batch, plain.mse, global_batch_size=plain.BATCH, micro_batch_size=micro_batch_size)
    ctx.close()
    counts = {event.key: event.count for event in profile.key_averages()}
    sent = counts.get("c10d::_reduce_scatter_base_", 0) or counts["c10d::allreduce_"] - 1  # that is the loss's
    return sent, counts.get("c10d::_allgather_base_", 0), sizes


@pytest.mark.parametrize(("data", "sent", "gathered"), [("ddp", 1, 0), ("zero2", 4, 4), ("zero3", 4, 8)])
def test_only_the_last_micro_batch_communicates(tmp_path: Path, data: str, sent: int, gathered: int) -> None:
    """A bucket of DDP, or four sharded blocks, whose weights zero3 gathers again for backward."""
    assert run_ranks(messages, 2, tmp_path / "one", data, None) == 2 * [(sent, gathered, [6])]
    for answer in run_ranks(messages, 2, tmp_path / "three", data, 2):
        assert (answer[0], answer[2]) == (sent, [2, 2, 2])


def test_what_is_right_is_said_without_jobkit() -> None:
    imported = re.findall(r"^\s*(?:from|import) (\w+)", Path(plain.__file__).read_text(), re.MULTILINE)
    assert "torch" in imported and not {"jobkit", "harness", "oracle"} & set(imported)
