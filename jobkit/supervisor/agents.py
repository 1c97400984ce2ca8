"""The supervisor's agents: one TCP port, one connection a node, and the state of each agent.

    agent --Hello, NotReady, Ready, RankExited, NotStarted ...--> Agents.wait() --> [(agent, message)] --> loop.py
          <--Welcome, StartRanks, Signal, Ack, Leave------------- Agents.send()         (wire/messages.py)

supervisor.json (the Contact) says where the port is. loop.py does everything here in its main thread; other threads
only call `wake`. The other end of a connection is agent/link.py.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Literal

from jobkit.addresses import own_addresses
from jobkit.log import log
from jobkit.run import records
from jobkit.run.files import FOR_OWNER
from jobkit.run.records import Contact
from jobkit.run.rundir import RunDir
from jobkit.wire.messages import (
    Ack,
    Hello,
    Leave,
    Lines,
    Message,
    NotReady,
    RankExited,
    Ready,
    Signalled,
    StartRanks,
    Welcome,
    encode,
)

ADOPTION_SECONDS = 20.0
"""How long agents have to call a supervisor that was started again."""

CALL_AGAIN_SECONDS = 1.0
"""How long an agent whose connection closed has to call again. It is also the window in which the agents of one step
that is killed disappear together."""

GREETING_BYTES = 65536
STRANGERS = 64
"""Limits for connections without a Hello: anybody on the network may connect."""

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}
"""A node without power closes nothing: the system asks after 5 s and gives the connection up 9 s later. The last value,
in milliseconds, counts while sent data is not acknowledged: then the system does not ask."""


def notice_death(sock: socket.socket) -> None:
    """Let a connection close once the other end is gone, and send each line at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(frozen=True)
class Lost:
    """An agent is gone, and its ranks with it."""

    why: Literal["gone", "step", "signalled"]
    """step: all agents disappeared at once, so the step died and no node did. signalled: Slurm had sent the agent a
    signal before, and ends it."""


News = Message | Lost


@dataclass(eq=False)
class NodeAgent:
    """The agent of a node as the supervisor sees it: its connection and its last words."""

    node: str
    process: str
    """See Hello; empty for an agent that has not called yet."""
    connection: Connection | None = None
    closed_at: float = 0.0
    """When its connection closed, by the monotonic clock."""
    port: int | None = None
    """For a rendezvous; None while it cannot start ranks."""
    why: str = ""
    """Its occupation while it is not ready, if it said so."""
    silent_seconds: float = 0.0
    """Since its last message; without the time in which nobody listened, as while this process waited for a disk."""
    is_signalled: bool = False
    pressed: int = 0
    """The last order to its ranks: a Pressure of running.py."""
    to_acknowledge: set[int] = field(default_factory=set)
    """Serials of its RankExited: it says them again after a Hello until they are acknowledged."""

    @property
    def is_ready(self) -> bool:
        return self.port is not None and self.connection is not None


class Connection:
    """A socket with a line protocol; `agent` is None before its Hello."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        notice_death(sock)
        self.socket = sock
        self.lines = Lines()
        self.bytes = 0
        self.agent: NodeAgent | None = None


class Agents:
    """Listens for agents and knows each one's state.

    agents = Agents(run, "local-host-17", writer=lease.writer, host="127.0.0.1")
    for agent, news in agents.wait(1.0):
        match news: ...                     # Hello, Ready, RankExited, Signalled, Silent, NotStarted, Lost
    agents.send(agent, StartRanks(...))
    """

    def __init__(self, run: RunDir, job_id: str, *, writer: str, host: str, restart: int = 0) -> None:
        self.job_id, self.restart = job_id, restart
        self.by_node: dict[str, NodeAgent] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        before = run.contact()  # agents that live know its port and its secret
        self._listener = _listen(host, before.port if before else 0)
        self._secret = before.secret if before else secrets.token_hex(32)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: list[Connection] = []
        self._given_up: set[tuple[str, str]] = set()
        """(node, process) of agents that may live, and are turned away."""
        self._news: list[tuple[NodeAgent, News]] = []
        contact = Contact(
            addresses=[host] if host else own_addresses(nodes=0),
            port=self._listener.getsockname()[1],
            secret=self._secret,
            writer=writer,
        )
        records.write(run.contact_file, contact, mode=FOR_OWNER)

    def wake(self) -> None:
        """Let `wait` return, as each signal does; any thread may call it."""
        try:
            self._waker.send(b"w")
        except OSError:  # many calls wait already, or the supervisor ends
            return

    def wait(self, seconds: float) -> list[tuple[NodeAgent, News]]:
        """Return the news that arrive within some seconds, as soon as there are any."""
        closed = [agent.closed_at for agent in self.by_node.values() if agent.connection is None]
        if closed:
            seconds = min(seconds, min(closed) + CALL_AGAIN_SECONDS - time.monotonic())
        began = time.monotonic()
        events = self._selector.select(max(0.0, seconds))
        for agent in self.by_node.values():
            agent.silent_seconds += min(max(0.0, seconds), time.monotonic() - began)
        for key, _ in events:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(4096)
            else:
                self._receive(key.data)
        self._expire()
        news, self._news = self._news, []
        return news

    def send(self, agent: NodeAgent, message: Message) -> None:
        """Send a message; an agent without a connection gets none: its Hello says in which state it comes back."""
        if isinstance(message, StartRanks):
            agent.port, agent.is_signalled, agent.pressed = None, False, 0
        if agent.connection is not None:
            self._write(agent.connection, message)

    def acknowledge_exits(self) -> None:
        """Tell all agents that the ends of their ranks are in the journal."""
        for agent in self.by_node.values():
            serials, agent.to_acknowledge = agent.to_acknowledge, set()
            for serial in serials:
                self.send(agent, Ack(serial=serial))

    def expect(self, node: str) -> None:
        """Count a node's agent as lost if it does not call within ADOPTION_SECONDS: it belongs to an open attempt."""
        closed_at = time.monotonic() + ADOPTION_SECONDS - CALL_AGAIN_SECONDS
        self.by_node.setdefault(node, NodeAgent(node, process="", closed_at=closed_at))

    def lose(self, node: str) -> None:
        """Give an agent up at once, as one whose process is known to be dead or whose ranks do not end."""
        if (agent := self.by_node.get(node)) is not None:
            self._given_up.add((node, agent.process))
            agent.closed_at = time.monotonic()
            self._lose(agent, "step" if len(self.by_node) == 1 else "gone")

    def address_of(self, node: str) -> str:
        """Return the address at which the other nodes reach a node: their agents have called us over this network."""
        address = self._address(node, "getpeername") or ""
        if address != self._address(node, "getsockname"):
            return address
        # It is on our own host: the others reach it where they reach us.
        ours = [self._address(name, "getsockname") for name in self.by_node if name != node]
        return next(filter(None, ours), address)

    def _address(self, node: str, end: Literal["getpeername", "getsockname"]) -> str | None:
        agent = self.by_node.get(node)
        if agent is None or agent.connection is None:
            return None
        try:
            return str(getattr(agent.connection.socket, end)()[0])
        except OSError:  # it closed in this moment
            return None

    def close(self) -> None:
        """Tell all agents to leave, and close the port."""
        for agent in self.by_node.values():
            self.send(agent, Leave())
        for connection in list(self._connections):
            self._drop(connection)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for sock in (self._listener, self._waker, self._woken):
            sock.close()

    # Connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it is gone already
            return
        connection = Connection(sock)
        self._connections.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        strangers = [item for item in self._connections if item.agent is None]
        if len(strangers) > STRANGERS:
            self._drop(strangers[0])

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            log.info("agent on %s: %s", connection.agent.node if connection.agent else "?", error)
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.bytes += len(data)
        try:
            if connection.agent is None and connection.bytes > GREETING_BYTES:
                raise ValueError("its greeting is too long")
            for message in connection.lines.feed(data):
                if connection.agent is None and not self._greet(connection, message):
                    self._drop(connection)
                    return
                self._note(connection, message)
        except Exception as error:
            if connection.agent is not None:
                raise  # an agent of ours, of this very version, says what no agent says
            log.info("a stranger: %s", error)
            self._drop(connection)

    def _greet(self, connection: Connection, message: Message) -> bool:
        """Return whether a first message is that of an agent of this start of the job."""
        if not isinstance(message, Hello):
            return False
        if not hmac.compare_digest(message.secret.encode(), self._secret.encode()):
            return False
        is_ours = (message.job_id, message.restart) == (self.job_id, self.restart)
        if not is_ours or (message.node, message.process) in self._given_up:
            self._write(connection, Leave())
            return False
        agent = self.by_node.get(message.node)
        if agent is not None and agent.process not in ("", message.process):
            self._lose(agent, "gone")  # another process of its node has taken its place
            agent = None
        if agent is None or not agent.process:
            agent = self.by_node[message.node] = NodeAgent(message.node, message.process)
        elif agent.connection is not None:
            self._drop(agent.connection)
        agent.connection, connection.agent = connection, agent
        self._write(connection, Welcome())
        return True

    def _note(self, connection: Connection, message: Message) -> None:
        agent = connection.agent
        if agent is None:
            return
        agent.silent_seconds = 0.0
        match message:
            case Hello():
                agent.pressed = 0  # it may have missed a signal
            case NotReady():
                agent.why = message.why
            case Ready():
                agent.port, agent.why = message.port, ""
            case RankExited():
                agent.to_acknowledge.add(message.serial)
            case Signalled():
                agent.is_signalled = True
                self.send(agent, Ack(serial=message.serial))
        self._news.append((agent, message))

    def _write(self, connection: Connection, message: Message) -> None:
        try:
            data = encode(message)
            if connection.socket.send(data) < len(data):
                raise BlockingIOError("the agent does not read")  # hundreds of messages wait: it is stopped
        except OSError as error:
            log.info("agent on %s: %s", connection.agent.node if connection.agent else "?", error)
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if (agent := connection.agent) is not None and agent.connection is connection:
            agent.connection, agent.closed_at = None, time.monotonic()

    def _expire(self) -> None:
        now = time.monotonic()
        gone = [agent for agent in self.by_node.values() if agent.connection is None]
        if any(now - agent.closed_at >= CALL_AGAIN_SECONDS for agent in gone):
            all_at_once = len(gone) == len(self.by_node)
            for agent in gone:
                if all_at_once:
                    self._lose(agent, "step")
                elif now - agent.closed_at >= CALL_AGAIN_SECONDS:
                    self._lose(agent, "gone")

    def _lose(self, agent: NodeAgent, why: Literal["gone", "step"]) -> None:
        if self.by_node.get(agent.node) is agent:
            del self.by_node[agent.node]
        connection, agent.connection = agent.connection, None
        if connection is not None:
            self._drop(connection)
        self._news.append((agent, Lost("signalled" if agent.is_signalled else why)))


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, on `port` where that is still free."""
    try:
        return socket.create_server((host, port), backlog=256)  # with SO_REUSEADDR
    except OSError:
        if not port:
            raise
        return socket.create_server((host, 0), backlog=256)
