"""An interrupted training under `ctx` ends as plain torch's that nothing interrupts, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import make_context, run_ranks
from oracle import plain, under_ctx
from oracle.under_ctx import difference
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from jobkit.config.schema import CheckpointConfig
from jobkit.errors import Stopped
from jobkit.loop.context import Context
from jobkit.wire.group import RankGroup

STEPS, SIZE = 9, 12
EVERY_4, EVERY_1 = (CheckpointConfig(every=every, memory="off") for every in (4, 1))


def is_equal(one: plain.Arrays, other: plain.Arrays) -> bool:
    return set(one) == set(other) and all(difference(one[name], other[name]) == 0.0 for name in one)


def interrupt(ctx: Context, kind: str | None, at: int = 6) -> bool:
    """In a step ask for a stop, or leave the loop as by a kill: return True for that."""
    if kind == "stop" and ctx.step == at:
        ctx._rank.page.ask_to_stop()
    if kind == "kill" and ctx.step == at:
        ctx._checkpointer.wait()
    return kind == "kill" and ctx.step == at


def uninterrupted(ranks: RankGroup) -> plain.Arrays:
    return plain.train_uninterrupted(ranks, STEPS, SIZE)


def attempt(
    ranks: RankGroup, folder: Path, number: int, kind: str | None, static_graph: bool = False
) -> tuple[int, plain.Arrays | None]:
    """Return the step in which an attempt began, and the weights if it came to the end."""
    config = under_ctx.config(checkpoint=EVERY_1 if static_graph else EVERY_4, comm={"bucket_cap_mb": 1})
    ctx = make_context(folder, ranks, config, number)
    model = ctx.parallelize(plain.crossed(), static_graph=static_graph)
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = ctx.loader(plain.points(96), global_batch_size=SIZE, shuffle=False)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    first = ctx.step
    try:
        for _ in ctx.steps(STEPS):
            if interrupt(ctx, kind, at=1 if static_graph else 6):
                return first, None
            ctx.backward(model, next(loader), plain.mse)
            ctx.update(optimizer)
            scheduler.step()
    except Stopped:
        return first, None
    ctx.finish()
    return first, plain.arrays(model.named_parameters())


@pytest.mark.parametrize("kind", ["stop", "kill"])
def test_three_ranks_of_ddp_end_with_the_weights_of_plain_torch(tmp_path: Path, kind: str) -> None:
    expected = run_ranks(uninterrupted, 3)
    assert {weights for _, weights in run_ranks(attempt, 3, tmp_path, 1, kind)} == {None}
    for (first, weights), right in zip(run_ranks(attempt, 3, tmp_path, 2, None), expected, strict=True):
        assert first == 4 if kind == "kill" else first in (7, 8)
        assert weights is not None and is_equal(weights, right)


def test_two_ranks_go_on_with_the_samples_of_three(tmp_path: Path) -> None:
    """Their sums are rounded otherwise."""
    expected = run_ranks(uninterrupted, 3)[0]
    run_ranks(attempt, 3, tmp_path, 1, "kill")
    for first, weights in run_ranks(attempt, 2, tmp_path, 2, None):
        assert first == 4 and weights is not None
        assert max(difference(weights[name], expected[name]) for name in expected) < 1e-6


def test_a_static_graph_goes_on_after_its_first_step(tmp_path: Path) -> None:
    """It has its buckets laid out a step before torch would: only jobkit itself has the same bits."""
    expected = run_ranks(attempt, 3, tmp_path / "straight", 1, None, True)
    run_ranks(attempt, 3, tmp_path / "killed", 1, "kill", True)
    for (first, weights), (_, right) in zip(
        run_ranks(attempt, 3, tmp_path / "killed", 2, None, True), expected, strict=True
    ):
        assert first == 1 and weights is not None and right is not None and is_equal(weights, right)


def epochs(ranks: RankGroup, folder: Path, number: int, kind: str | None) -> tuple[Any, list[float]]:
    """Return the weights, and numbers drawn in each step of this attempt."""
    ctx = make_context(folder, ranks, under_ctx.config(checkpoint=EVERY_4, seed=None), number)
    model, loader, drawn = ctx.parallelize(plain.dropped()), DataLoader(plain.points(24), batch_size=4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    state = ctx.values(scale=1.0)
    for _ in ctx.epochs(3, model=model, optimizer=optimizer):
        state.scale *= 0.5
        offset = state.scale * torch.rand(1)
        for x, y in ctx.batches(loader):
            if interrupt(ctx, kind):
                return None, drawn
            plain.mse(model(x + offset), y).backward()
            drawn.append(torch.rand(()).item())
            if (ctx.step + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return plain.arrays(model.named_parameters()), drawn


def plain_epochs(ranks: RankGroup) -> tuple[plain.Arrays, list[float]]:
    return plain.train_epochs(3)


def test_an_epoch_that_is_broken_off_goes_on_with_its_draws_values_and_gradients(tmp_path: Path) -> None:
    """The checkpoint of step 4 holds a gradient that no optimizer has used."""
    (expected, drawn), *_ = run_ranks(plain_epochs, 1)
    (_, first), *_ = run_ranks(epochs, 1, tmp_path, 1, "kill")
    (weights, second), *_ = run_ranks(epochs, 1, tmp_path, 2, None)
    assert first == drawn[:6] and second == drawn[4:]
    assert is_equal(weights, expected)


class Words:
    """A model with a sparse embedding, whose gradients are added up over six batches with words in common."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.embedding, self.head = torch.nn.Embedding(5, 8, sparse=True), torch.nn.Linear(8, 1)
        self.sparse = torch.optim.SparseAdam(self.embedding.parameters(), lr=0.05)
        self.dense = torch.optim.Adam(self.head.parameters(), lr=0.05)
        self.batches = torch.randint(0, 5, (STEPS, 16))

    def step(self, number: int) -> float:
        loss = (self.head(self.embedding(self.batches[number])) - 1).square().mean()
        loss.backward()
        if number % 6 == 5:
            for optimizer in (self.sparse, self.dense):
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()


def words(ranks: RankGroup, folder: Path, number: int, kind: str | None) -> list[float]:
    ctx, own = make_context(folder, ranks, under_ctx.config(checkpoint=EVERY_4), number), Words()
    ctx.track(embedding=own.embedding, head=own.head, sparse=own.sparse, dense=own.dense)
    losses: list[float] = []
    for step in ctx.steps(STEPS):
        if interrupt(ctx, kind):
            return losses
        losses.append(own.step(step))
    return losses


def plain_words(ranks: RankGroup) -> list[float]:
    own = Words()
    return [own.step(number) for number in range(STEPS)]


def test_sparse_gradients_that_are_added_up_go_on(tmp_path: Path) -> None:
    """The checkpoint of step 4 holds rows of four batches, which the optimizer adds up in their order."""
    (expected,) = run_ranks(plain_words, 1)
    (first,) = run_ranks(words, 1, tmp_path, 1, "kill")
    (second,) = run_ranks(words, 1, tmp_path, 2, None)
    assert first == expected[:6] and second == expected[4:]


def own_shards(ranks: RankGroup, folder: Path, number: int, kind: str | None, way: str) -> Any:
    """Return the step in which an attempt began, and the weights and losses that it saw."""
    ctx = make_context(folder, ranks, under_ctx.config(checkpoint=EVERY_4), number)
    own, losses = plain.OwnShards(**plain.OWN_SHARDS[way]), []
    model = own.model
    with torch.no_grad():
        model(plain.batch_of(100)[0])  # a look at what it predicts leaves the root gathered before it is restored
    ctx.track(model=model, optimizer=own.optimizer)
    kinds = {type(parameter.data) for parameter in model.parameters()}
    first = ctx.step
    try:
        for step in ctx.steps(STEPS):
            if interrupt(ctx, kind):
                return first, None, losses
            losses.append(own.step(ranks, step))
    except Stopped:
        return first, None, losses
    assert kinds == {DTensor}
    assert ctx._parallelizer.forward_is_collective  # else the ranks below would wait for each other for minutes
    with ctx.evaluating(model):  # four batches: a rank without one makes the forward of the others all the same
        mean = ctx.evaluate(
            lambda batch, ids: model(batch[0])[:, 0].float(), TensorDataset(*plain.batch_of(100, 7)), batch_size=2
        )
    ctx.finish()
    weights, final = plain.arrays(model.named_parameters()), load_file(ctx.run_dir / "final" / "model.safetensors")
    assert is_equal(plain.arrays(final.items()), weights)  # not what the evaluation had gathered in bf16
    return first, weights, [*losses, mean]


@pytest.mark.parametrize("kind", ["stop", "kill"])
@pytest.mark.parametrize("way", plain.OWN_SHARDS)
def test_a_scripts_own_fsdp_goes_on_with_the_shards_whatever_a_validation_has_gathered(
    tmp_path: Path, kind: str, way: str
) -> None:
    expected = run_ranks(plain.train_own_shards, 3, way)
    for (_, weights, losses), (_, right) in zip(
        run_ranks(own_shards, 3, tmp_path, 1, kind, way), expected, strict=True
    ):
        assert weights is None and losses == right[: len(losses)]
    for (first, weights, losses), (right_weights, right) in zip(
        run_ranks(own_shards, 3, tmp_path, 2, None, way), expected, strict=True
    ):
        assert first == 4 if kind == "kill" else first in (7, 8)
        assert losses == right[first:] and is_equal(weights, right_weights)


def own_shards_by_batches(ranks: RankGroup, folder: Path, number: int) -> plain.Arrays:
    ctx = make_context(folder, ranks, under_ctx.config(checkpoint=EVERY_1), number)
    own = plain.OwnShards()
    for _ in ctx.epochs(1, model=own.model, optimizer=own.optimizer):
        with torch.no_grad():
            own.model(plain.batch_of(100)[0])  # gathered where an epoch that was broken off is restored once more
        for step in ctx.batches(range(STEPS)):
            if interrupt(ctx, "kill" if number == 1 else None):
                break
            own.step(ranks, step)
    return plain.arrays(own.model.named_parameters())


def test_lines_before_a_pass_that_goes_on_may_gather_a_scripts_own_shards(tmp_path: Path) -> None:
    expected = run_ranks(plain.train_own_shards, 3, "whole")
    run_ranks(own_shards_by_batches, 3, tmp_path, 1)
    for weights, (right, _) in zip(run_ranks(own_shards_by_batches, 3, tmp_path, 2), expected, strict=True):
        assert is_equal(weights, right)


def gathered_at_boundaries(ranks: RankGroup, folder: Path) -> list[bool]:
    """Return whether the root is gathered at each step's end, and at the beginning of the next."""
    ctx = make_context(folder, ranks, under_ctx.config())
    own = plain.OwnShards()
    model = own.model
    ctx.track(model=model, optimizer=own.optimizer)
    seen = []
    for _ in ctx.steps(3):
        seen.append(not isinstance(model.shift, DTensor))
        with torch.no_grad():
            model(plain.batch_of(0)[0])
        seen.append(not isinstance(model.shift, DTensor))
    return seen


def test_each_boundary_puts_the_shards_back_whether_a_save_comes_or_not(tmp_path: Path) -> None:
    assert run_ranks(gathered_at_boundaries, 3, tmp_path) == [[False, True] * 3] * 3
