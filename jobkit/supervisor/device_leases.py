"""Who uses which device and which CPU slot of this machine: no two runs have the same, unless they are asked to.

Each has a lock file (lock_files.py). One process at a time takes them, under a lock of their own, so that of two that
want several one gets all. Runs that jobkit did not start on this machine are not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jobkit.supervisor.lock_files import Holder, hold_alone, holders, is_free, join, sign, taking
from jobkit.supervisor.needs import Need, Pool

LEASES = "JOBKIT_LEASES"
"""Environment variable of a local run's supervisor: what another process has taken for it, as open lock files."""


@dataclass(frozen=True)
class Leases:
    """Devices and CPU slots that a run has, as open lock files; closing the last copy of a file gives one back."""

    variable: str = ""
    """The environment variable that names a program's devices."""
    devices: tuple[str, ...] = ()
    """By the names that `variable` takes."""
    files: tuple[int, ...] = ()
    """Of the devices, in their order."""
    slots: tuple[int, ...] = ()
    """Of the CPU slots."""

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> Leases | None:
        """Those that the process which started this one took for it; None where it took none."""
        if LEASES not in environ:
            return None
        found = json.loads(environ[LEASES])
        return cls(found["variable"], *(tuple(found[name]) for name in ("devices", "files", "slots")))

    @property
    def all_files(self) -> tuple[int, ...]:
        """What a supervisor must be given open, beside the `environment`."""
        return *self.files, *self.slots

    @property
    def environment(self) -> dict[str, str]:
        """What a supervisor is started with, beside the open files."""
        return {LEASES: json.dumps(vars(self))}

    @property
    def visible(self) -> dict[str, str]:
        """The environment of a program that is to see all of these devices, and no others."""
        return {self.variable: ",".join(self.devices)} if self.devices else {}

    def of_rank(self, rank: int, per_node: int, each: int) -> tuple[dict[str, str], tuple[int, ...]]:
        """A rank's environment, and the open lock files of its own devices.

        It sees all devices of its node, as every program for several GPUs expects: LOCAL_RANK chooses among them, and
        NCCL sends from one to another directly. Its own are `each`, from LOCAL_RANK x `each` on.
        """
        if not self.devices:
            return {}, ()
        first = rank - rank % per_node
        of_node, own = slice(first * each, (first + per_node) * each), slice(rank * each, (rank + 1) * each)
        return {self.variable: ",".join(self.devices[of_node])}, self.files[own]

    def sign(self, run: Path, pid: int) -> None:
        """Write down who has them, for whoever wants them next. Raises OSError."""
        for file in self.all_files:
            sign(file, Holder(str(run), pid))

    def close(self) -> None:
        """Leave them to the processes that were given the open files."""
        for file in self.all_files:
            os.close(file)


def take(need: Need) -> Leases | None:
    """All that is needed, or None where too little is free. Raises OSError for a folder that cannot be used.

    What is not waited for (`Pool.waits`) keeps nobody from starting: free ones first, then some that others use.
    """
    if not need.waited_for and not any(pool.variable for pool in need.pools):
        with contextlib.suppress(OSError), taking(need.folder):
            return _taken(need.pools)
        return Leases()  # the folder only counts then
    with taking(need.folder):
        return _taken(need.pools)


def _taken(pools: Iterable[Pool]) -> Leases | None:
    variable, devices = "", []
    files: list[int] = []
    slots: list[int] = []
    for pool in pools:
        found = _take_of(pool)
        if found is None:
            for file in (*files, *slots):
                os.close(file)
            return None
        if pool.variable:
            variable = pool.variable
            devices += [pool.names[number] for number in found]
            files += found.values()
        else:
            slots += found.values()
    return Leases(variable, tuple(devices), tuple(files), tuple(slots))


def _take_of(pool: Pool) -> dict[int, int] | None:
    """Open lock files by their numbers in the pool; None, and nothing is kept, where too few are free."""
    taken: dict[int, int] = {}
    for way in (hold_alone,) if pool.waits else (hold_alone, join):
        for number, lock in enumerate(pool.locks):
            if len(taken) < pool.count and number not in taken and (file := way(lock)) is not None:
                taken[number] = file
    if len(taken) == pool.count or not (pool.waits or pool.variable):
        return dict(sorted(taken.items()))
    for file in taken.values():
        os.close(file)
    return None


def could_be_taken(pool_locks: Iterable[Path], count: int) -> bool:
    """Whether so many of these are free. Nothing is kept."""
    return sum(map(is_free, pool_locks)) >= count


def used_by(locks: Mapping[str, Path]) -> str:
    """Who has some, by the names of their locks, for a person: `0 is used by gpu-acd351b4, 1 by ...`."""
    said: list[str] = []
    for name, lock in locks.items():
        if not is_free(lock):
            found = holders(lock)
            by = " and ".join(dict.fromkeys(holder.name for holder in found)) or "another run"
            said.append(f"{name} {'by' if said else 'is used by'} {by}")
    return ", ".join(said)
