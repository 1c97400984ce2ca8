"""What the run directory's disk gives two nodes: locks, renames and appends, tried by a rank on either."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jobkit.errors import JobkitError
from jobkit.group import RankGroup
from jobkit.run.files import read_fresh, write_atomic
from jobkit.run.journal import Journal
from jobkit.run.locks import lock_at

LINES = 100
"""How many each of the two appends, one write each and durable, as events of a journal are."""

SEEN_SECONDS = 70.0
"""How long the other node is given to see a file that was replaced: NFS may show an old one for 60 s."""

OLD, NEW = b"old" * 1000, b"new" * 100_000


def probe_disk(folder: Path, nodes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Try a folder from two nodes, or from two ranks of one. On all ranks together.

    Returns {between, problems, seen_after, lost_lines}: the two nodes' names, a sentence for each thing that does not
    work (by `lock`, `rename`, `append`), seconds until a replaced file was seen, and lines that are gone of both.
    """
    ranks = RankGroup.of_world()
    names, firsts = list(nodes)[:2], [own[0] for own in nodes.values()][:2]
    if len(firsts) < 2:
        names, firsts = names * 2, list(next(iter(nodes.values())))[:2]
    two = _Two(ranks, firsts, names)
    found: dict[str, Any] = {"between": names, "problems": {}, "seen_after": None, "lost_lines": None}
    for what, attempt in (("lock", _lock), ("rename", _rename), ("append", _append)):
        try:
            found |= attempt(two, folder)
        except _Problem as problem:
            found["problems"][what] = str(problem)
    two.first(lambda: shutil.rmtree(folder, ignore_errors=True))
    return found


class _Problem(Exception):
    """Something does not work: the same on all ranks."""


class _Two:
    """The two ranks that try the disk; the others wait for them, and learn what they found."""

    def __init__(self, ranks: RankGroup, firsts: Sequence[int], names: Sequence[str]) -> None:
        self._ranks, self._firsts, self.names = ranks, firsts, names

    def first(self, action: Callable[[], Any]) -> Any:
        return self._by([0], action)[0]

    def second(self, action: Callable[[], Any]) -> Any:
        return self._by([1], action)[0]

    def both(self, action: Callable[[int], Any]) -> list[Any]:
        """What either returned; `action` gets 0 on the first and 1 on the second."""
        here = self._ranks.rank
        return self._by([0, 1], lambda: action(self._firsts.index(here)))

    def _by(self, which: Sequence[int], action: Callable[[], Any]) -> list[Any]:
        """What an action returned there, on all ranks; raises _Problem on all where it raised."""
        wanted, value, problem = [self._firsts[one] for one in which], None, None
        if self._ranks.rank in wanted:
            try:
                value = action()
            except (OSError, JobkitError) as error:
                problem = str(error)
        answers = self._ranks.gather((value, problem))
        for one in which:
            if answers[self._firsts[one]][1] is not None:
                raise _Problem(f"on {self.names[one]}: {answers[self._firsts[one]][1]}")
        return [answers[rank][0] for rank in wanted]


def _lock(two: _Two, folder: Path) -> dict[str, Any]:
    lock: FileLock | None = None

    def take() -> bool:
        nonlocal lock
        lock = lock_at(folder / "lock", elsewhere="set --runs-dir or JOBKIT_RUNS")
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
        return lock.is_locked

    def leave() -> None:
        if lock is not None:
            lock.release()

    if not two.first(take):
        raise _Problem(f"{two.names[0]} does not get a lock that nobody has")
    second_has_it = two.second(take)
    two.both(lambda _: leave())
    if second_has_it:
        raise _Problem(f"a lock that {two.names[0]} held did not keep {two.names[1]} out: a run could be started twice")
    free = two.second(take)
    two.second(leave)
    if not free:
        raise _Problem(f"a lock that {two.names[0]} has released is not free for {two.names[1]}")
    return {}


def _rename(two: _Two, folder: Path) -> dict[str, Any]:
    file = folder / "file"

    def look() -> tuple[float, int | None]:
        """Seconds until the new content was there, and the size of what was neither the old nor the new one."""
        started = time.monotonic()
        while (waited := time.monotonic() - started) < SEEN_SECONDS:
            with contextlib.suppress(OSError):  # of a file that is no longer on the server
                data = read_fresh(file)
                if data == NEW:
                    return waited, None
                if data != OLD:
                    return waited, len(data)
            time.sleep(0.05)
        return waited, 0

    two.first(lambda: folder.mkdir(parents=True, exist_ok=True))
    two.first(lambda: write_atomic(file, OLD))
    two.second(lambda: read_fresh(file) and None)
    two.first(lambda: write_atomic(file, NEW))
    waited, torn = two.second(look)
    if torn is not None:
        what = (
            f"saw {torn} bytes of it, neither the old nor the new ones" if torn else f"did not see it in {waited:.0f} s"
        )
        raise _Problem(f"{two.names[0]} replaced a file, and {two.names[1]} {what}")
    return {"seen_after": waited}


def _append(two: _Two, folder: Path) -> dict[str, Any]:
    journal = Journal(folder / "lines.jsonl")

    def write(who: int) -> None:
        for number in range(LINES):
            journal.append("line", who=who, number=number)

    def count(_: int) -> int:
        return len({(one.get("who"), one.get("number")) for one in journal.read()})

    two.first(lambda: folder.mkdir(parents=True, exist_ok=True))
    two.both(write)
    return {"lost_lines": 2 * LINES - min(two.both(count))}
