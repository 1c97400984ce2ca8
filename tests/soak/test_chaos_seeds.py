"""Five plans of twenty interruptions each on Slurm and here; tests/slurm/test_chaos.py has two short ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import SOAK_SEEDS, Chaos, slurm_of_our_own
from chaos_plan import choose, draw

EVENTS = 20


@pytest.mark.parametrize("seed", SOAK_SEEDS)
@pytest.mark.parametrize("place", ["slurm", "local"])
def test_a_run_comes_through_twenty_interruptions(tmp_path: Path, place: str, seed: int) -> None:
    plan = draw(seed, EVENTS, *choose("", place))
    if place == "local":
        trial = Chaos(tmp_path).trial(seed, plan, None)
    else:
        with slurm_of_our_own() as cluster:  # some interruptions disturb all jobs of a cluster
            trial = Chaos(tmp_path).trial(seed, plan, cluster)
    assert not trial.problems, "\n".join(map(str, [*trial.rows, *trial.problems]))
