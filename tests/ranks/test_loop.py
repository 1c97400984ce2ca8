"""What docs/training.md promises of the loop and of state: calls, stops, curves, the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import make_context, run_ranks
from harness.training import logged
from torch import nn

from jobkit.errors import Stopped
from jobkit.group import RankGroup
from jobkit.run.schema import BestConfig, CheckpointConfig, Config

SAVES = CheckpointConfig(every=4, memory="off", best=BestConfig(metric="error", mode="min"))


class Buffer:
    """A state of each rank alone, as a replay buffer."""

    def __init__(self, rank: int) -> None:
        self.items, self.tensor = [rank], torch.full((9,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def attempt(ranks: RankGroup, folder: Path, number: int, kind: str = "") -> dict[str, Any]:
    """Train 12 steps; rank 1 is told to stop in the evaluation of step 5, or all leave step 6 as by a kill."""
    ctx = make_context(folder, ranks, Config(name="test", task="m:f", checkpoint=SAVES), number)
    model, buffer, generator = ctx.parallelize(nn.Linear(2, 2)), Buffer(ranks.rank), torch.Generator().manual_seed(3)
    ctx.track(model=model, generator=generator, per_rank={"buffer": buffer})
    state = ctx.values(mine=10 * ranks.rank, seen=torch.zeros(1))
    calls: list[tuple[str, int]] = []
    seen: dict[str, Any] = {
        "calls": calls,
        "buffer": [*buffer.items, *buffer.tensor.tolist()],
        "values": (state.mine, state.seen.item()),
    }
    seen["drawn"] = torch.rand(1, generator=generator).item()

    def validate() -> dict[str, float]:
        calls.append(("validate", ctx.step))
        if kind == "stop" and ctx.step == 5 and ranks.rank == 1:
            ctx._rank.page.ask_to_stop()
        return {"error": abs(ctx.step - 5.0), "at": ctx.step}

    try:
        try:
            for step in ctx.steps(12, every={validate: 5, lambda: calls.append(("sample", ctx.step)): 3}):
                if kind == "kill" and step == 6:
                    ctx._checkpointer.wait()
                    ctx._reporter.flush()
                    return seen
                buffer.items.append(step)
                state.seen += 1
                ctx.log({"train/loss": float(step)})
        except Exception:
            seen["swallowed"] = True
    except Stopped:
        seen["stopped"] = ctx.step
        return seen
    seen["result"] = ctx.finish({"mine": 1})
    return seen


WHOLE = [("validate", 0), ("sample", 0), ("sample", 3), ("validate", 5), ("sample", 6), ("sample", 9), ("validate", 10)]
LAST = [("validate", 12), ("sample", 12)]


def points(folder: Path, tag: str) -> list[int]:
    return sorted(step for step, _ in logged(folder, tag))


def test_functions_are_called_at_their_steps_and_once_after_the_last(tmp_path: Path) -> None:
    for seen in run_ranks(attempt, 3, tmp_path, 1):
        assert seen["calls"] == WHOLE + LAST
        assert seen["result"] == {"error": 7.0, "at": 12.0, "mine": 1}
    run = tmp_path / "test-01234567"
    assert str((run / "checkpoints" / "best").readlink()) == "step_00000005"
    assert {path.name for path in (run / "checkpoints").glob("step_*")} >= {"step_00000011", "step_00000012"}
    assert points(run / "tensorboard", "error") == [0, 5, 10, 12]


def test_a_stop_within_a_function_is_the_same_step_on_all_ranks_and_calls_it_again(tmp_path: Path) -> None:
    assert all(seen["stopped"] == 5 and "swallowed" not in seen for seen in run_ranks(attempt, 3, tmp_path, 1, "stop"))
    for seen in run_ranks(attempt, 3, tmp_path, 2):
        assert seen["calls"] == WHOLE[3:] + LAST


@pytest.mark.parametrize("world_size", [3, 2])
def test_a_kill_leaves_each_rank_its_state_and_each_step_one_point(tmp_path: Path, world_size: int) -> None:
    first = run_ranks(attempt, 3, tmp_path, 1, "kill")
    for rank, seen in enumerate(run_ranks(attempt, world_size, tmp_path, 2)):
        owner = rank if world_size == 3 else 0
        assert (seen["buffer"], seen["values"]) == (
            [owner, 0, 1, 2, 3, 4] + 9 * [float(owner)],
            (10 * owner, 5.0),
        )  # of the best one
        assert seen["drawn"] != first[0]["drawn"]  # the generator goes on
    assert points(tmp_path / "test-01234567" / "tensorboard", "train/loss") == list(range(12))
