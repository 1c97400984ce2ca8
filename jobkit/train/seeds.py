"""Seeds that are equal on every machine, and the generators that they are put into."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from jobkit.checkpoint.state import rng_state, seed_device, set_rng_state


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; equal parts give equal seeds on every machine and Python."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each 64-bit number as another one: a bijection whose results look random, and equal on every machine.

    The last step of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)), dtype=np.uint64)


def sample_seeds(seeds: int | Sequence[int], keys: Sequence[tuple[int, int]]) -> list[int]:
    """A 63-bit seed for each (epoch, sample), of one seed or one each: `derive_seed` takes longer than a sample."""
    epochs, samples = np.array(keys, dtype=np.uint64).reshape(-1, 2).T
    own = np.array(seeds, dtype=np.uint64)
    return (mixed(mixed(epochs ^ own) ^ mixed(samples)) >> np.uint64(1)).tolist()  # type: ignore[no-any-return]


def seed_cpu_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator, and leave those of accelerators alone."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_generators(seed: int, *devices: torch.device) -> None:
    """Seed Python's, NumPy's and torch's generators; of accelerators those of `devices` alone: the rest are others'."""
    seed_cpu_generators(seed)
    for device in devices:
        if device.type not in ("cpu", "meta"):
            seed_device(device, seed)


@contextmanager
def preserved_generators(*devices: torch.device) -> Iterator[None]:
    """Put Python's, NumPy's and torch's CPU generator, and those of some devices, back as they were."""
    state = rng_state(*devices)
    try:
        yield
    finally:
        set_rng_state(state, *devices)
