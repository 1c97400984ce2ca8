"""Who knows the secret of a job can speak with its supervisor, and nobody else."""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.project import wait_for

from jobkit.supervisor.channel import Channel, Ended, Forged, Hello, Ready, Signal, Welcome
from jobkit.supervisor.listener import GREETINGS, SILENCE, Listener, connect, make_secret, read_secret

HELLO = Hello(node="node1", step="0")
WELCOME = Welcome(preload=["json"])


@pytest.fixture
def secret(tmp_path: Path) -> bytes:
    return make_secret(tmp_path / "secret")


@pytest.fixture
def listener(secret: bytes) -> Listener:
    return Listener(secret, WELCOME)


def arrived(listener: Listener) -> list[tuple[Hello, Channel]]:
    found: list[tuple[Hello, Channel]] = []
    wait_for("a parent", lambda: found.extend(listener.arrived()) or found)
    return found


def test_the_secret_is_its_owners_alone_and_another_one_each_time(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    first = make_secret(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert make_secret(file) != first == first.strip()
    assert len(read_secret(file)) == 64


def test_a_parent_with_the_secret_is_welcome_and_messages_go_both_ways(listener: Listener, secret: bytes) -> None:
    parent, welcome = connect(listener.address, secret, HELLO)
    assert welcome == WELCOME
    ((hello, supervisor),) = arrived(listener)
    assert hello == HELLO
    for number in range(3):
        supervisor.send(Signal(keys=[number], name="TERM"))
        parent.send(Ended(key=number, returncode=-9))
        assert parent.receive() == (Signal(keys=[number], name="TERM"), [])
        assert supervisor.receive() == (Ended(key=number, returncode=-9), [])
    parent.close()
    with pytest.raises(EOFError):
        wait_for("the end", lambda: supervisor.arrived() is not None)


def test_whoever_does_not_know_the_secret_is_told_nothing_and_keeps_nobody_waiting(
    listener: Listener, secret: bytes, tmp_path: Path
) -> None:
    port = int(listener.address.split()[0])
    silent = socket.create_connection(("127.0.0.1", port))  # says nothing
    noisy = socket.create_connection(("127.0.0.1", port))
    noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    with pytest.raises(OSError):
        connect(f"{port} 127.0.0.1", make_secret(tmp_path / "other"), HELLO)
    connect(listener.address, secret, HELLO)
    assert len(arrived(listener)) == 1
    silent.settimeout(30)
    told = silent.recv(1000)
    assert len(told) == 33, "no more than a number that is new each time"
    for one in (silent, noisy):
        one.close()


def test_a_parent_takes_no_other_program_for_its_supervisor(secret: bytes) -> None:
    other = Listener(b"another job's", WELCOME)
    with pytest.raises(OSError):
        connect(other.address, secret, HELLO)
    assert other.arrived() == []


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def lines(count: int) -> list[bytes]:
    """What the signed messages of a channel look like on the wire."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours, b"key")
        for number in range(count):
            channel.send(Ended(key=number, returncode=0))
        return theirs.recv(1 << 16).splitlines(keepends=True)


def test_signed_lines_arrive_as_they_were_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"".join(lines(2)))
    reader = Channel(ends[1], b"key", is_listener=True)
    assert [reader.receive(), reader.receive()] == [(Ended(key=number, returncode=0), []) for number in range(2)]


FORGED = {
    "changed": lambda sent: [sent[0].replace(b'"returncode": 0', b'"returncode": 9')],
    "repeated": lambda sent: [sent[0], sent[0]],
    "left out": lambda sent: [sent[1]],
    "not signed": lambda sent: [sent[0][64:]],
}


@pytest.mark.parametrize("how", FORGED)
def test_a_line_that_was_not_sent_so_is_refused(ends: tuple[socket.socket, socket.socket], how: str) -> None:
    ends[0].sendall(b"".join(FORGED[how](lines(2))))
    reader = Channel(ends[1], b"key", is_listener=True)
    with pytest.raises(Forged):
        for _ in range(2):
            reader.arrived()


def test_a_supervisors_own_line_sent_back_to_it_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Channel(ours, b"key", is_listener=True).send(Ready())
        ends[0].sendall(theirs.recv(1 << 16))
    with pytest.raises(Forged):
        Channel(ends[1], b"key", is_listener=True).arrived()


def test_who_does_not_know_the_secret_makes_the_supervisor_hold_little(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", int(listener.address.split()[0]))) as stranger:
        stranger.recv(64)
        stranger.sendall(b"x\n")
        with pytest.raises(OSError):  # it is hung up on
            for _ in range(10_000):
                stranger.sendall(b"a" * 65536)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has these")
def test_a_node_without_power_is_given_up_after_14_seconds(listener: Listener, secret: bytes) -> None:
    there, _ = connect(f"{listener.address.split()[0]} 127.0.0.1", secret, HELLO)
    ((_, here),) = arrived(listener)
    for channel in (here, there):
        options = {name: _option(channel, name) for name in SILENCE}
        assert options["TCP_KEEPIDLE"] + options["TCP_KEEPCNT"] * options["TCP_KEEPINTVL"] == 14
        assert options["TCP_USER_TIMEOUT"] == 14_000


def _option(channel: Channel, name: str) -> int:
    return channel._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))


def test_many_who_say_nothing_do_not_keep_a_parent_out(listener: Listener, secret: bytes) -> None:
    port = int(listener.address.split()[0])
    with contextlib.ExitStack() as idle:
        for _ in range(2 * GREETINGS):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        channel, _ = connect(f"{port} 127.0.0.1", secret, Hello(node="node1", step="0"))
        assert [hello.node for hello, _ in arrived(listener)] == ["node1"]
        channel.close()
