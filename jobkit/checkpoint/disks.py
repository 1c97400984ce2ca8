"""The ranks that share a disk with the run directory: a checkpoint is divided within a disk.

Two machines without a shared disk keep a whole copy each. The context asks once, before it restores.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from jobkit.run.files import is_there
from jobkit.wire.group import RankGroup


def disks_of(folder: Path, rank: Any, ranks: RankGroup) -> tuple[tuple[int, ...], ...]:
    """Return the ranks by disk; nothing where all share a disk. All ranks call it.

    The first rank of each node leaves a file, and the others look for it. `rank` has `rank`, `local_rank` and `node`.
    """
    nodes = ranks.gather(rank.node)
    if len(set(nodes)) == 1:
        return ()
    probe = folder / f".disk-{ranks.broadcast(secrets.token_hex(4))}-{rank.node}"
    if rank.local_rank == 0:
        probe.touch()
    ranks.barrier()
    seen = tuple(node for node in sorted(set(nodes)) if is_there(probe.with_name(f"{probe.name[:14]}-{node}")))
    answers = ranks.gather(seen)
    if rank.local_rank == 0:
        probe.unlink(missing_ok=True)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number, answer in enumerate(answers):
        groups.setdefault(answer, []).append(number)
    return () if len(groups) == 1 else tuple(map(tuple, groups.values()))
