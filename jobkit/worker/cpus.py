"""The share of its agent's CPUs that a rank runs on: neighbouring cores, and no two ranks on the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path


def take_share(local_rank: int, local_world_size: int) -> None:
    """Bind this process to its share of the CPUs, if somebody (as Slurm) has bound the agent to some of them."""
    share = cpu_set(os.sched_getaffinity(0), os.cpu_count() or 1, local_rank, local_world_size, place_of)
    if share:
        os.sched_setaffinity(0, share)


def cpu_set(
    allowed: Collection[int], machine: int, local_rank: int, local_world_size: int, place: Callable[[int], object]
) -> list[int]:
    """The CPUs of one of the ranks that divide `allowed`; none if nobody has bound the process, or if they are too few.

    `machine` is the number of CPUs of the machine, `place` sorts them.
    """
    if len(allowed) >= machine or len(allowed) < local_world_size:
        return []
    ordered = sorted(allowed, key=place)  # type: ignore[arg-type]
    per_rank = len(ordered) // local_world_size
    return ordered[local_rank * per_rank : (local_rank + 1) * per_rank]


def place_of(cpu: int) -> tuple[int, int, int]:
    """(socket, core, number): neighbours share a cache, and a rank gets both threads of a core."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    return _number(topology / "physical_package_id"), _number(topology / "core_id"), cpu


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a container may hide it
        return 0
