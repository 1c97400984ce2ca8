"""What the benches share: their shortest form, and a row of a table, which tests/harness/benches.py reads."""

from __future__ import annotations

import statistics
import sys

QUICK = "--quick" in sys.argv
"""Whether a bench measures little and once, to see that it runs."""


def show(row: str, values: list[float], bound: float | None, unit: str = "s") -> None:
    """Print a row: the least, the median and the most of its values, and the bound that the project has set itself."""
    middle = statistics.median(values)
    verdict = "" if bound is None else f"   bound {bound:g}: {'met' if middle <= bound else 'MISSED'}"
    print(f"{row:50} {min(values):7.3f} {middle:7.3f} {max(values):7.3f} {unit}{verdict}", flush=True)
