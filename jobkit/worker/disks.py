"""Which ranks of a launch see the same run directory: all, or those of each node one on a disk of its own."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from jobkit.addresses import new_token
from jobkit.errors import DistributedError
from jobkit.group import RankGroup
from jobkit.run import layout
from jobkit.run.config import Config
from jobkit.run.files import is_there
from jobkit.run.rundir import RunDir
from jobkit.worker.launcher import Topology

LATE_SECONDS = 5.0
"""How long a file that another node has just made is looked for: NFS may show it late."""

Disks = tuple[tuple[int, ...], ...]
"""The ranks that share a disk, for each disk."""

DISKS = "JOBKIT_DISKS"
"""Environment variable of a `command:` under a launcher: those of its ranks, as JSON."""


def find_disks(run: RunDir, config: Config, topology: Topology, group: RankGroup) -> Disks:
    """Which ranks share a run directory; empty where all do. Collective.

    Rank 0 puts a file with a random name into it, and all look for it: the same path may be another folder on another
    node. Raises DistributedError, on all ranks, which says who has what, where that cannot work.
    """
    if topology.world_size == 1:
        return ()
    makes = topology.rank == 0 or topology.local_rank == 0
    file = run.disk_file(new_token())
    try:
        group.all_or_none(lambda: file.touch() if makes else None)
        made = [file.with_name(name) if name else None for name in group.gather(file.name if makes else None)]
        if all(group.gather(_appears(made[0]))):
            return ()
        places = group.gather((topology.node, socket.gethostname(), str(run.path)))
        first = next(rank for rank, (node, _, _) in enumerate(places) if node == topology.node)
        _appears(made[first])
        disks = _merged(group.gather([rank for rank, one in enumerate(made) if one is not None and is_there(one)]))
    finally:
        if makes:
            file.unlink(missing_ok=True)
    if len(disks) == 1:
        return ()  # it was only late
    _refuse_what_cannot_work(config, disks, places)
    return disks


def disks_of_command(environ: Mapping[str, str]) -> Disks:
    """What whoever started this program has found out about its ranks' disks."""
    return tuple(tuple(disk) for disk in json.loads(environ.get(DISKS) or "[]"))


def _merged(views: list[list[int]]) -> Disks:
    """`views`: of each rank those whose file it sees. It has their disk, be it that they do not see its own yet."""
    parts: list[set[int]] = []
    for rank, seen in enumerate(views):
        own = {rank, *seen}
        parts = [*(one for one in parts if not one & own), own.union(*(one for one in parts if one & own))]
    return tuple(sorted(tuple(sorted(part)) for part in parts))


def _appears(path: Path | None) -> bool:
    if path is None:
        return False
    deadline = time.monotonic() + LATE_SECONDS
    while not is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _refuse_what_cannot_work(config: Config, disks: Disks, places: list[tuple[int, str, str]]) -> None:
    """`places`: of each rank its node, host and run directory."""
    what = "; ".join(f"rank {ranks[0]} on {places[ranks[0]][1]}: {places[ranks[0]][2]}" for ranks in disks)
    if sum(len({places[rank][0] for rank in ranks}) for ranks in disks) > len({node for node, _, _ in places}):
        raise DistributedError(
            f"ranks of one node have run directories of their own ({what}), and do not see each other's files: "
            "set runs_dir=... or JOBKIT_RUNS to one folder for all"
        )
    if not layout.is_plain_ddp(config.parallel):
        raise DistributedError(
            f"the nodes have run directories of their own ({what}), and with parallel: {config.parallel.data} none has "
            "the whole state: set runs_dir=... or JOBKIT_RUNS to a folder that all nodes see, or use plain ddp, with "
            "which each node keeps a copy"
        )
