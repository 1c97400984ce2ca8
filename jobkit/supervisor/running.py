"""The ranks of one attempt: which of them live, what arrived about the others, and which signal comes next.

    news of agents --note--> Running --pressure(now)--> loop.py sends STOP or KILL
    stop reasons   --ask-->          --facts---------> attempt.close

A silent rank (agent/agent.py noticed it) is asked for its stacks, then killed. This file only decides: it sends no
message, and gets the time as a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import IntEnum

from jobkit.errors import EXIT_RESUMABLE
from jobkit.run.records import Cause
from jobkit.supervisor.agents import Lost, News, NodeAgent
from jobkit.supervisor.allocation import MARGIN_SECONDS, LaunchFailure
from jobkit.supervisor.diagnosis import OF_A_STOP, Facts, FailedSetup, LostNode
from jobkit.wire.messages import Hello, NotStarted, RankExited, Signalled, Silent

REPORT_SECONDS = 3.0
"""How long the other ranks live on after one that exited without a word: a RankReport of theirs may be the first."""

STACKS_SECONDS = 2.0
"""How long hanging ranks get to write their stacks; faulthandler takes milliseconds where the disk takes them."""

END_SECONDS = 30.0
"""How long killed ranks may take to end, as those that wait for a disk. Then their node is given up."""


class Pressure(IntEnum):
    """The order to the ranks; a rank that ignores it meets the next."""

    NONE = 0
    STOP = 1
    STACKS = 2
    KILL_IDLE = 3
    """Kill those that have not begun to save."""
    KILL = 4
    GIVE_UP = 5


class Running:
    """One attempt while its ranks live.

    running = Running(3, {0: "node1", 1: "node2"}, ends=lambda: frozenset())
    running.note(agent, RankExited(rank=0, code=-9, ...), now=10.0)
    running.pressure(10.0)      # Pressure.KILL: rank 1 would wait for rank 0 for ever
    """

    def __init__(self, attempt: int, ranks: Mapping[int, str], ends: Callable[[], frozenset[int]]) -> None:
        self.attempt = attempt
        self.alive = dict(ranks)
        """Rank -> name of its node."""
        self._has_several_nodes = len(set(ranks.values())) > 1
        self.facts = Facts()
        self.signalled: Signalled | None = None
        self.signalled_at = -math.inf
        self._ends = ends
        """Returns the ranks whose RankReport lies on the disk."""
        self._arrived: list[float] = []
        """When each of `facts.exits` arrived."""
        self._from: dict[Pressure, float] = {}
        """When each pressure begins."""

    def pressure(self, now: float) -> Pressure:
        return max((level for level, since in self._from.items() if since <= now), default=Pressure.NONE)

    def next_change(self, now: float) -> float:
        """Return when the pressure rises next; infinity if never."""
        return min((since for since in self._from.values() if since > now), default=math.inf)

    def ask(self, cause: Cause, words: str, now: float, *, end: float = math.inf, margin: float = 0.0) -> None:
        """Stop the ranks, so that all is over by `end`, `margin` seconds after they were told.

        The decision and the requeue need an eighth of the margin. Ranks that do not save by half of it never will.
        """
        self.facts.stop_reason = self.facts.stop_reason or (cause, words)
        self._begin(Pressure.STOP, now)
        if margin:
            self._begin(Pressure.KILL_IDLE, max(now, end - margin / 2))
        self._kill(max(now, end - margin / 8))

    def put_off(self, until: float) -> None:
        """Kill ranks no earlier: their save makes progress."""
        if Pressure.KILL in self._from:
            self._from |= {Pressure.KILL: until, Pressure.GIVE_UP: until + END_SECONDS}

    def note(self, agent: NodeAgent, news: News, now: float) -> None:
        """Take in an agent's message, or its loss."""
        match news:
            case RankExited() if news.attempt == self.attempt and news.rank in self.alive:
                self._exited(agent, news, now)
            case Signalled() if self.signalled is None:
                self.signalled, self.signalled_at, self.facts.signalled = news, now, True
            case Silent() if news.attempt == self.attempt and self.pressure(now) is Pressure.NONE:
                where = f"in step {news.step}" if news.in_step else "outside a step"
                self.facts.stop_reason = ("hang", f"rank {news.rank}: no sign of life for {news.seconds:.0f} s {where}")
                self.facts.silent = (news, self.alive.get(news.rank, agent.node))
                self._begin(Pressure.STACKS, now)
                self._kill(now + STACKS_SECONDS)
            case NotStarted() if news.attempt == self.attempt:
                self._cannot_start(agent, news.error, now)
            case Hello() if news.attempt != self.attempt and agent.node in self.alive.values():
                self._cannot_start(agent, "the supervisor was killed before it had started the ranks", now)
            case Lost() if agent.node in self.alive.values():
                self._lost(agent, news)
                self._kill(now if news.why != "signalled" else math.inf)
            case _:
                return

    def cannot_start(self, problem: LaunchFailure | LostNode | FailedSetup) -> None:
        """Note the reason why no rank could be started."""
        match problem:
            case FailedSetup():
                self.facts.failed_setup = problem
            case LostNode():
                self.facts.lost_nodes.append(problem)
            case LaunchFailure():
                self.facts.launch_error, self.facts.launch_is_final = problem.words, problem.final

    def keep_nodes(self, alive: set[str]) -> None:
        """Count nodes that Slurm knows to be well as kept: their agents alone were killed."""
        kept = [lost.node for lost in self.facts.lost_nodes if lost.node in alive]
        self.facts.lost_nodes = [lost for lost in self.facts.lost_nodes if lost.node not in alive]
        if kept and not self.facts.lost_nodes:
            self.facts.stop_reason = self.facts.stop_reason or ("killed", f"the agent on {', '.join(kept)} was killed")

    def _exited(self, agent: NodeAgent, exited: RankExited, now: float) -> None:
        node = self.alive.pop(exited.rank)
        self.facts.exits.append((exited, node))
        self._arrived.append(now)
        stops = self.signalled is not None or self.pressure(now) >= Pressure.STOP
        if exited.is_done or (exited.code in OF_A_STOP and stops):
            return
        if self.facts.reported is None and exited.code != EXIT_RESUMABLE:
            self.facts.reported = self._ends()
        is_silent = exited.code > 0 and exited.rank not in (self.facts.reported or ())
        if exited.code == EXIT_RESUMABLE or (stops and is_silent):
            # All stop together, a program under `command:` with any exit code. None waits for the others for ever.
            self._begin(Pressure.STOP, now)
            self._kill(now + MARGIN_SECONDS)
            return
        # The others may have the same error: then no node is to blame, and before the first step that is final.
        says_why = exited.code < 0 or (not is_silent and exited.step > 0 and not self._has_several_nodes)
        self._kill(now if says_why else now + REPORT_SECONDS)

    def _lost(self, agent: NodeAgent, lost: Lost) -> None:
        self._drop(agent.node)
        if lost.why == "step":
            self.facts.stop_reason = self.facts.stop_reason or ("killed", "the agents of all nodes were killed at once")
        elif lost.why == "gone":
            at = sum(arrived <= agent.closed_at for arrived in self._arrived)
            self.facts.lost_nodes.append(LostNode(node=agent.node, why="the connection to its agent is lost", at=at))

    def _cannot_start(self, agent: NodeAgent, error: str, now: float) -> None:
        self.facts.launch_error = self.facts.launch_error or f"{agent.node}: {error}"
        self._drop(agent.node)
        self._kill(now)

    def _drop(self, node: str) -> None:
        self.alive = {rank: name for rank, name in self.alive.items() if name != node}

    def _kill(self, when: float) -> None:
        self._begin(Pressure.KILL, when)
        self._begin(Pressure.GIVE_UP, when + END_SECONDS)

    def _begin(self, level: Pressure, when: float) -> None:
        self._from[level] = min(when, self._from.get(level, math.inf))
