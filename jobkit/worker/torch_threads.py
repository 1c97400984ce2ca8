"""PyTorch's own threads at the end of a program: one that Python meets while it is being torn down aborts the process.

A Gloo worker frees the tensors of a collective after it has told the main thread that the collective is done. For a
tensor that Python knows it needs Python's lock, and a thread that asks for the lock once the teardown has begun is
ended inside a C++ destructor: "terminate called without an active exception", SIGABRT, instead of the exit code.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

POLL_SECONDS = 0.005
"""Python's lock is free during each pause: a thread that waits for it goes on."""

MOST_SECONDS = 1.0
"""A thread that is busy for longer is in no such free, which takes microseconds."""


def wait_until_at_rest() -> None:
    """Let PyTorch's threads finish what they are freeing; at exit, before the teardown. Needs no other rank."""
    deadline = time.monotonic() + MOST_SECONDS
    time.sleep(POLL_SECONDS)
    while any(state != "S" for state in _states()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _states() -> list[str]:
    """The state of each of PyTorch's threads, as proc(5) writes it: S sleeps, R runs or wants to. Linux; else none."""
    states = []
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended since
                name, _, rest = (thread / "stat").read_text().partition(" (")[2].rpartition(") ")
                if name.startswith("pt_"):
                    states.append(rest[0])
    return states
