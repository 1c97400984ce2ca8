"""What a stream draws in this process: from the generators that the training draws from, and the same once more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from jobkit.checkpoint.state import rng_state, set_rng_state

MOST = 300
"""Batches of a pass before which the training has drawn, too, that a checkpoint tells of: about 5 KB each."""

Generators = Mapping[str, Any]


class StreamDraws:
    """Lets a stream that is read again draw what it drew before, although the training draws from the same generators.

    A stream draws as it would without jobkit, and what the training left to it is kept for each batch; where it has
    drawn nothing (on a GPU it has generators of its own), there is nothing to keep. From `MOST` such batches on the
    stream draws from generators of its own, which go on alike whatever the training draws.

    Args:
        state: what `state()` was in an attempt that stopped in this pass.
        own: generators to draw from, from the first batch on.
    """

    def __init__(self, state: Mapping[str, Any] | None = None, own: Generators | None = None) -> None:
        self._log: list[tuple[int, Generators]] = list(state["log"]) if state else []
        """(number of a batch, those generators that the training had changed before it)."""
        self._left: Generators = rng_state()
        """What the stream left after the newest batch."""
        self._own = own
        self._again = dict(self._log)

    def state(self) -> dict[str, Any]:
        """What another attempt continues from."""
        return {"log": list(self._log), "own": self._own}

    @contextmanager
    def fetching(self, number: int) -> Iterator[None]:
        """While the stream is asked for a batch."""
        training = rng_state()
        if self._own is None and (changed := _changed(self._left, training)):
            self._log.append((number, changed))
            if len(self._log) > MOST:
                self._own = training
        if self._own is None:
            try:
                yield
            finally:
                self._left = rng_state()
            return
        set_rng_state(self._own)
        try:
            yield
        finally:
            self._own = rng_state()
            set_rng_state(training)

    def before_again(self, number: int) -> None:
        """Before a batch is read once more."""
        if number in self._again:
            set_rng_state({**rng_state(), **self._again[number]})

    def is_at_place(self) -> None:
        """All that were handed out have been read once more."""
        self._left = rng_state()
        if len(self._log) > MOST:
            self._own = self._left


def _changed(before: Generators, now: Generators) -> dict[str, Any]:
    same = {
        "python": before["python"] == now["python"],
        "numpy": before["numpy"][2:] == now["numpy"][2:] and np.array_equal(before["numpy"][1], now["numpy"][1]),
        "torch": torch.equal(before["torch"], now["torch"]),
    }
    return {name: now[name] for name, is_same in same.items() if not is_same}
