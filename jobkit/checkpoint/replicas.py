"""The check at the first save that replicas are equal on all ranks: each rank writes only a part of them.

loop/tracked.py calls it. Buffers, and states that each rank has for itself, are left out: they may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.staging import Stager
from jobkit.errors import UsageError
from jobkit.wire.group import RankGroup


def check_replicas(entries: Sequence[Entry], stager: Stager, ranks: RankGroup) -> None:
    """Raise UsageError, on all ranks, for the first shared tensor that differs between two ranks."""
    if ranks.world_size == 1:
        return
    digests: list[tuple[str, str]] = []
    for entry, finder in stager.finders(entries):
        if entry.scope == "rank":
            continue
        for path, leaf in finder.find().tensors.items():
            if isinstance(leaf, DTensor) or path in entry.rank_keys:
                continue
            data = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            digests.append((f"{entry.name}/{path}", xxhash.xxh3_64_hexdigest(data)))
    text = xxhash.xxh3_64_hexdigest(repr(digests).encode())
    if len(set(ranks.gather(text))) == 1:
        return
    per_rank = [dict(answer) for answer in ranks.gather(digests)]
    for name, digest in per_rank[0].items():
        for rank, other in enumerate(per_rank):
            if name in other and other[name] != digest:  # a tensor of some ranks alone is no replica
                raise UsageError(
                    f"{name} differs between rank 0 and rank {rank} after the first step: a model that ranks train "
                    "together comes from ctx.parallelize; a state that differs by rank is tracked by "
                    "ctx.track(per_rank={...})"
                )
