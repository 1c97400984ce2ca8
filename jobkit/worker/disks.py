"""Which ranks of a launch see the same run directory: all, or those of each node one on a disk of its own."""

from __future__ import annotations

import socket
import time
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


def find_disks(run: RunDir, config: Config, topology: Topology, group: RankGroup) -> Disks:
    """Which ranks share a run directory; empty where all do. Collective.

    Rank 0 puts a file with a random name into it, and all look for it: the same path may be another folder on another
    node. Raises DistributedError, on all ranks, which says who has what, where that cannot work.
    """
    if topology.world_size == 1:
        return ()
    makes = topology.rank == 0 or topology.local_rank == 0
    file = run.disk_file(new_token())
    if makes:
        file.touch()
    try:
        made = group.gather(file.name if makes else None)
        found = (topology.node, socket.gethostname(), str(run.path))
        everywhere = all(group.gather(_appears(file.with_name(made[0]))))
        if everywhere:
            return ()
        places = group.gather(found)
        by_node = {node: rank for rank, (node, _, _) in reversed([*enumerate(places)])}
        first = made[by_node[topology.node]]
        seen = first is not None and _appears(file.with_name(first))
        names = [rank for rank, name in enumerate(made) if name is not None and is_there(file.with_name(name))]
        homes = group.gather(names[0] if seen else None)
    finally:
        if makes:
            file.unlink(missing_ok=True)
    _refuse_what_cannot_work(config, homes, places)
    return tuple(tuple(rank for rank, one in enumerate(homes) if one == home) for home in dict.fromkeys(homes))


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + LATE_SECONDS
    while not is_there(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _refuse_what_cannot_work(config: Config, homes: list[int | None], places: list[tuple[int, str, str]]) -> None:
    """`homes`: of each rank the first one whose file it sees; `places`: its node, host and run directory."""
    shown = {home: _described(rank, places) for rank, home in reversed([*enumerate(homes)])}
    what = "; ".join(shown[home] for home in dict.fromkeys(homes))
    nodes = {(node, home) for home, (node, _, _) in zip(homes, places, strict=True)}
    if None in homes or len(nodes) > len({node for node, _ in nodes}):
        lost = next((rank for rank, home in enumerate(homes) if home is None), 0)
        raise DistributedError(
            f"ranks of one node see different run directories ({what}; rank {lost} does not see what the first rank of "
            "its node has put there): set runs_dir=... or JOBKIT_RUNS to one folder for all"
        )
    if not layout.is_plain_ddp(config.parallel):
        raise DistributedError(
            f"the nodes have run directories of their own ({what}), and with parallel: {config.parallel.data} none has "
            "the whole state: set runs_dir=... or JOBKIT_RUNS to a folder that all nodes see, or use plain ddp, with "
            "which each node keeps a copy"
        )


def _described(rank: int, places: list[tuple[int, str, str]]) -> str:
    _, host, path = places[rank]
    return f"rank {rank} on {host}: {path}"
