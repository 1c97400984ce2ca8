"""Which sample comes when: a pure function of a position, in constant memory and time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from jobkit.errors import UsageError
from jobkit.train.seeds import derive_seed, mixed

Numbers = NDArray[np.uint64]

ROUNDS = 6
"""With 4, samples at places sqrt(length) apart are correlated."""

SMALL = 1 << 16
"""The order of so few numbers is made and kept, in half a megabyte: a network's is not uniform for a handful of them. 5
have each of their 120 orders, but some twice as often as others."""

VERSION = "2"
"""Of the orders below: in the state of a loader, so that an older one's is never continued with another order."""


def permuted(positions: Numbers, length: int, seed: int) -> Numbers:
    """The numbers at some positions of an order of 0 ... length - 1 that looks random; another one for each seed."""
    if length <= SMALL:
        return _small_order(length, seed)[positions]
    return feistel(positions, length, seed)


@lru_cache(maxsize=8)
def _small_order(length: int, seed: int) -> Numbers:
    first, second = _keys(seed, 2)
    return np.argsort(mixed(mixed(np.arange(length, dtype=np.uint64) ^ first) ^ second)).astype(np.uint64)


def feistel(positions: Numbers, length: int, seed: int) -> Numbers:
    """`permuted` by a keyed Feistel network over the smallest a x b >= length, with cycle walking.

    Black and Rogaway, "Ciphers with arbitrary finite domains", 2002. What falls beyond the length is sent through
    again, which happens to fewer than one in sqrt(length).
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


def share_of(size: int, rank: int, world_size: int) -> slice:
    """A rank's contiguous part of a global batch of `size` samples; those of all ranks differ by at most one."""
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


class SampleOrder:
    """Which samples make up global batch number `n`: a pure function of what it is made of.

    The stream is the endless chain of one permutation an epoch, cut into global batches; a batch may cross from one
    epoch into the next, so that no sample is dropped or repeated within an epoch, whatever divides what. With `weights`
    each position draws a sample anew, with replacement, as torch's WeightedRandomSampler does.
    """

    def __init__(
        self,
        length: int,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        weights: Sequence[float] | torch.Tensor | None = None,
        skipped: Sequence[int] = (),
    ) -> None:
        if length < 1:
            raise UsageError("the dataset of ctx.loader is empty: it needs at least one sample")
        self.length = length
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.skipped: list[int] = []
        """Ids of samples that are left out: the next one of the dataset takes the place of each."""
        self._instead: dict[int, int] = {}
        self.skip(skipped)
        self._sums = None if weights is None else _running_sums(weights, length)

    def skip(self, samples: Sequence[int]) -> None:
        """Leave these out from here on; raises UsageError for ids that there are not."""
        left_out = set(samples)
        if wrong := [one for one in samples if not 0 <= one < self.length]:
            raise UsageError(f"sample {wrong[0]} is to be left out, and the dataset has {self.length}: rewind again")
        if len(left_out) == self.length:
            raise UsageError("all samples of the dataset are to be left out: rewind again, with fewer")
        self.skipped = sorted(left_out)
        self._instead, following = {}, min(set(range(len(left_out) + 1)) - left_out)  # the first after the last
        for one in reversed(self.skipped):
            following = one + 1 if one + 1 < self.length and one + 1 not in left_out else following
            self._instead[one] = following

    @property
    def kind(self) -> str:
        """What the order is made by, to be compared with that of a checkpoint."""
        if self._sums is not None:
            return f"weights {hashlib.blake2b(self._sums.tobytes(), digest_size=8).hexdigest()}, version {VERSION}"
        return f"{'shuffled' if self.shuffle else 'as it lies'}, version {VERSION}"

    def batch(self, number: int) -> list[tuple[int, int]]:
        """The (epoch, sample id) pairs of a global batch; with weights (draw, sample id)."""
        return self.share(number, 0, 1)

    def share(self, number: int, rank: int, world_size: int) -> list[tuple[int, int]]:
        """One rank's contiguous part of a global batch; the parts of all ranks differ by at most one sample."""
        return self.shares(number, 1, rank, world_size)[0]

    def shares(self, first: int, count: int, rank: int, world_size: int) -> list[list[tuple[int, int]]]:
        """The shares of so many batches, together: a number alone takes as long as a hundred."""
        size = self.global_batch_size
        part = share_of(size, rank, world_size)
        begins = np.arange(first, first + count, dtype=np.uint64)[:, None] * np.uint64(size)
        pairs = self._at((begins + np.arange(part.start, part.stop, dtype=np.uint64)).ravel())
        width = part.stop - part.start
        return [pairs[index * width : (index + 1) * width] for index in range(count)]

    def _at(self, positions: Numbers) -> list[tuple[int, int]]:
        found = self._drawn(positions)
        return [(number, self._instead.get(one, one)) for number, one in found] if self._instead else found

    def _drawn(self, positions: Numbers) -> list[tuple[int, int]]:
        if self._sums is not None:
            drawn = mixed(mixed(positions) ^ np.uint64(derive_seed(self.seed, "draw")))
            places = (drawn >> np.uint64(11)) * (2.0**-53 * self._sums[-1])  # in [0, sum)
            return list(
                zip(positions.tolist(), np.searchsorted(self._sums, places, side="right").tolist(), strict=True)
            )
        epochs, samples = np.divmod(positions, np.uint64(self.length))
        if self.shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                samples[here] = permuted(samples[here], self.length, derive_seed(self.seed, "order", int(epoch)))
        return list(zip(epochs.tolist(), samples.tolist(), strict=True))


def _running_sums(weights: Sequence[float] | torch.Tensor, length: int) -> NDArray[np.float64]:
    """The running sums [length] of weights; raises UsageError for what are none."""
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"weights of ctx.loader must be numbers, one for each sample: {error}") from None
    if found.shape != (length,):
        raise UsageError(f"weights of ctx.loader has the shape {list(found.shape)}: expected one for each of {length}")
    if not (np.isfinite(found).all() and (found >= 0).all() and found.any()):
        raise UsageError("weights of ctx.loader must be finite and not negative, and not all 0")
    return np.cumsum(found)
