"""Processes of this machine that are not our children, by the kernel's table in /proc (proc(5)).

With it the agent ends the processes that ranks have started, and finds the processes that handle a signal.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

Process = tuple[int, str]
"""(process id, begin): an id alone may be given to another process."""


def identify(pid: int) -> Process:
    """The process that has an id now."""
    fields = _fields(pid)
    return pid, fields[19] if fields else ""


def lives(process: Process) -> bool:
    """True while a process runs; False for one that has ended and that nobody has waited for."""
    fields = _fields(process[0])
    return bool(fields) and fields[0] not in "ZX" and fields[19] == process[1]


def name_of(pid: int) -> str:
    """The name of the program that a process runs, as `bash`; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """The processes that a process has started, or adopted."""
    listed: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            listed += map(int, (thread / "children").read_text(encoding="utf-8").split())
    except OSError:  # it ended in this moment
        pass
    return listed


def in_sessions(sessions: Collection[int]) -> list[int]:
    """The living processes of some sessions, also of those whose first process has ended."""
    return [pid for pid, fields in _all() if fields[0] not in "ZX" and int(fields[3]) in sessions]


def with_variables(*entries: str) -> list[int]:
    """The living processes of this user that were started with all these `NAME=value` in their environment."""
    return [pid for pid, fields in _all() if fields[0] not in "ZX" and has_variables(pid, *entries)]


def has_variables(pid: int, *entries: str) -> bool:
    """True if a process of this user was started with all these `NAME=value` in its environment."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or it has ended
        return False
    return {entry.encode() for entry in entries}.issubset(environment)


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal; others are only ended by it, or ignore it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def that_catch(pid: int, number: int, *, below: bool = False) -> list[int]:
    """Of a process and all that it has started, those with a handler for a signal.

    Unless `below`, no process below one with a handler is looked at: that one tells its children itself, as torchrun
    does; and a copy of it, such as a worker of a data loader, has the handler without a reason.
    """
    handles = catches(pid, number)
    if handles and not below:
        return [pid]
    nested = [item for child in children(pid) for item in that_catch(child, number, below=below)]
    return [pid, *nested] if handles else nested


def _all() -> Iterator[tuple[int, list[str]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _fields(int(entry.name))):
            yield int(entry.name), fields


def _fields(pid: int) -> list[str]:
    """The part of /proc/PID/stat after the name; nothing if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
