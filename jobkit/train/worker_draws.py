"""What a loader's workers would draw next at random, told with each batch, for those of another attempt to go on."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as torchs_fetch

from jobkit.checkpoint.state import rng_state, set_rng_state
from jobkit.train.own_state import OwnState, own_state, set_own_state

_FETCHERS: tuple[Any, ...] = (torchs_fetch._MapDatasetFetcher, torchs_fetch._IterableDatasetFetcher)


@dataclass(frozen=True)
class Asked:
    """What a sampler hands on for one batch, and its number in the pass: a worker that gets it returns a Told."""

    indices: Any
    number: int


class Told(NamedTuple):
    """A batch, and what its worker would draw next. A tuple, so that its tensors are pinned as in a loader's own."""

    batch: Any
    number: int
    worker: int
    draws: bytes


def _telling(fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fetch_and_tell(self: Any, indices: Any) -> Any:
        if not isinstance(indices, Asked):
            return fetch(self, indices)
        batch, worker = fetch(self, indices.indices), get_worker_info()
        assert worker is not None
        if not hasattr(self, "jobkits_own"):
            self.jobkits_own = OwnState(SimpleNamespace(dataset=self.dataset, collate=self.collate_fn))
        draws = pickle.dumps((rng_state(), self.jobkits_own.now(), worker.seed), protocol=4)
        return Told(batch, indices.number, worker.id, draws)

    return fetch_and_tell


@dataclass
class WorkerBegin:
    """A worker_init_fn: the user's, then the random numbers that the worker of another attempt stood at."""

    function: Callable[[int], None] | None
    collate: Callable[[Any], Any]
    draws: Mapping[int, bytes]

    def __call__(self, worker: int) -> None:
        for fetcher in _FETCHERS:  # the process may not have been forked
            fetcher.fetch = _telling(fetcher.fetch)
        found = get_worker_info()
        assert found is not None
        own_state(SimpleNamespace(dataset=found.dataset))  # as they begin: what changes is told
        generators, own, seed = pickle.loads(self.draws[worker]) if worker in self.draws else (None, {}, None)
        if generators is not None:
            object.__setattr__(found, "seed", seed)  # that of the worker which began
        if self.function is not None:
            self.function(worker)
        if generators is not None:
            set_rng_state(generators)
            set_own_state(SimpleNamespace(dataset=found.dataset, collate=self.collate), own)
