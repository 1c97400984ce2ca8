"""Which of a job's nodes have the ranks of an attempt: pure, of names and counts. The allocations call it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jobkit.config.layout import factor
from jobkit.config.schema import Config
from jobkit.errors import InputError


def nodes_to_use(config: Config, usable: int) -> int:
    """Return on how many of `usable` nodes the ranks can be started; 0 where they are too few."""
    resources = config.resources
    counts = range(min(usable, resources.nodes), resources.fewest_nodes - 1, -1)
    return next((nodes for nodes in counts if _can_be_divided(config, nodes * resources.ranks_per_node)), 0)


def _can_be_divided(config: Config, ranks: int) -> bool:
    try:
        factor(config, ranks, config.resources.ranks_per_node)
    except InputError:
        return False
    return True


@dataclass(frozen=True)
class Placement:
    """The nodes of a job: the chosen ones have the ranks, the other usable ones are spares.

    placement = Placement(["n1", "n2", "n3"], lost={"n2"}, excluded=set(), count=lambda usable: min(usable, 2))
    placement.choose(["n1", "n2"], wanted=2)      # ["n1", "n3"]
    """

    names: Sequence[str]
    """All nodes of the job, in Slurm's order."""
    lost: Collection[str]
    """Nodes that are not used again in this job."""
    excluded: Collection[str]
    """Nodes that the run does not use as long as enough others are left."""
    count: Callable[[int], int]
    """On how many of so many nodes the ranks can be started; 0 where they are too few."""

    def can_start_again(self, without: Collection[str] = ()) -> bool:
        """Return whether enough nodes are left to start the ranks on without some of them (RestartOptions.in_place)."""
        usable = set(self.names).difference(self.lost)
        good = usable.difference(self.excluded, without)
        return self.count(len(good)) > 0 or (not without and self.count(len(usable)) > 0)

    @property
    def usable(self) -> list[str]:
        """The nodes to choose from: excluded ones only where the others are too few."""
        usable = [name for name in self.names if name not in self.lost]
        good = [name for name in usable if name not in self.excluded]
        return good if self.count(len(good)) or not self.count(len(usable)) else usable

    def choose(self, used: Sequence[str], count: int, ready: Collection[str] = ()) -> list[str]:
        """Return the nodes for an attempt, none where too few are left.

        At first the first `wanted`. Later those of the last attempt, `used`: the ranks stay where they are, and a
        spare, rather one that is `ready`, takes the place of a node that is gone.
        """
        usable = self.usable
        spares = sorted((name for name in usable if name not in used), key=lambda name: name not in ready)
        places = [name if name in usable else None for name in used] or [None] * count
        chosen = [name or (spares.pop(0) if spares else None) for name in places]
        return [name for name in chosen if name is not None][: self.count(len(usable))]
