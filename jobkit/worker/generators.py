"""The random numbers that an attempt begins with: the run's own, or the script's, left alone and continued."""

from __future__ import annotations

from typing import Any

import torch

from jobkit.checkpoint.reader import RestoredCheckpoint
from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.log import log
from jobkit.train.seeds import derive_seed, seed_generators


def begin_generators(
    seed: int | None, restored: RestoredCheckpoint | None, world_size: int, *devices: torch.device
) -> dict[str, Any] | None:
    """Seed this rank's generators by the run's seed; equal on all ranks, for equal initial weights.

    Without a seed they are left as they are, and set to that again where the run continues, so that what the script
    draws before its loop, as the split of a dataset, is what it was. Returns that state, for the checkpoints.
    """
    if seed is not None:
        seed_generators(derive_seed(seed, "init"), *devices)
        return None
    local = restored.local if restored is not None and restored.manifest.world_size == world_size else None
    first: dict[str, Any] | None = (local or {}).get("first_generators")
    if first is None:
        return rng_state(*devices)
    set_rng_state(first, *devices)
    return first


def tell_replaced_seed(seed: int) -> None:
    """Say that the script's own seed ends here, where it has set one since the attempt began."""
    if (own := torch.initial_seed()) != derive_seed(seed, "init"):
        log.info(
            "from here on random numbers follow from the run's seed, %d, and no longer from the script's own (%d): "
            "jobkit.init(seed=None), or seed: null in the YAML, leaves the script's alone",
            seed,
            own,
        )
