"""An agent's connection to its supervisor, which may be killed and started again.

Link.connect() --Hello--> supervisor at the address in supervisor.json
Link.tell(RankExited | Signalled ...)   kept until the supervisor acknowledges it, and said again after each Hello

agent.py and unsupervised.py speak through it.
"""

from __future__ import annotations

import select
import socket
import time
from dataclasses import replace

from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.supervisor.agents import notice_death
from jobkit.wire.messages import Ack, Hello, Leave, Lines, Message, RankExited, Signalled, Welcome, encode

CONNECT_SECONDS = 2.0
"""Not longer: a firewall that drops packets never answers, and the next address may."""

WELCOME_SECONDS = 10.0
"""The time that a supervisor gets to say Welcome, or to read a message; then the connection is given up."""


class Link:
    """One end of a connection that may come and go.

    link = Link(run)
    link.connect(Hello(...)) or link.silent_seconds > 60
    link.tell(RankExited(serial=link.next_serial(), ...))
    for message in link.receive(): ...
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.is_dismissed = False
        """True once the supervisor answered Hello with Leave: this agent belongs to an earlier start of the job."""
        self._socket: socket.socket | None = None
        self._lines = Lines()
        self._early: list[Message] = []
        """Messages that came together with Welcome."""
        self._kept: dict[int, RankExited | Signalled] = {}
        self._serial = 0
        self._heard = time.monotonic()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def silent_seconds(self) -> float:
        """Seconds since the connection closed; 0 while it is open."""
        return 0.0 if self.is_open else time.monotonic() - self._heard

    def keeps(self, kind: type[RankExited] | type[Signalled]) -> bool:
        """True while a message of a kind is not acknowledged."""
        return any(isinstance(message, kind) for message in self._kept.values())

    def fileno(self) -> int:
        return self._socket.fileno() if self._socket is not None else -1

    def connect(self, hello: Hello) -> bool:
        """Try once; return whether the supervisor welcomed us. `hello.secret` is filled in."""
        contact = self.run.contact()
        for address in contact.addresses if contact is not None else ():
            assert contact is not None
            try:
                connection = socket.create_connection((address, contact.port), CONNECT_SECONDS)
            except OSError:
                continue
            self._socket, self._lines = connection, Lines()
            connection.settimeout(WELCOME_SECONDS)
            notice_death(connection)
            self.tell(replace(hello, secret=contact.secret))
            answer = self._answer()
            if isinstance(answer, Welcome):
                for message in self._kept.values():
                    self.tell(message)
                return self.is_open
            self.is_dismissed = isinstance(answer, Leave)
            self.close()
        return False

    def _answer(self) -> Message | None:
        try:
            while self._socket is not None and not self._early:
                self._early = self._receive()
        except ValueError as error:  # since the supervisor's death another program may listen at its port
            self._lose(error)
        return self._early.pop(0) if self._early else None

    def next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def tell(self, message: Message) -> None:
        """Send a message; without a connection only messages that need an acknowledgement are kept."""
        if isinstance(message, (RankExited, Signalled)):
            self._kept[message.serial] = message
        if self._socket is not None:
            try:
                self._socket.sendall(encode(message))
            except OSError as error:
                self._lose(error)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived."""
        messages, self._early = self._early, []
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            messages += self._receive()
        for message in messages:
            if isinstance(message, Ack):
                self._kept.pop(message.serial, None)
        return [message for message in messages if not isinstance(message, Ack)]

    def _receive(self) -> list[Message]:
        if self._socket is None:
            return []
        try:
            data = self._socket.recv(65536)
        except OSError as error:
            self._lose(error)
            return []
        if not data:
            self._lose(None)
            return []
        return self._lines.feed(data)

    def _lose(self, error: Exception | None) -> None:
        log.info("the supervisor is gone%s", f": {error}" if error is not None else "")
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._heard = time.monotonic()
