"""Checkpoints of which each node keeps a whole copy on a disk of its own: which ones all nodes have."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jobkit.checkpoint.store import Manifest
from jobkit.errors import CheckpointError
from jobkit.group import RankGroup

T = TypeVar("T")

SAVE = "save"
"""The key in a manifest's `extra` of what tells one save from another: two disks may have the same step of two."""


class Disks:
    """All ranks, and how many disks they have: what the ranks of one disk do together, all of them agree on.

    `everyone` has all ranks. With one disk there is nothing to agree on.
    """

    def __init__(self, everyone: RankGroup, *, several: bool = False) -> None:
        self.everyone = everyone
        self.several = several

    def together(self, action: Callable[[], T]) -> T:
        """What `action` returns, which the ranks of one disk do; where it raises on one disk, it does on all."""
        return self.everyone.all_or_none(action) if self.several else action()

    def common(self, own: list[int], root: Path) -> list[int]:
        """Of the steps on this disk those that every disk has. Raises CheckpointError where all have other ones."""
        if not self.several:
            return own
        found = self.everyone.gather((socket.gethostname(), str(root), own))
        steps = set(own).intersection(*(steps for _, _, steps in found))
        if not steps and any(steps for _, _, steps in found):
            seen = {f"{path} on {host}": ", ".join(map(str, steps)) or "none" for host, path, steps in found}
            listed = "; ".join(f"{where}: {steps}" for where, steps in seen.items())
            raise CheckpointError(
                f"no step has a checkpoint on every node's disk ({listed}): copy the folder of a checkpoint to the "
                "others, or begin again at step 0 under another name"
            )
        return sorted(steps, reverse=True)

    def problems(self, manifest: Manifest | None, problems: list[str]) -> list[str]:
        """What is wrong with a checkpoint on any disk."""
        if not self.several:
            return problems
        save = manifest.extra.get(SAVE) if manifest is not None else None
        found = self.everyone.gather((socket.gethostname(), problems, save))
        told = [f"on {host}: {problem}" for host, own, _ in found for problem in own]
        if not told and any(one != found[0][2] for _, _, one in found):
            told = ["it is of another save than on the disk of another node"]
        return list(dict.fromkeys(told))

    def check_place(self, manifest: Manifest, has_own: bool) -> None:
        """Raise CheckpointError where a rank does not find its own state, which is on the disk of another node."""
        if not self.several or manifest.world_size != self.everyone.world_size:
            return
        lost = [rank for rank, one in enumerate(self.everyone.gather(has_own)) if not one]
        if lost:
            raise CheckpointError(
                f"the checkpoint of step {manifest.step} that rank(s) {', '.join(map(str, lost))} see is that of other "
                "ranks: start each node with the --node_rank that it had"
            )
