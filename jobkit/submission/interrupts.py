"""Ctrl-C and its like, collected while a submission is made and a local run is followed, instead of dying from them."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def collected() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list: a submission is made whole or not at all, then they are obeyed."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda received, _: asked.append(received)) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
