"""Seeds that are equal on every machine, and the generators that they are put into.

The spine seeds a rank with them; loaders and evaluations draw a sample's random numbers from its place alone.
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
