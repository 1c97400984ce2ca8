"""Who draws alike, and what an evaluation returns and leaves alone."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.ranks import make_context, run_ranks
from oracle import plain, under_ctx
from torch import Tensor, nn

from jobkit.group import RankGroup

N = 297
X = torch.rand(N, 3, generator=torch.Generator().manual_seed(0))


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def draws(ranks: RankGroup, folder: Path, seed: int) -> tuple[list[float], list[float], list[float]]:
    """Return numbers drawn before the loop, in its first step, and in its second."""
    ctx = make_context(folder, ranks, under_ctx.config(seed=seed))
    ctx.track(model=nn.Linear(1, 1))
    before = draw()
    first, second = [draw() for _ in ctx.steps(2)]
    return before, first, second


def test_ranks_draw_alike_before_the_loop_and_each_its_own_within(tmp_path: Path) -> None:
    answers = [run_ranks(draws, 3, tmp_path / str(seed), seed) for seed in (0, 1)]
    for ranks in answers:
        assert len({tuple(before) for before, _, _ in ranks}) == 1
    for generator in range(3):
        within = [step[generator] for ranks in answers for _, *steps in ranks for step in steps]
        assert len(set(within)) == 2 * 3 * 2
    assert answers[0][0][0] != answers[1][0][0]
    assert run_ranks(draws, 3, tmp_path / "again", 0) == answers[0]


def draws_of_parts(ranks: RankGroup, folder: Path, parallel: dict[str, Any]) -> list[float]:
    ctx = make_context(folder, ranks, under_ctx.config(parallel=parallel))
    ctx.track(model=nn.Linear(1, 1))
    return [value for _ in ctx.steps(1) for value in draw()]


def test_ranks_that_compute_the_same_samples_draw_alike(tmp_path: Path) -> None:
    for axis, alike in (("tensor", [0, 0, 2, 2]), ("pipeline", [0, 1, 0, 1])):
        answers = run_ranks(draws_of_parts, 4, tmp_path / axis, {axis: 2})
        assert [answers.index(answer) for answer in answers] == alike


def evaluation(ranks: RankGroup, folder: Path) -> tuple[Any, ...]:
    """Return a mean, the numbers that the function drew for each sample, and draws of the step after it."""
    ctx = make_context(folder, ranks, under_ctx.config())
    ctx.track(model=nn.Linear(1, 1))
    drawn: list[int] = []

    def values(batch: Tensor, ids: Tensor) -> dict[str, Tensor]:
        drawn.extend(ids.tolist())
        return {"error": plain.error(batch), "noise": torch.rand(len(ids)) + random.random() + float(np.random.rand())}

    for _ in ctx.steps(1):
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        mean = ctx.evaluate(values, X, batch_size=20)
        assert torch.equal(torch.get_rng_state(), state[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
        # A worker loads the batches: the generators here are not those that loading has seeded.
        noise = ctx.evaluate_samples(values, X, batch_size=20, num_workers=1)["noise"].tolist()
    return mean["error"], noise, drawn


def test_an_evaluation_is_the_exact_mean_and_moves_no_generator(tmp_path: Path) -> None:
    plainly: list[float] = [value for begin in range(0, N, 20) for value in plain.error(X[begin : begin + 20]).tolist()]
    expected = math.fsum(plainly) / N
    assert expected not in (sum(plainly) / N, float(torch.tensor(plainly, dtype=torch.float64).mean()))
    noises = []
    for world_size in (1, 2, 3):
        answers = run_ranks(evaluation, world_size, tmp_path / str(world_size))
        assert [mean for mean, _, _ in answers] == [expected] * world_size
        assert sorted(sample for _, _, drawn in answers for sample in drawn) == sorted(2 * [*range(N)])
        noises += [noise for _, noise, _ in answers]
    assert all(noise == noises[0] for noise in noises) and len(set(noises[0])) == N
