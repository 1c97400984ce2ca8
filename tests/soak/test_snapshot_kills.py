"""Snapshots in memory after kill -9 of a rank at every call that makes, copies or reads them.

tests/ranks/test_memory.py kills at every eleventh of a snapshot, and at every seventh while a rank begins.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from harness.slots import new_slots
from harness.snapshot_kills import kill_a_rank_in_a_snapshot, kill_a_rank_that_begins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_rank_killed_at_every_call_of_a_snapshot_costs_no_more_than_that_one(
    tmp_path: Path, per_node: int, dying: int
) -> None:
    assert kill_a_rank_in_a_snapshot(tmp_path / "checkpoints", per_node, dying, itertools.count(1)) > 20


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_rank_killed_at_every_call_while_it_begins_leaves_the_snapshot_to_the_next(
    tmp_path: Path, per_node: int, dying: int
) -> None:
    with new_slots(4) as slots:
        found = kill_a_rank_that_begins(tmp_path / "checkpoints", slots, per_node, dying, itertools.count(1))
    assert found > 4
