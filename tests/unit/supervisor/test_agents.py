"""The supervisor's side of its agents, over real sockets: secrets, repeated words, calls again, losses, silence."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.journals import make_run, submitted

from jobkit.config.schema import Config, Resources
from jobkit.run.journal import Journal
from jobkit.run.rundir import RunDir
from jobkit.supervisor import agents as module
from jobkit.supervisor.agents import Agents, Lost
from jobkit.supervisor.allocation import Allocation, SchedulerReport
from jobkit.supervisor.lease import HeldLease, ThisJob
from jobkit.supervisor.starter import READY_SECONDS, Starter
from jobkit.wire.messages import (
    Ack,
    Hello,
    Leave,
    Lines,
    Message,
    NotReady,
    RankExited,
    RankPlace,
    Ready,
    Signal,
    Signalled,
    StartRanks,
    Welcome,
    encode,
)

PLACES = [RankPlace(rank=0, local_rank=0, local_world_size=1, node=0)]


class Caller:
    """An agent as the supervisor sees it."""

    def __init__(self, agents: Agents, run: RunDir, node: str = "node1", **hello: object) -> None:
        self.agents = agents
        contact = run.contact()
        assert contact is not None
        self.socket = socket.create_connection((contact.addresses[0], contact.port))
        self.socket.settimeout(10.0)
        values = {"secret": contact.secret, "job_id": "7", "process": f"of {node}", "node": node, **hello}
        self.say(Hello(**values))  # type: ignore[arg-type]
        self._lines, self._heard = Lines(), list[Message]()

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.socket.sendall(encode(message))

    def hears(self) -> Message | None:
        """Return the next message; None where the supervisor has hung up."""
        while not self._heard:
            data = self.socket.recv(65536)
            if not data:
                return None
            self._heard += self._lines.feed(data)
        return self._heard.pop(0)


def news_of(agents: Agents, count: int = 1) -> list[tuple[str, object]]:
    """Return the next news, each with its node."""
    news: list[tuple[str, object]] = []
    deadline = time.monotonic() + 30
    while len(news) < count and time.monotonic() < deadline:
        news += [(agent.node, message) for agent, message in agents.wait(0.1)]
    return news


def call(agents: Agents, run: RunDir, node: str = "node1", **hello: object) -> Caller:
    """Return an agent that was welcomed."""
    caller = Caller(agents, run, node, **hello)
    news_of(agents)
    assert caller.hears() == Welcome()
    return caller


class Clock:
    """The clock of Agents: here a second that this process waits for a processor is none."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "time", Clock())
    return module.time  # type: ignore[return-value]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "toy-11f5f19c")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def agents(run: RunDir) -> Iterator[Agents]:
    agents = Agents(run, "7", writer="w", host="127.0.0.1")
    yield agents
    agents.close()


def test_contact_is_for_its_owner_alone(agents: Agents, run: RunDir) -> None:
    assert run.contact_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("hello", "answer"),
    [
        ({"secret": "guessed"}, None),
        ({"job_id": "8"}, Leave()),
        ({"restart": 1}, Leave()),  # a process of another start of the job
    ],
)
def test_a_stranger_is_turned_away(agents: Agents, run: RunDir, hello: dict[str, object], answer: object) -> None:
    stranger = Caller(agents, run, **hello)
    assert call(agents, run).hears  # others are served meanwhile
    assert stranger.hears() == answer
    assert stranger.hears() is None
    assert list(agents.by_node) == ["node1"]


LINES = {
    "another protocol": b"GET / HTTP/1.1",
    "no secret": b'{"kind": "Hello", "secret": null, "node": "n", "job_id": "7"}',
    "no ranks": b'{"kind": "Start", "attempt": 1, "ranks": null, "world_size": 1, "nodes": 1, "master_addr": "",'
    b' "master_port": 1}',
    "a nest": b"[" * 60000,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_no_line_of_a_stranger_ends_the_supervisor(agents: Agents, run: RunDir, line: bytes) -> None:
    stranger = socket.create_connection(("127.0.0.1", run.contact().port))  # type: ignore[union-attr]
    stranger.sendall(line + b"\n")
    stranger.settimeout(10.0)
    call(agents, run)
    agents.wait(0.2)
    assert stranger.recv(1) == b""


def test_connections_without_a_word_keep_nobody_out(agents: Agents, run: RunDir) -> None:
    port = run.contact().port  # type: ignore[union-attr]
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(module.STRANGERS + 8)]
    silent[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    call(agents, run)
    assert len(agents._connections) <= module.STRANGERS + 1


def test_exits_are_acknowledged_once_they_are_in_the_journal(agents: Agents, run: RunDir, clock: Clock) -> None:
    caller = call(agents, run, attempt=3, alive=[0, 1])
    died = RankExited(serial=1, attempt=3, rank=1, code=-9)
    signalled = Signalled(serial=2, attempt=3, signal="TERM")
    caller.say(died, signalled)
    assert news_of(agents, 2) == [("node1", died), ("node1", signalled)]
    assert caller.hears() == Ack(serial=2)

    caller.socket.close()
    again = call(agents, run, attempt=3, alive=[0])
    again.say(died, Ready(port=1))
    assert news_of(agents, 2) == [("node1", died), ("node1", Ready(port=1))]
    agents.acknowledge_exits()
    assert again.hears() == Ack(serial=1)


def test_an_agent_may_call_again(agents: Agents, run: RunDir, clock: Clock) -> None:
    first = call(agents, run)
    agents.by_node["node1"].pressed = 1
    first.socket.close()
    agents.wait(0.05)
    again = call(agents, run)
    assert agents.by_node["node1"].pressed == 0, "it may have missed the order"
    agents.send(agents.by_node["node1"], Signal(attempt=1, name="STOP"))
    assert again.hears() == Signal(attempt=1, name="STOP")
    clock.now += module.CALL_AGAIN_SECONDS + 0.2
    assert [message for _, message in agents.wait(0.2)] == []


def test_an_agent_that_takes_the_place_of_another_shows_its_death(agents: Agents, run: RunDir) -> None:
    call(agents, run, process="5")
    Caller(agents, run, process="6")
    assert news_of(agents, 2)[0] == ("node1", Lost("gone"))
    assert agents.by_node["node1"].process == "6"


@pytest.mark.parametrize(
    ("closed", "lost"),
    [
        (["node2"], {"node2": "gone"}),
        (["node1", "node2"], {"node1": "gone", "node2": "gone"}),
        (["node1", "node2", "node3"], {"node1": "step", "node2": "step", "node3": "signalled"}),
    ],
)
def test_losses(agents: Agents, run: RunDir, closed: list[str], lost: dict[str, str]) -> None:
    callers = {node: call(agents, run, node) for node in ("node1", "node2", "node3")}
    callers["node3"].say(Signalled(serial=1, attempt=None, signal="TERM"))
    news_of(agents)
    for node in closed:
        callers[node].socket.close()
    assert dict(news_of(agents, len(lost))) == {node: Lost(why) for node, why in lost.items()}  # type: ignore[arg-type]
    assert not set(agents.by_node).intersection(closed)


def test_an_agent_that_was_given_up_does_not_come_back(agents: Agents, run: RunDir) -> None:
    first = call(agents, run, process="5")
    agents.lose("node1")
    assert news_of(agents) == [("node1", Lost("step"))]
    assert first.hears() is None
    again = Caller(agents, run, process="5")
    agents.wait(0.2)
    agents.wait(0.2)
    assert again.hears() == Leave()
    call(agents, run, process="6")


def test_the_next_supervisor_is_reached_at_the_same_address(run: RunDir, clock: Clock) -> None:
    first = Agents(run, "7", writer="w", host="127.0.0.1")
    before = run.contact()
    call(first, run, attempt=3, alive=[0])
    for sock in [first._listener, *(connection.socket for connection in first._connections)]:
        sock.close()  # as by kill -9: nobody is told to leave

    second = Agents(run, "7", writer="x", host="127.0.0.1")
    after = run.contact()
    assert before is not None and after is not None
    assert (after.port, after.secret, after.writer) == (before.port, before.secret, "x")
    second.expect("node1")
    second.expect("node2")
    caller = call(second, run, attempt=3, alive=[0])
    clock.now += module.ADOPTION_SECONDS
    assert news_of(second) == [("node2", Lost("gone"))]
    caller.socket.close()
    second.close()


def test_an_agent_that_starts_ranks_is_not_ready_for_others(agents: Agents, run: RunDir) -> None:
    caller = call(agents, run)
    caller.say(Ready(port=4))
    news_of(agents)
    agent = agents.by_node["node1"]
    assert agent.is_ready
    agent.pressed = 4  # of the attempt before
    agents.send(
        agent, StartRanks(attempt=1, ranks=PLACES, world_size=1, nodes=1, master_addr="127.0.0.1", master_port=4)
    )
    assert not agent.is_ready and not agent.pressed
    assert agents.address_of("node1") == "127.0.0.1"


def test_silence_counts_while_somebody_listens(agents: Agents, run: RunDir) -> None:
    caller = call(agents, run)
    agent = agents.by_node["node1"]
    for why in ("it imports sklearn", "it looks for free devices"):
        agents.wait(0.05)
        assert agent.silent_seconds > 0
        caller.say(NotReady(why=why))
        news_of(agents)
        assert (agent.why, agent.silent_seconds, agent.is_ready) == (why, 0.0, False)
        time.sleep(0.1)  # as while the journal waits for its disk
        agents.wait(0.0)
        assert agent.silent_seconds == 0
    caller.say(Ready(port=4))
    news_of(agents)
    assert (agent.why, agent.is_ready) == ("", True)


LATE, ALMOST = READY_SECONDS + 1, READY_SECONDS - 1


class Nodes(Allocation):
    """Three nodes, of which the last is a spare."""

    given_up: dict[str, str]

    def nodes(self) -> list[str]:
        return ["node1", "node2", "node3"]

    def give_up(self, node: str, why: str) -> None:
        self.given_up[node] = why


@pytest.mark.parametrize(
    ("silences", "is_first_ready", "given_up"),
    [
        ([ALMOST, ALMOST, LATE], False, set()),  # a spare is not waited for
        ([ALMOST, LATE, 0], False, {"node1", "node2"}),  # in the same minute: it is no node's fault
        ([10, LATE, 0], False, {"node2"}),  # a new one
        ([LATE, LATE, 0], True, {"node2"}),  # one that is ready has nothing to say
    ],
)
def test_silent_agents_are_given_up(
    tmp_path: Path, silences: list[float], is_first_ready: bool, given_up: set[str]
) -> None:
    run = make_run(tmp_path / "runs", "toy-11f5f19c", submitted("slurm"))
    config = Config(name="toy", task="m:f", resources=Resources(nodes=2))

    held_lease = HeldLease(run=run, config=config, this_job=ThisJob(job_id="7", token="t"), journal=Journal(run))
    agents, allocation = Agents(run, "7", writer="w", host="127.0.0.1"), Nodes(run)
    allocation.given_up = {}
    starter = Starter(held_lease, allocation, agents)
    callers = {node: call(agents, run, node) for node in allocation.nodes()}
    if is_first_ready:
        callers["node1"].say(Ready(port=4))
        news_of(agents)
    assert starter.ready(SchedulerReport(asked_at=0.0)) == []
    for agent, seconds in zip(agents.by_node.values(), silences, strict=True):
        agent.silent_seconds = seconds
    assert starter.ready(SchedulerReport(asked_at=0.0)) == []
    assert set(allocation.given_up) == given_up == set(callers) - set(agents.by_node)
    assert all("do not end" in why for why in allocation.given_up.values())
    agents.close()
