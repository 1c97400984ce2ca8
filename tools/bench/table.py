"""What the benches share: their options, and a row of a table, which tests/harness/benches.py reads."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Collection

QUICK = "--quick" in sys.argv
"""Whether a bench measures little and once, to see that it runs."""


def options(doc: str | None, repeats: int, parts: Collection[str] = ()) -> argparse.ArgumentParser:
    """Return a parser of --repeats, --quick and the names of parts; where a command names none, all are meant."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def part(word: str) -> str:
        if word not in parts:
            raise argparse.ArgumentTypeError(f"there is no {word}; there are {', '.join(parts)}")
        return word

    def number(word: str) -> int:
        if not (word.isdecimal() and int(word)):
            raise argparse.ArgumentTypeError(f"{word} is not 1 or more")
        return int(word)

    if parts:
        help = f"of {', '.join(parts)}; all by default"
        parser.add_argument("parts", nargs="*", type=part, metavar="PART", help=help)
    parser.add_argument("--repeats", type=number, default=1 if QUICK else repeats, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="measure little and once: to see that it runs")
    return parser


def show(row: str, values: list[float], bound: float | None, unit: str = "s") -> None:
    """Print a row: the least, the median and the most of its values, and the bound that the project has set itself."""
    middle = statistics.median(values)
    verdict = "" if bound is None else f"   bound {bound:g}: {'met' if middle <= bound else 'MISSED'}"
    print(f"{row:50} {min(values):7.3f} {middle:7.3f} {max(values):7.3f} {unit}{verdict}", flush=True)
