"""The tickets of those who wait for devices or CPU slots of this machine: who waits since when, in which order.

A ticket is a file beside the lock files that its owner holds an exclusive flock on: one whose process is gone counts no
more. Any user may put files there, so of another user's ticket only what the system says is believed, its owner and
the time of its last change (st_ctime, which nobody can set), and what it waits for, if that can be.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.supervisor import lock_files
from jobkit.supervisor.needs import Need

ENDING = ".ticket"

MAX_BYTES = 1 << 18
"""The longest ticket that is read: that of 4,096 CPU slots is shorter."""

PRIORITIES = range(-1000, 1001)
"""What `--priority` may be."""


@dataclass(frozen=True)
class Want:
    """So many of some devices, or of the CPU slots."""

    count: int
    text: str
    """As in `2 GPUs`."""
    locks: Mapping[str, str]
    """The names of their lock files, by the names that the waiting run has for them."""


@dataclass(frozen=True)
class Ticket:
    """One who waits."""

    file: str
    owner: int
    """The user's id."""
    since: float
    """In seconds since the epoch."""
    wants: tuple[Want, ...]
    run: str
    """The path of the run."""
    priority: int

    @property
    def locks(self) -> frozenset[str]:
        """The names of all lock files that it may take."""
        return frozenset(name for want in self.wants for name in want.locks.values())

    def competes_with(self, other: Ticket) -> bool:
        """Whether both may take one device."""
        return bool(self.locks & other.locks)


def draw(need: Need, run: Path, priority: int) -> tuple[Path, int]:
    """Join the line: a new ticket, and the open file whose lock keeps it valid. Raises OSError."""
    wants = [
        {"count": pool.count, "text": pool.text, "locks": {n: lock.name for n, lock in _named(pool.names, pool.locks)}}
        for pool in need.waited_for
    ]
    text = json.dumps({"run": str(run), "priority": priority, "wants": wants})
    lock_files.make(need.folder)
    # The names of one process are in its own order: the times of files may be equal for some milliseconds.
    ticket = need.folder / f"{time.time_ns():020d}-{secrets.token_hex(8)}{ENDING}"
    temporary = ticket.with_name(f".{ticket.name}")  # until it is locked others would take it for a dead one's
    file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.fchmod(file, 0o644)  # whatever the umask is: others have to see that it is locked
        os.write(file, text.encode())
        fcntl.flock(file, fcntl.LOCK_EX)
        temporary.rename(ticket)
    except BaseException:
        temporary.unlink(missing_ok=True)
        os.close(file)
        raise
    return ticket, file


def _named(names: Sequence[str], locks: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    return zip(names, locks, strict=True)


def line(folder: Path) -> list[Ticket]:
    """All who wait, in order; tickets of dead processes are removed, as far as this user may."""
    return in_order(ticket for name in _names(folder) if (ticket := _read(folder / name)) is not None)


def in_order(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Who has waited longest is first; a user's own places are among that user's runs by priority."""
    places = sorted(tickets, key=lambda one: (one.since, one.file))
    own: dict[int, Iterator[Ticket]] = {}
    for owner in {one.owner for one in places}:
        mine = [one for one in places if one.owner == owner]
        own[owner] = iter(sorted(mine, key=lambda one: -one.priority))  # sorted() keeps the order of equal ones
    return [next(own[place.owner]) for place in places]


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(folder) if entry.name.endswith(ENDING) and entry.name[0] != "."]
    except OSError:  # nobody has used it yet
        return []


def _read(path: Path) -> Ticket | None:
    """A ticket whose process lives; None for another file."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_BYTES:
            return None
        if lock_files.try_lock(file, fcntl.LOCK_SH):  # nobody holds it
            if about.st_uid == os.geteuid() or os.geteuid() == 0:
                with contextlib.suppress(OSError):
                    path.unlink()
            return None
        return _parsed(path.name, about, os.read(file, MAX_BYTES))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        return None
    finally:
        os.close(file)


def _parsed(name: str, about: os.stat_result, text: bytes) -> Ticket:
    """Raises what a file that is no ticket of jobkit's leads to."""
    found = json.loads(text)
    wants = tuple(_want(one) for one in found["wants"])
    priority = int(found["priority"])
    if priority not in PRIORITIES:
        raise ValueError(priority)
    return Ticket(name, about.st_uid, about.st_ctime, wants, str(found["run"]), priority)


def _want(found: Mapping[str, object]) -> Want:
    count, locks = found["count"], found["locks"]
    if not isinstance(locks, dict) or not isinstance(count, int) or not 0 < count <= len(set(locks.values())):
        raise ValueError("what could never be had")
    for one in (*locks, *locks.values()):
        if not isinstance(one, str) or not re.fullmatch(r"[\w./-]{1,100}", one):
            raise ValueError(one)
    if any("/" in one or one.startswith(".") for one in locks.values()):
        raise ValueError("a lock elsewhere")
    return Want(count, re.sub(r"[^\w .-]", "?", str(found["text"]))[:100], locks)
