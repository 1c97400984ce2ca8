"""Which of a job's nodes the ranks of an attempt are on: pure, of names and counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from jobkit.run import layout
from jobkit.run.config import Config


def nodes_to_use(config: Config, usable: int) -> int:
    """On how many of so many nodes the ranks of a run can be started; 0 where they are too few."""
    resources = config.resources
    for nodes in range(min(usable, resources.nodes), resources.fewest_nodes - 1, -1):
        with contextlib.suppress(ValueError):
            layout.check(config.parallel, config.comm, replace(resources, nodes=nodes), config.precision)
            return nodes
    return 0


@dataclass(frozen=True)
class Placement:
    """The nodes of a job that can be used; the first ones have the ranks, the others are spares."""

    names: Sequence[str]
    """All of the job's, in Slurm's order."""
    lost: Collection[str]
    """Those that are not used again in this job."""
    excluded: Collection[str]
    """Those that the run is not to use as long as others are left."""
    count: Callable[[int], int]
    """On how many of so many nodes the ranks can be started; 0 where they are too few."""

    def can_start_again(self, without: Sequence[str] = ()) -> bool:
        """Whether enough nodes are left to start the ranks on, beside some that are not to be used."""
        usable = set(self.names).difference(self.lost)
        good = usable.difference(self.excluded, without)
        return self.count(len(good)) > 0 or (not without and self.count(len(usable)) > 0)

    @property
    def usable(self) -> list[str]:
        """The nodes to choose from: excluded ones only where the others are too few."""
        usable = [name for name in self.names if name not in self.lost]
        good = [name for name in usable if name not in self.excluded]
        needs_excluded = not self.count(len(good)) and len(good) < len(usable) and self.count(len(usable))
        return usable if needs_excluded else good

    def choose(self, used: Sequence[str], wanted: int, ready: Collection[str] = ()) -> list[str]:
        """The nodes for an attempt, none where too few are left.

        Those of the last one, `used`, with spares in the places of those that are lost, first the ones that are
        `ready`; at the beginning the first `wanted`.
        """
        usable = self.usable
        count = self.count(len(usable))
        used = used or usable[:wanted]
        taken, can_be_used = set(used), set(usable)
        spares = [name for name in usable if name not in taken]
        spares.sort(key=lambda name: name not in ready)
        chosen = [name if name in can_be_used else spares.pop(0) if spares else None for name in used]
        return [name for name in chosen if name is not None][:count]
