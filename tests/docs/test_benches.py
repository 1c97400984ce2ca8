"""Each bench still runs, and shows all rows of its table. How long anything takes is no question of a test."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import pytest
from harness.benches import BENCHES, table

ROWS = {
    "checkpoint": 10,
    "data": 5,
    "training": 4,
    "launch help local": 3,
    "launch submit slurm": 5,
    "launch batch": 1,  # a minute, in which it waits
    "many list": 2,
    "many sweep cancel": 7,
}
ON_SLURM = ("submit", "batch", "sweep")


@pytest.mark.parametrize("words", ROWS)
def test_a_bench_shows_all_its_rows(words: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if any(part in words.split() for part in ON_SLURM):
        request.getfixturevalue("slurm")  # skips where Slurm is not installed; the bench starts its own
    rows = table(tmp_path, *words.split())
    assert len(rows) == ROWS[words] and all(isfinite(value) for values in rows.values() for value in values), rows


def test_no_bench_is_left_out() -> None:
    tested = {words.split()[0] for words in ROWS} | {"trainers"}  # integrations/test_benches.py
    assert {file.stem for file in BENCHES.glob("*.py")} == tested | {"table"}
