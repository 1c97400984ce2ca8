"""Lengths of time as people write them in a YAML and as Slurm writes them."""

from __future__ import annotations

import math
import re

_UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "hours": 3600, "hour": 3600, "d": 86400, "days": 86400}
_WORDS = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")

FORMS = "a time like 30min, 2h, 1:30:00 or 1-12:00:00 (a bare number is minutes, as in sbatch --time)"


def parse_seconds(text: str | int) -> int:
    """Seconds of `30min`, `2h`, or of sbatch's `m`, `m:s`, `h:m:s`, `d-h[:m[:s]]`; ValueError for others, and for 0."""
    seconds = _parse(str(text).strip().lower())
    if seconds is None or seconds <= 0:
        raise ValueError(FORMS)
    return seconds


def _parse(text: str) -> int | None:
    if word := _WORDS.fullmatch(text):
        unit = _UNITS.get(word[2])
        return None if unit is None else math.ceil(float(word[1]) * unit)
    clock = _CLOCK.fullmatch(text)
    if not clock:
        return None
    days, first, second, third = (None if part is None else int(part) for part in clock.groups())
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)


def format_seconds(seconds: float) -> str:
    """`h:mm:ss`, or `d-hh:mm:ss` from a day on: sbatch's own form, so that it can be pasted back."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"
