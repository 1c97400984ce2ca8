"""The bench against Hugging Face's Trainer and Lightning's still runs; tests/docs/test_benches.py has the others."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from harness.benches import table


def test_the_bench_of_trainers_shows_all_its_rows(tmp_path: Path) -> None:
    rows = table(tmp_path, "trainers")
    assert len(rows) == 4 and all(isfinite(value) for values in rows.values() for value in values), rows
