"""The signals of an agent: SIGTERM and SIGUSR2 from Slurm or a person, SIGCHLD for ranks that end."""

from __future__ import annotations

import signal
import socket
from types import FrameType

from jobkit.run.slots import Page
from jobkit.worker.stop import STOP_SIGNALS


class AgentSignals:
    """The signals that this process has received. A handler only sets flags: its own, and those of the ranks."""

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self._received: list[int] = []
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the byte in the socket is what wakes the loop
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        for page in self.pages:
            page.ask_to_stop()

    def take(self) -> list[int]:
        """Those that came since the last call."""
        received, self._received = self._received, []
        return received

    def fileno(self) -> int:
        return self._woken.fileno()

    def clear(self) -> None:
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        self._waker.close()
        self._woken.close()
