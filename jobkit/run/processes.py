"""Processes of this machine that are not our children, as the kernel's table tells of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
from collections.abc import Collection, Iterable
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


def children(pid: int) -> list[int]:
    """The processes that a process has started, or adopted; none where the kernel does not say."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text(encoding="utf-8").split())
    return found


def in_sessions(sessions: Collection[int]) -> list[int]:
    """The processes of some sessions that live: also where their first ones, whose ids name them, have ended."""
    found = []
    for name in os.listdir("/proc") if sessions and Path("/proc/self").exists() else []:  # noqa: PTH208
        fields = _fields(int(name)) if name.isdigit() else []
        if fields and fields[0] not in "ZX" and int(fields[3]) in sessions:
            found.append(int(name))
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, and is not only ended by it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def that_catch(pids: Iterable[int], number: int) -> list[int]:
    """Of some processes and all below them those with a handler for a signal.

    Below one that has asked for SIGTERM nobody is looked for: what to tell its children is its own affair, as that of
    torchrun, and a copy of it, such as a data loader's worker, has its handler without its reasons.
    """
    found: list[int] = []
    for pid in pids:
        if asks := catches(pid, number):
            found.append(pid)
        if not asks or number != signal.SIGTERM:
            found += that_catch(children(pid), number)
    return found


def _fields(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat, proc(5); nothing where there is no such process, or no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
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
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{socket.gethostname()}_{boot[:8]}_{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}_{secrets.token_hex(8)}"  # of no other: nobody takes it for gone
