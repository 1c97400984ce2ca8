"""Processes of this machine that are not our children, as the kernel's table tells of them."""

from __future__ import annotations

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


def _fields(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat, proc(5); nothing where there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
