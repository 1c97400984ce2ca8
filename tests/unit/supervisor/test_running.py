"""The ranks of one attempt: what presses them to end, and when; what is handed on about it."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobkit.config.schema import Config, Resources
from jobkit.run.journal import Journal
from jobkit.run.records import AttemptBegan, AttemptEnded, Request
from jobkit.run.rundir import RunDir
from jobkit.supervisor.agents import Lost, News, NodeAgent
from jobkit.supervisor.lease import HeldLease, ThisJob
from jobkit.supervisor.loop import Supervisor
from jobkit.supervisor.running import END_SECONDS, REPORT_SECONDS, STACKS_SECONDS, Pressure, Running
from jobkit.wire.messages import Hello, NotStarted, RankExited, Signalled, Silent

NODES = {node: NodeAgent(node, process="a") for node in ("n1", "n2", "n3")}


def running(reported: frozenset[int] = frozenset()) -> Running:
    """Return attempt 3: ranks 0 and 1 on n1, 2 on n2; n3 is a spare."""
    return Running(3, {0: "n1", 1: "n1", 2: "n2"}, ends=lambda: reported)


def exited(rank: int, code: int, step: int = 5) -> RankExited:
    return RankExited(serial=rank, attempt=3, rank=rank, code=code, step=step)


@pytest.mark.parametrize(
    ("node", "news", "kills_after"),
    [
        ("n1", exited(0, 0), None),  # it has finished, the others will
        ("n1", exited(0, -9), 0.0),  # the others would wait for it for ever
        ("n1", exited(0, 1), REPORT_SECONDS),  # without a word: another one may be the first
        ("n1", exited(1, 1), REPORT_SECONDS),  # it has left its RankReport: do ranks of other nodes have that error?
        ("n1", exited(1, 1, step=0), REPORT_SECONDS),  # before the first step all may have that error
        ("n1", RankExited(serial=1, attempt=2, rank=0, code=-9), None),  # of the attempt before
        ("n2", Lost("gone"), 0.0),
        ("n3", Lost("gone"), None),  # a spare's loss ends no attempt
        ("n2", NotStarted(attempt=3, error="no memory"), 0.0),
        ("n2", Silent(attempt=3, rank=2, seconds=300, step=7), STACKS_SECONDS),
        ("n2", Hello(secret="", node="n2", job_id="7", attempt=3, alive=[2]), None),
        ("n2", Hello(secret="", node="n2", job_id="7", attempt=2), 0.0),  # it was never told to start the ranks
    ],
)
def test_what_kills_the_other_ranks(node: str, news: News, kills_after: float | None) -> None:
    ranks = running(reported=frozenset({1}))
    ranks.note(NODES[node], news, now=100.0)
    if kills_after is None:
        assert (ranks.pressure(1e9), ranks.next_change(100.0)) == (Pressure.NONE, math.inf)
        return
    assert ranks.pressure(100.0 + kills_after - 0.01) < Pressure.KILL
    assert ranks.pressure(100.0 + kills_after) is Pressure.KILL
    assert ranks.pressure(100.0 + kills_after + END_SECONDS) is Pressure.GIVE_UP


def test_on_one_node_an_error_kills_the_others_at_once() -> None:
    ranks = Running(3, {0: "n1", 1: "n1"}, ends=lambda: frozenset({1}))
    ranks.note(NODES["n1"], exited(1, 1), now=100.0)
    assert ranks.pressure(100.0) is Pressure.KILL


def test_an_exit_that_an_agent_says_again_counts_once() -> None:
    ranks = running()
    for now in (100.0, 101.0):  # as after a Hello
        ranks.note(NODES["n1"], exited(0, 0), now)
    assert len(ranks.facts.exits) == 1


def test_a_stop_leaves_time_to_save_and_time_to_decide() -> None:
    ranks = running()
    ranks.ask("timeout", "", now=100.0, end=180.0, margin=80.0)
    ranks.ask("cancelled", "later", now=101.0, end=math.inf)
    moments = [100.0, 139.0, 140.0, 169.0, 170.0, 200.0]
    names = ["STOP", "STOP", "KILL_IDLE", "KILL_IDLE", "KILL", "GIVE_UP"]
    assert [ranks.pressure(moment).name for moment in moments] == names
    assert ranks.next_change(101.0) == 140.0
    assert ranks.facts.stop_reason == ("timeout", "")  # the first one counts


@pytest.mark.parametrize("code", [-15, 143])
def test_a_program_that_ends_of_the_stop_lets_others_save(code: int) -> None:
    ranks = running()
    ranks.note(NODES["n1"], Signalled(serial=1, attempt=3, signal="TERM"), now=100.0)
    ranks.note(NODES["n1"], exited(0, code), now=101.0)
    assert ranks.pressure(110.0) <= Pressure.STOP
    ranks.note(NODES["n1"], exited(1, -11), now=102.0)
    assert ranks.pressure(102.0) is Pressure.KILL


def test_a_rank_that_stops_unasked_takes_the_others_with_it() -> None:
    ranks = running()
    ranks.note(NODES["n1"], exited(0, 75), now=100.0)
    assert ranks.pressure(100.0) is Pressure.STOP
    assert ranks.pressure(1000.0) >= Pressure.KILL


def test_a_node_that_goes_before_its_consequences_arrive_comes_first() -> None:
    ranks = running()
    agent = NodeAgent("n2", process="a", closed_at=100.0)
    ranks.note(NODES["n1"], exited(0, 1), now=100.5)
    ranks.note(agent, Lost("gone"), now=101.0)
    ((lost,), (first, *_)) = ranks.facts.lost_nodes, ranks.facts.exits
    assert (lost.node, lost.at, first[1]) == ("n2", 0, "n1")
    assert ranks.alive == {1: "n1"}


@pytest.mark.parametrize(
    ("why", "asked", "lost"),
    [("gone", None, ["n2"]), ("step", "killed", []), ("signalled", None, [])],
)
def test_losses_that_are_no_nodes_fault(why: str, asked: str | None, lost: list[str]) -> None:
    ranks = running()
    ranks.note(NODES["n1"], Signalled(serial=1, attempt=3, signal="TERM"), now=99.0)
    ranks.note(NODES["n2"], Lost(why), now=100.0)  # type: ignore[arg-type]
    facts = ranks.facts
    assert (facts.stop_reason and facts.stop_reason[0], [item.node for item in facts.lost_nodes]) == (asked, lost)
    assert facts.signalled


def supervisor_of(folder: Path, names: list[str]) -> Supervisor:
    run = RunDir(folder / "toy-12345678")
    run.path.mkdir()
    config = Config(name="toy", task="toy:train", resources=Resources(nodes=len(names)))
    held_lease = HeldLease(run=run, config=config, this_job=ThisJob(job_id="7", token="t"), journal=Journal(run, "w"))
    allocation = SimpleNamespace(
        nodes=lambda: names, host="127.0.0.1", poll=lambda: None, signals_stop=True, attempt_seconds=100.0
    )
    return Supervisor(held_lease, allocation, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(("names", "goes_on"), [(["local"], True), (["n1", "n2"], False)])
def test_ranks_that_do_not_end_cost_their_node(tmp_path: Path, names: list[str], goes_on: bool) -> None:
    """This machine has no other node: there their agent is replaced."""
    supervisor = supervisor_of(tmp_path, names)
    ranks = Running(3, dict(enumerate(names)), ends=frozenset)
    ranks.ask("preempted", "", now=time.monotonic() - END_SECONDS, end=0.0)
    supervisor._press(ranks)
    assert supervisor.starter.placement.can_start_again() is goes_on


def test_a_node_that_is_well_is_kept() -> None:
    ranks = running()
    ranks.note(NODES["n2"], Lost("gone"), now=100.0)
    ranks.keep_nodes({"n2"})
    facts = ranks.facts
    assert (facts.stop_reason and facts.stop_reason[0], list(facts.lost_nodes)) == ("killed", [])


def test_a_rank_that_is_silent_while_it_stops_is_no_hang() -> None:
    ranks = running()
    ranks.ask("preempted", "", now=100.0, end=190.0)
    ranks.note(NODES["n2"], Silent(attempt=3, rank=2, seconds=300, step=7), now=101.0)
    assert (ranks.facts.stop_reason, ranks.facts.silent) == (("preempted", ""), None)
    assert ranks.next_change(101.0) == 190.0


def test_an_attempt_that_is_taken_over_has_the_time_that_is_left(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, ["local"])
    supervisor._adopt(AttemptBegan(attempt=1, token="t", job_id="7", time=time.time() - 50))
    assert time.monotonic() - supervisor._started_at >= 49


def test_a_request_is_about_one_attempt_or_the_pause_after_it(tmp_path: Path) -> None:
    """The attempt may die while the request is on its way; one that was obeyed is over."""
    supervisor = supervisor_of(tmp_path, ["local"])
    journal = supervisor.held_lease.journal

    def is_stopped_by(attempt: int) -> bool:
        supervisor._request = Request(kind="preempt", submission=1, attempt=attempt)
        return supervisor._reason() is not None

    journal.note(AttemptBegan(attempt=2, token="t", job_id="7"))
    supervisor._started_at = time.monotonic()
    assert (is_stopped_by(1), is_stopped_by(2)) == (False, True)
    supervisor._started_at = math.inf
    assert not is_stopped_by(2), "it has no ranks to stop any more, and its snapshot is being saved"
    journal.note(AttemptEnded(attempt=2, cause="crashed", next="in_place"))
    assert is_stopped_by(2)
    journal.note(AttemptEnded(attempt=2, cause="preempted", next="in_place"))
    assert not is_stopped_by(2)
