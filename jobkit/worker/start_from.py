"""The checkpoint of another run that a run starts from, read on all ranks."""

from __future__ import annotations

import dataclasses

from jobkit.checkpoint.disks import Disks
from jobkit.checkpoint.reader import Reader, RestoredCheckpoint
from jobkit.checkpoint.store import Store
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.worker.rank import Rank


def load_start(rank: Rank, ranks: RankGroup, disks: Disks) -> RestoredCheckpoint | None:
    """What the run's config starts from; None where it begins at step 0. For a run without a checkpoint of its own.

    Collective. Raises UsageError where the checkpoint is not there, CheckpointError where it is damaged.
    """
    start = rank.config.start_from
    if not start.run:
        return None
    store = Store(rank.run.start_from, attempt=str(rank.attempt))
    loaded = Reader(store, ranks, None, disks).load_newest({}, ())
    if loaded is None:
        raise UsageError(f"{store.path(start.step)} is missing, which the run starts from: submit it again")
    return dataclasses.replace(loaded, of_other_run=True, weights_only=start.weights_only)
