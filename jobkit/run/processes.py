"""Processes of this machine that are not our children, as the kernel's table tells of them."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Collection
from functools import cache
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


# Which process, for others that share files: `<its id>_<when it began>_<where>`


def named(pid: int) -> str:
    """What tells a process of this host from all others, now and later, on whichever host."""
    return f"{pid}_{began(pid)}_{_here()}"


def seen_here(name: str) -> int | None:
    """The id of a process that was named, whether it lives or not; None for one that has another id here, or none."""
    pid, _, where = (name.split("_", 2) + [""] * 2)[:3]
    return int(pid) if where == _here() and pid.isdecimal() else None


def is_gone(name: str) -> bool:
    """Whether a process that was named is one that is seen here, and has ended."""
    pid = seen_here(name)
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # another user's
    return began(pid) not in (name.split("_", 2)[1], "")


@cache
def _here() -> str:
    """What processes have in common that see each other's ids: two containers may share the name of a host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}_{boot[:8]}_{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}_{secrets.token_hex(8)}"  # of no other: nobody takes it for gone
