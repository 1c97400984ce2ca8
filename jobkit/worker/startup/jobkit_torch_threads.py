"""PyTorch's own threads at the end of a program: one that Python meets while it is being torn down aborts the process.

A Gloo worker frees the tensors of a collective after it has told the main thread that the collective is done. For a
tensor that Python knows it needs Python's lock, and a thread that asks for the lock once the teardown has begun is
ended inside a C++ destructor: "terminate called without an active exception", SIGABRT, instead of the exit code. Of
runs of four ranks that ended without dist.destroy_process_group() this was 7 of 64.

No module of jobkit's, and for Python 3.6 and later: the Python of a `command:` need not be jobkit's own.
"""

import atexit
import os
import sys
import time
from typing import List

POLL_SECONDS = 0.005
"""Python's lock is free during each pause: a thread that waits for it goes on."""

MOST_SECONDS = 1.0
"""A thread that is busy for longer is in no such free, which takes microseconds."""


def wait_at_exit() -> None:
    """Wait for them before the teardown, after all that is registered from here on."""
    atexit.register(wait_until_at_rest)


def wait_until_at_rest() -> None:
    """Let PyTorch's threads finish what they are freeing, where this process has any. Needs no other rank."""
    if "torch.distributed" not in sys.modules:
        return
    deadline = time.monotonic() + MOST_SECONDS
    time.sleep(POLL_SECONDS)
    while any(state != "S" for state in _states()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _states() -> List[str]:
    """The state of each of PyTorch's threads, as proc(5) writes it: S sleeps, R runs or wants to. Linux; else none."""
    states = []
    for thread in _listed("/proc/self/task"):
        try:
            with open(os.path.join("/proc/self/task", thread, "stat"), encoding="utf-8", errors="replace") as file:
                name, _, rest = file.read().partition(" (")[2].rpartition(") ")
        except OSError:  # it has ended since
            continue
        if name.startswith("pt_"):
            states.append(rest[0])
    return states


def _listed(folder: str) -> List[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
