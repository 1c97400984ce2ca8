"""Looks at Slurm and at the run directory, in a thread each: a controller or a disk that does not answer delays nobody.

main thread --poke--> [thread: poll(), then wake()] --answers--> main thread

loop.py has two.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Poller(Generic[T]):
    """Calls `poll` again and again in a thread of its own; `take` returns its answers.

    slurm = Poller(allocation.poll, agents.wake, every=30.0)
    slurm.poke()                    # poll now, once more if it polls already
    for answer in slurm.take(): ...
    """

    def __init__(self, poll: Callable[[], T], wake: Callable[[], None], *, every: float) -> None:
        self.every = every
        """Seconds between two polls; changes count from the next poll on."""
        self._poll, self._wake = poll, wake
        self._poked = threading.Event()
        self._answers: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # A daemon: Python would wait at its end for a disk that never answers.
        threading.Thread(target=self._run, daemon=True).start()

    def poke(self) -> None:
        self._poked.set()

    def take(self) -> list[T]:
        """Return the results since the last call. Raises the error of `poll`: the supervisor starts again."""
        if self._error is not None:
            raise self._error
        return [self._answers.get() for _ in range(self._answers.qsize())]  # no other thread takes

    def _run(self) -> None:
        while True:
            self._poked.wait(self.every)
            self._poked.clear()  # before the poll: a poke that comes while it runs asks once more
            try:
                self._answers.put(self._poll())
            except BaseException as error:
                self._error = error
                return
            finally:
                self._wake()
