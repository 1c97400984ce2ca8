"""Processes of this machine that are not our children, as the kernel's table tells of them."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path


def lives(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    fields = _fields(pid)
    return bool(fields) and fields[0] not in "ZX"


def began(pid: int) -> str:
    """When a process began, in the kernel's own unit; `ended` where only its parent remembers it.

    Empty where the kernel does not say.
    """
    fields = _fields(pid)
    if not fields:
        return ""
    state, threads, started = fields[0], fields[17], fields[19]
    return "ended" if state in "ZX" and int(threads) <= 1 else started


def catching(number: int, leaders: Collection[int]) -> list[int]:
    """The processes that catch a signal, of those in the sessions of some leaders and of all that they have started."""
    known = {int(entry.name): _fields(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    found, new = set[int](), set(leaders)
    while new:
        found |= new
        new = {pid for pid, fields in known.items() if fields and _is_of(fields, found)} - found
    return [pid for pid in sorted(found) if _catches(pid, number)]


def _is_of(fields: list[str], processes: Collection[int]) -> bool:
    parent, session = int(fields[1]), int(fields[3])
    return parent in processes or session in processes


def _catches(pid: int, number: int) -> bool:
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _fields(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat, proc(5); nothing where there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
