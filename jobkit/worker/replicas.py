"""Whether the ranks agree about the state that they have in common: a checkpoint keeps one value of it for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from jobkit.checkpoint.summary import Difference, Summary, digest, first_difference, summarise
from jobkit.errors import JobkitError, UsageError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.train.data import Loader


class Replicas:
    """Compares, on all ranks together. `group` is one that nothing else uses."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._has_warned = False
        self._have_agreed = False

    def check(self, objects: Mapping[str, Any], trees: Mapping[str, Any], held_by: Mapping[str, Sequence[int]]) -> None:
        """Raise JobkitError, on all ranks, where the ranks that have a tree in common do not agree about it.

        `trees`: state_dicts by name, of `objects`; `held_by`: the ranks that have what not all have. Numbers that
        differ by rounding, as they do on machines of two kinds, are said once and allowed.
        """
        everyone = tuple(range(self._group.world_size))
        holders = {name: tuple(held_by.get(name, everyone)) for name in trees}
        summaries = {name: summarise(tree) for name, tree in trees.items() if len(holders[name]) > 1}
        known = self._group.gather({name: (holders[name], digest(one)) for name, one in summaries.items()})
        shared = {name: ranks for of_one in known for name, (ranks, _) in of_one.items()}
        # Models last: as a rule they differ because something else did, as a learning rate.
        for name, ranks in sorted(shared.items(), key=lambda entry: isinstance(objects.get(entry[0]), nn.Module)):
            if len({known[rank].get(name) for rank in ranks}) > 1:
                self._explain(name, objects.get(name.split("#")[0]), summaries.get(name, {}), ranks)
        self._have_agreed = True

    def _explain(self, name: str, value: Any, summary: Summary, holders: Sequence[int]) -> None:
        first = holders[0]
        reference: Summary = self._group.gather(summary if self._group.rank == first else None)[first]
        found: list[Difference | None] = self._group.gather(first_difference(reference, summary))
        differing = [(rank, one) for rank in holders if (one := found[rank]) is not None]
        if not differing:  # what differs has no place in a state: the order of a dict
            return
        rank, difference = next((pair for pair in differing if not pair[1].is_rounding), differing[0])
        what = (
            f"{name}: {difference.path or 'its state'} is {difference.here} on rank {first} and {difference.there} on "
            f"rank {rank}"
        )
        if not difference.is_rounding:
            # Ranks that agreed before may differ by a fault of a machine: another attempt may do better.
            raise (JobkitError if self._have_agreed else UsageError)(f"{what}; {_advice(name, value)}")
        if self._group.is_main and not self._has_warned:
            self._has_warned = True
            log.warning("%s: by rounding, as on machines of two kinds; a checkpoint has one of the two", what)


def _advice(name: str, value: Any) -> str:
    if name.endswith("#beside"):
        return "freeze and unfreeze on all ranks alike"
    if isinstance(value, nn.Module):
        return (
            "it should be equal on all ranks: load weights before ctx.parallelize, which gives all ranks those of rank "
            "0, and change it afterwards in the same way on each"
        )
    if isinstance(value, Loader):
        return (
            "ranks read other samples, or did not draw equally many batches: a stream that gives each rank samples of "
            "its own is ctx.loader(..., sharded=True)"
        )
    if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return "it should be equal on all ranks: change it by values that all have, as those of ctx.evaluate"
    return (
        f"if each rank is to have its own, ctx.track(per_rank={{{name!r}: ...}}); else make it equal on all ranks: "
        "seed it by ctx.seed and not by rank, change it by values that all have"
    )
