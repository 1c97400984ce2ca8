"""What a checkpoint holds of the objects that a function tracks: what all ranks share, and what each has for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.attempts import STOPPED, attempt, stop_after


class Position:
    """A data loader of a user's own, reduced to what is saved of it."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offset = state["offset"]


def with_positions(ctx: Any, stop: bool) -> list[int]:
    position = Position(1000 * ctx.rank)
    ctx.track(per_rank={"position": position})
    seen = []
    for _ in ctx.steps(6):
        seen.append(position.offset)
        position.offset += 1
        if stop:
            stop_after(ctx, 2)
    return seen


def test_what_differs_by_rank_is_restored_on_the_rank_it_belongs_to(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, with_positions, True) == [STOPPED, STOPPED]
    fewer = attempt(1, tmp_path, with_positions, False)
    assert "was written by 2 rank(s), and 1 are here: position has a state of its own" in fewer[0]
    assert attempt(2, tmp_path, with_positions, False) == [[3, 4, 5], [1003, 1004, 1005]]
