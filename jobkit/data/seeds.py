"""Seeds that are equal on every machine, and the generators that they are put into.

loop/context.py and loop/tracked.py seed a rank by them. Loaders and evaluations draw a sample's random numbers from
the seed, the epoch and the sample alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed made of any printable parts; equal parts give equal seeds on every machine and Python."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return another number for each 64-bit number: a bijection whose results look random, equal on every machine.

    The last step of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)), dtype=np.uint64)


def sample_seeds(seed: int, keys: Sequence[tuple[int, int]]) -> list[int]:
    """Return a 63-bit seed for each (epoch, sample): `derive_seed` takes longer than a sample."""
    epochs, samples = np.array(keys, dtype=np.uint64).reshape(-1, 2).T
    numbers = mixed(mixed(epochs ^ np.uint64(seed)) ^ mixed(samples)) >> np.uint64(1)
    return numbers.tolist()  # type: ignore[no-any-return]


def seed_cpu_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_generators(seed: int, *devices: torch.device) -> None:
    """Seed Python's, NumPy's and torch's generators; of accelerators only the `devices`: the rest are other ranks'."""
    seed_cpu_generators(seed)
    for device in _accelerators(devices):
        module = torch.get_device_module(device)
        with module.device(device):  # torch.device(...) would choose where tensors are made, and no generator
            module.manual_seed(seed)


def seeds_since(seed: int) -> dict[str, int]:
    """Return what somebody has seeded since `seed_generators(seed)`: torch, NumPy, Python, each with a number.

    torch's is the seed. NumPy and Python do not keep theirs: it is made of their state, unless draws alone lead to it.
    """
    seeds = {} if torch.initial_seed() == seed else {"torch": torch.initial_seed()}
    numpy, python = np.random.RandomState(seed & 0xFFFFFFFF), random.Random(seed)
    states = {
        "NumPy": (_words_of(numpy), _words_of(np.random)),
        "Python": (python.getstate()[1], random.getstate()[1]),
    }
    return seeds | {name: derive_seed(now) for name, (begun, now) in states.items() if not _is_drawn(begun, now)}


MOST_DRAWN = 1 << 24
"""So many numbers, of 32 bits, a program may draw from NumPy or Python before its loop and count as one that has not
seeded them: to look at them takes 0.1 s."""


def _is_drawn(begun: Sequence[int], now: Sequence[int]) -> bool:
    """Return whether draws alone lead from one state of a Mersenne Twister to another."""
    following = _twister(now).random_raw(4)
    twister, numbers = _twister(begun), np.empty(0, np.uint64)
    for _ in range(0, MOST_DRAWN, 1 << 18):
        numbers = np.concatenate([numbers[-3:], twister.random_raw(1 << 18)])
        places = np.flatnonzero(numbers[:-3] == following[0])
        if any(np.array_equal(numbers[place : place + 4], following) for place in places):
            return True
    return False


def _twister(words: Sequence[int]) -> np.random.MT19937:
    twister = np.random.MT19937(0)
    key = np.array(words[:-1], dtype=np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": words[-1]}}
    return twister


def _words_of(generator: Any) -> tuple[int, ...]:
    """Return the state of a generator of NumPy's in the form of Python's: 624 words, and the place in them."""
    _, words, place, *_ = generator.get_state(legacy=True)
    return (*words.tolist(), place)


def generator_state(*devices: torch.device) -> dict[str, Any]:
    """Return the states of all generators, as plain values."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tobytes(), position, has_gauss, gauss),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "devices": [
            torch.get_device_module(device).get_rng_state(device).cpu().numpy().tobytes()
            for device in _accelerators(devices)
        ],
    }


def load_generator_state(state: dict[str, Any], *devices: torch.device) -> None:
    """Set all generators to a state that `generator_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_as_tensor(state["torch"]))
    for device, saved in zip(_accelerators(devices), state["devices"], strict=False):
        torch.get_device_module(device).set_rng_state(_as_tensor(saved), device)


@contextmanager
def preserved_generators(*devices: torch.device) -> Iterator[None]:
    """Put all generators back to their states at the end."""
    state = generator_state(*devices)
    try:
        yield
    finally:
        load_generator_state(state, *devices)


def preserved_but_in_worker() -> AbstractContextManager[None]:
    """Return preserved_generators(); nothing in a loader's worker, whose generators are nobody else's."""
    return preserved_generators() if get_worker_info() is None else nullcontext()


def _accelerators(devices: Sequence[torch.device]) -> list[torch.device]:
    return [device for device in devices if device.type not in ("cpu", "meta", "mps")]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
