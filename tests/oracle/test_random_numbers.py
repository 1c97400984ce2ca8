"""Who draws alike, and what an evaluation returns and leaves alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.ranks import make_context, run_ranks
from oracle import plain, under_ctx
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from jobkit.config.schema import CheckpointConfig
from jobkit.data.seeds import derive_seed
from jobkit.wire.group import RankGroup

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


def seeded(seed: int) -> list[float]:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
    return draw()


def test_ranks_draw_alike_before_the_loop_and_each_its_own_within(tmp_path: Path) -> None:
    answers = [run_ranks(draws, 3, tmp_path / str(seed), seed) for seed in (0, 1)]
    # Draws before the loop are no seeds.
    assert [within for _, within, _ in answers[1]] == [seeded(derive_seed(1, "rank", rank)) for rank in range(3)]
    for ranks in answers:
        assert len({tuple(before) for before, _, _ in ranks}) == 1
    for generator in range(3):
        within = [step[generator] for ranks in answers for _, *steps in ranks for step in steps]
        assert len(set(within)) == 2 * 3 * 2
    assert answers[0][0][0] != answers[1][0][0]
    assert run_ranks(draws, 3, tmp_path / "again", 0) == answers[0]


def draws_of_parts(ranks: RankGroup, folder: Path, parallel: dict[str, Any], seed: int) -> list[float]:
    ctx = make_context(folder, ranks, under_ctx.config(parallel=parallel))
    if seed:
        SEEDED_BY["all"](seed + ranks.rank)  # as many a script does
        torch.rand(ranks.rank)
    ctx.track(model=nn.Linear(1, 1))
    return [value for _ in ctx.steps(1) for value in draw()]


def test_ranks_that_compute_the_same_samples_draw_alike(tmp_path: Path) -> None:
    for axis, alike in (("tensor", [0, 0, 2, 2]), ("pipeline", [0, 1, 0, 1])):
        for seed in (0, 7):
            answers = run_ranks(draws_of_parts, 4, tmp_path / f"{axis}{seed}", {axis: 2}, seed)
            assert [answers.index(answer) for answer in answers] == alike


# Programs that seed themselves

Seen = tuple[list[float], list[bool], list[float]]
"""Samples, a dropout mask, and a number of each generator, of some steps."""

SEEDED_BY: dict[str, Callable[[int], object]] = {
    "torch": torch.manual_seed,
    "NumPy": np.random.seed,
    "Python": random.seed,
    "all": lambda seed: (random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)),
}

SEEDS = range(5)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12.0)), batch_size=3, shuffle=True)


def seen_in(batches: Iterable[list[Tensor]], ends_after: int = 4) -> Iterator[Seen]:
    for _, (batch,) in zip(range(ends_after), batches, strict=False):
        yield batch.tolist(), (nn.functional.dropout(torch.ones(20)) > 0).tolist(), draw()


def seen_plainly(seed: int) -> list[Seen]:
    seeded(seed)
    np.random.rand(100)
    return list(seen_in(loader()))


def seen_under_ctx(
    ranks: RankGroup, folder: Path, way: str, seed: int, ends_after: int = 4, attempt: int = 1, every: Any = "off"
) -> list[Seen]:
    checkpoint = CheckpointConfig(every=every, memory="off")
    ctx = make_context(folder, ranks, under_ctx.config(checkpoint=checkpoint), attempt)
    SEEDED_BY[way](seed)
    np.random.rand(100)
    seen: list[Seen] = []
    for _ in ctx.epochs(1, model=nn.Linear(1, 1)):
        seen += seen_in(ctx.batches(loader()), ends_after)
        ctx._checkpointer.wait()
        break
    return seen


@pytest.mark.parametrize("way", SEEDED_BY)
def test_a_study_over_seeds_of_the_program_s_own_sees_others_each_time(tmp_path: Path, way: str) -> None:
    def study(see: Callable[[int], list[Seen]]) -> list[int]:
        """Return the number of different orders, masks, and numbers of each generator."""
        studies = [see(seed) for seed in SEEDS]
        parts = [[repr([step[part] for step in seen]) for seen in studies] for part in range(2)]
        parts += [[repr([step[2][part] for step in seen]) for seen in studies] for part in range(3)]
        return [len(set(part)) for part in parts]

    def see(seed: int) -> list[Seen]:
        folder = tmp_path / str(seed)
        (seen,) = run_ranks(seen_under_ctx, 1, folder, way, seed, 2)
        # The next attempt has these numbers again, whatever it seeds: there is no checkpoint.
        assert run_ranks(seen_under_ctx, 1, folder, way, seed + 100, 2, 2) == [seen]
        return seen  # type: ignore[no-any-return]

    assert study(see) == study(seen_plainly) == [len(SEEDS)] * 5


def test_seeds_of_the_program_s_own_outlive_kills_and_each_rank_draws_its_own(tmp_path: Path) -> None:
    straight = run_ranks(seen_under_ctx, 3, tmp_path / "straight", "all", 3)
    assert len({repr(mask) for seen in straight for _, mask, _ in seen}) == 3 * 4
    folder = tmp_path / "killed"
    lost = run_ranks(seen_under_ctx, 3, folder, "all", 3, 1)
    first = run_ranks(seen_under_ctx, 3, folder, "all", 3, 3, 2, 2)
    rest = run_ranks(seen_under_ctx, 3, folder, "all", 3, 4, 3, 2)
    for whole, *parts in zip(straight, lost, first, rest, strict=True):
        assert [whole[:1], whole[:3], whole[2:]] == parts


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
