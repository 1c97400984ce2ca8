"""How the parents of a Slurm job's ranks reach their supervisor: over the network, with a secret of the job."""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import secrets
import socket
import threading
import time
from pathlib import Path

from jobkit.addresses import own_addresses
from jobkit.run.files import read_fresh
from jobkit.supervisor.channel import Channel, Forged, Hello, Welcome

ADDRESS = "JOBKIT_SUPERVISOR"
"""Environment variable of a parent with the supervisor's port and addresses."""

GREETING_SECONDS = 10.0
"""How long whoever connects has to show that it knows the secret."""

GREETINGS = 64
"""How many may be under way at a time, as each takes a thread and an open file: then the oldest, which says nothing, is
hung up on. A parent's takes milliseconds."""

GREETING_BYTES = 4096
"""What nobody who does not know it can make the supervisor hold for longer than that."""

SILENCE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 14_000}
"""A node without power says nothing: the system asks after 5 s, and gives the connection up 9 s later. A process that
is only stopped, as by `scontrol suspend`, does not have to answer: its system does. The last, in milliseconds, is for
what was sent and is not acknowledged: then the system does not ask."""


class Listener:
    """Takes connections of parents that know the secret, beside the supervisor's loop, and tells them `welcome`."""

    def __init__(self, secret: bytes, welcome: Welcome) -> None:
        self._secret, self._welcome = secret, welcome
        self._server = socket.create_server(("", 0), backlog=256)
        self._greetings: list[socket.socket] = []
        self._arrived: queue.SimpleQueue[tuple[Hello, Channel]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    @property
    def address(self) -> str:
        """For ADDRESS: the port and this host's addresses."""
        return " ".join([str(self._server.getsockname()[1]), *own_addresses(nodes=0)])

    def arrived(self) -> list[tuple[Hello, Channel]]:
        """The parents that have connected since the last call."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._arrived.get_nowait())
        return found

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # it is gone already, or too many files are open
                time.sleep(0.1)
                continue
            self._greetings.append(connection)
            if len(self._greetings) > GREETINGS:
                _end(self._greetings[0])
            # In a thread of its own: one that says nothing must not keep the others waiting.
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            self._take(connection)
        finally:
            self._greetings.remove(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.settimeout(GREETING_SECONDS)  # of one byte after the other
        late = threading.Timer(GREETING_SECONDS, _end, [connection])
        late.daemon = True
        late.start()
        try:
            ours = secrets.token_hex(16).encode()
            connection.sendall(ours + b"\n")
            theirs = _read_line(connection)
            channel = Channel(connection, _session_key(self._secret, ours, theirs), is_listener=True)
            received = channel.receive(GREETING_BYTES)
            if received is None or not isinstance(hello := received[0], Hello):
                raise Forged("no greeting")
            channel.send(self._welcome)
        except (OSError, ValueError, KeyError, TypeError):  # a port scan, or somebody else's job
            connection.close()
            return
        finally:
            late.cancel()
        _watch(connection)
        self._arrived.put((hello, channel))


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def connect(address: str, secret: bytes, hello: Hello) -> tuple[Channel, Welcome]:
    """The connection of a parent to its supervisor; raises OSError where it answers at none of its addresses."""
    port, *hosts = address.split()
    problem: OSError = OSError(f"no address in {address!r}")
    for host in hosts:
        try:
            connection = socket.create_connection((host, int(port)), timeout=GREETING_SECONDS)
            theirs, ours = _read_line(connection), secrets.token_hex(16).encode()
            connection.sendall(ours + b"\n")
            channel = Channel(connection, _session_key(secret, theirs, ours))
            channel.send(hello)
            received = channel.receive()  # signed: another program may listen at that address of another host
        except OSError as error:
            problem = error
            continue
        if received is not None and isinstance(welcome := received[0], Welcome):
            _watch(connection)
            return channel, welcome
    raise problem


def make_secret(file: Path) -> bytes:
    """A new secret, in a file that only its owner can read."""
    file.unlink(missing_ok=True)
    secret = secrets.token_hex(32)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as written:
        written.write(secret)
    return secret.encode()


def read_secret(file: Path) -> bytes:
    """The secret in a file of `make_secret`."""
    return read_fresh(file)


def _session_key(secret: bytes, listener: bytes, connector: bytes) -> bytes:
    """A key for one connection: lines that were recorded on an earlier one are worth nothing on it."""
    return hmac.digest(secret, listener + b" " + connector, "sha256")


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(1)  # no more: what follows the line is the channel's
        if not part or len(data) > 64:
            raise Forged("no line")
        data += part
    return data.strip()


def _watch(connection: socket.socket) -> None:
    """Let the system notice a host that is gone without a word."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in SILENCE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
