"""The order of samples: a pure function of a position, without a list of all samples (weights need one).

    (seed, samples before, rank) --SampleOrder.shares--> (epoch, sample id) pairs

loader.py calls it. The order does not depend on the number of ranks: each takes a part of the same global batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from jobkit.data.seeds import derive_seed, mixed
from jobkit.errors import UsageError

Numbers = NDArray[np.uint64]

ROUNDS = 6
"""With 4 rounds, samples at places sqrt(length) apart are correlated."""

SMALL = 1 << 16
"""The order of so few numbers is sorted and kept, in half a megabyte: a network's order of a handful of numbers is not
uniform. It has each of the 120 orders of 5 numbers, but some twice as often as others."""


def permuted(positions: Numbers, length: int, seed: int) -> Numbers:
    """Return the numbers at some positions of a random-looking order of 0 ... length - 1; another one for each seed."""
    if length <= SMALL:
        return _small_order(length, seed)[positions]
    return feistel(positions, length, seed)


@lru_cache(maxsize=8)
def _small_order(length: int, seed: int) -> Numbers:
    first, second = _keys(seed, 2)
    return np.argsort(mixed(mixed(np.arange(length, dtype=np.uint64) ^ first) ^ second)).astype(np.uint64)


def feistel(positions: Numbers, length: int, seed: int) -> Numbers:
    """Return `permuted` by a keyed Feistel network over the smallest a x b >= length, with cycle walking.

    Black and Rogaway, "Ciphers with arbitrary finite domains", 2002. A number beyond the length goes through the
    network again, which happens to fewer than one in sqrt(length).
    """
    a = math.isqrt(length - 1) + 1
    sizes = np.uint64(a), np.uint64(-(-length // a))
    keys = _keys(seed, ROUNDS)

    def network(numbers: Numbers) -> Numbers:
        halves: list[Numbers] = [*np.divmod(numbers, sizes[1])]
        for turn, key in enumerate(keys):
            this, other = turn % 2, 1 - turn % 2
            halves[this] = (halves[this] + mixed(halves[other] ^ key) % sizes[this]) % sizes[this]
        return np.asarray(halves[0] * sizes[1] + halves[1], dtype=np.uint64)

    numbers = network(positions)
    while (beyond := numbers >= np.uint64(length)).any():
        numbers[beyond] = network(numbers[beyond])
    return numbers


def _keys(seed: int, count: int) -> Numbers:
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8 * count).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def sample_range(size: int, rank: int, world_size: int) -> slice:
    """Return a rank's contiguous part of `size` samples; the parts of all ranks differ by at most one sample."""
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


class SampleOrder:
    """The samples of a global batch: a pure function of how many samples come before it.

    The stream is an endless chain of one permutation an epoch, cut into global batches. A batch may cross from one
    epoch into the next, so that no sample is dropped or repeated within an epoch. With `weights` each position draws a
    sample anew, with replacement, as torch's WeightedRandomSampler does.

    SampleOrder(50_000, 256, seed=0).share(7 * 256, rank=1, world_size=4)      # 64 pairs of (epoch, sample id)
    """

    def __init__(
        self,
        length: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] | torch.Tensor | None = None,
    ) -> None:
        if length < 1:
            raise UsageError("the dataset of ctx.loader is empty: it needs at least one sample")
        self.length, self.global_batch_size, self.seed, self.shuffle = length, global_batch_size, seed, shuffle
        self._sums = None if weights is None else _running_sums(weights, length)

    def share(self, begin: int, rank: int = 0, world_size: int = 1) -> list[tuple[int, int]]:
        """Return one rank's part of the global batch that begins after `begin` samples, as (epoch, sample id); with
        weights as (draw, sample id)."""
        return self.shares(begin, 1, rank, world_size)[0]

    def shares(self, begin: int, count: int, rank: int, world_size: int) -> list[list[tuple[int, int]]]:
        """Return the shares of `count` batches together: a batch alone takes as long as a hundred."""
        size = self.global_batch_size
        part = sample_range(size, rank, world_size)
        begins = np.uint64(begin) + np.arange(count, dtype=np.uint64)[:, None] * np.uint64(size)
        pairs = self._at((begins + np.arange(part.start, part.stop, dtype=np.uint64)).ravel())
        width = part.stop - part.start
        return [pairs[index * width : (index + 1) * width] for index in range(count)]

    def _at(self, positions: Numbers) -> list[tuple[int, int]]:
        if self._sums is not None:
            drawn = mixed(mixed(positions) ^ np.uint64(derive_seed(self.seed, "draw")))
            places = (drawn >> np.uint64(11)) * (2.0**-53 * self._sums[-1])  # in [0, sum)
            chosen = np.searchsorted(self._sums, places, side="right")
            return list(zip(positions.tolist(), chosen.tolist(), strict=True))
        epochs, samples = np.divmod(positions, np.uint64(self.length))
        if self.shuffle:
            for epoch in np.unique(epochs):
                mask = epochs == epoch
                samples[mask] = permuted(samples[mask], self.length, derive_seed(self.seed, "order", int(epoch)))
        return list(zip(epochs.tolist(), samples.tolist(), strict=True))


def _running_sums(weights: Sequence[float] | torch.Tensor, length: int) -> NDArray[np.float64]:
    """Return the running sums [length] of weights. Raises UsageError for weights that cannot be."""
    try:
        values = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"weights of ctx.loader must be numbers, one for each sample: {error}") from None
    if values.shape != (length,):
        raise UsageError(f"weights of ctx.loader has the shape {list(values.shape)}: expected one for each of {length}")
    if not (np.isfinite(values).all() and (values >= 0).all() and values.any()):
        raise UsageError("weights of ctx.loader must be finite and not negative, and not all 0")
    return np.cumsum(values)
