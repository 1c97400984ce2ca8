"""Lengths of time, as a person writes them in a YAML and as sbatch takes them.

Config, submission and commands read and write times by it.
"""

from __future__ import annotations

import math
import re

FORMS = "a time like 30min, 2h, 1h30m, 1 day, 1:30:00 or 1-12:00:00 (a bare number is minutes, as in sbatch --time)"

_SECONDS = {"s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60, "h": 3600, "hr": 3600, "hour": 3600}
_SECONDS |= {"d": 86400, "day": 86400}
_WORDS = re.compile(r"(?:\d+(?:\.\d+)?\s*[a-z]+\s*)+")
_WORD = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def parse_seconds(text: str | int) -> int:
    """Seconds of `30min`, `1h30m`, `2 days`, or of sbatch's `m`, `m:s`, `h:m:s`, `d-h[:m[:s]]`.

    Raises ValueError, with the allowed forms as its text, for any other text and for a time of 0.
    """
    seconds = _parse(str(text).strip().lower())
    if seconds is None or seconds <= 0:
        raise ValueError(FORMS)
    return seconds


def _parse(text: str) -> int | None:
    if _WORDS.fullmatch(text):
        parts = [(float(number), _SECONDS.get(unit) or _SECONDS.get(unit[:-1])) for number, unit in _WORD.findall(text)]
        return None if any(unit is None for _, unit in parts) else math.ceil(sum(n * (unit or 0) for n, unit in parts))
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
    """`h:mm:ss`, or `d-hh:mm:ss` from a day on: the form of sbatch, so that it can be pasted into a command."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"
