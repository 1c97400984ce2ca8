"""Which nodes have the next attempt, how their agents become ready, and what each agent is told to start.

Placement (names) --> allocation.start_agents --> Hello, Ready --> StartRanks(ranks of the node)

loop.py calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from jobkit.log import log
from jobkit.supervisor.agents import Agents
from jobkit.supervisor.allocation import Allocation, LaunchFailure, SchedulerReport
from jobkit.supervisor.diagnosis import FailedSetup, LostNode
from jobkit.supervisor.lease import HeldLease
from jobkit.supervisor.placement import Placement, nodes_to_use
from jobkit.supervisor.tries import end_of, ran_until_stopped
from jobkit.wire.messages import LOCAL, RankPlace, StartRanks

READY_SECONDS = 1200.0
"""How long an agent that is not ready may say nothing. An import may take 15 min (agent/preload.py): then the agent
ends by itself, unless it is in a call of the kernel that does not return."""


class CannotStart(Exception):
    """No attempt can begin: the node to blame, or a failure that is no node's."""

    def __init__(self, problem: LaunchFailure | LostNode | FailedSetup) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Starter:
    """Gets the agents of one job ready for one attempt after the other.

    while not (nodes := starter.ready(report)): ...      # wait for agents
    for node, message in starter.messages(3, nodes, math.inf).items(): agents.send(agents.by_node[node], message)
    """

    def __init__(self, held_lease: HeldLease, allocation: Allocation, agents: Agents) -> None:
        self.held_lease, self.allocation, self.agents = held_lease, allocation, agents
        self.names = allocation.nodes()
        self.used: list[str] = []
        """The nodes of the last attempt, in the order of its ranks."""
        self.lost: set[str] = set()
        """Nodes that are not used again in this start of the job."""
        self._has_spares = False

    @property
    def placement(self) -> Placement:
        count = partial(nodes_to_use, self.held_lease.config) if self.names != [LOCAL] else lambda usable: usable
        return Placement(self.names, self.lost, self.held_lease.journal.status.excluded_nodes, count)

    def give_up(self, node: str) -> None:
        """Use a node no more in this start of the job. This machine has no other: there only the agent is replaced."""
        if self.names != [LOCAL]:
            self.lost.add(node)

    def rotate(self) -> None:
        """Give each node the ranks of its neighbour, whose snapshots it holds too."""
        self.used = [*self.used[1:], *self.used[:1]]

    @property
    def misses_agents(self) -> bool:
        return any(node not in self.agents.by_node for node in self.used)

    def ready(self, report: SchedulerReport) -> list[str]:
        """Return the nodes for the next attempt once all their agents are ready, else an empty list.

        Starts the agents that are missing. Raises CannotStart.
        """
        if self.allocation.failed_setup is not None:
            raise CannotStart(self.allocation.failed_setup)
        if self._gives_up_silent():
            return []
        placement, by_node = self.placement, self.agents.by_node
        ready = [node for node, agent in by_node.items() if agent.is_ready]
        self.used = placement.choose(self.used, self.held_lease.config.resources.nodes, ready)
        if not self.used:
            raise CannotStart(LaunchFailure(words=f"too few nodes are left of {', '.join(self.names)}"))
        missing = [node for node in self.used if node not in by_node]
        if missing:
            # Spares get their agents at the beginning: to start one later takes seconds of the replacement.
            spares = [] if self._has_spares else [node for node in placement.usable if node not in self.used]
            self._has_spares = True
            new = [node for node in spares if node not in by_node]  # others have one of a supervisor before this one
            self.allocation.start_agents([*missing, *new], self._next_number)
            if (failure := self.allocation.launch_failure(missing, report)) is not None:
                log.warning("%s", failure.words)
                blamed = failure.nodes
                if failure.final and self._has_trained:  # with these programs: it is the one node, or a moment
                    failure = replace(failure, final=False)
                    blamed = frozenset(missing if len(missing) == 1 else ()).difference([LOCAL])
                if not blamed:
                    raise CannotStart(failure)
                self.lost |= blamed
                if not self.placement.can_start_again():
                    raise CannotStart(LostNode(node=min(blamed), why=failure.words.removeprefix(f"{min(blamed)}: ")))
        if not all(node in ready for node in self.used):
            return []
        self.allocation.launched()
        return self.used

    def _gives_up_silent(self) -> bool:
        """Give up agents that do not become ready; return whether there are any: then the news of it come first."""
        agents = [self.agents.by_node[node] for node in self.used if node in self.agents.by_node]
        silent = {
            agent.node: agent for agent in agents if not agent.is_ready and agent.silent_seconds > READY_SECONDS / 2
        }
        if all(agent.silent_seconds < READY_SECONDS for agent in silent.values()):
            return False
        for node, agent in silent.items():  # all together: where all hang, no node is to blame
            why = agent.why or "processes of the last attempt do not end"
            self.allocation.give_up(node, f"its agent is not ready, and silent for {READY_SECONDS / 60:g} min: {why}")
            self.agents.lose(node)
        return True

    @property
    def _has_trained(self) -> bool:
        """Whether an attempt of this submission has come to its loop, or ran until the scheduler ended it.

        A `command:` without jobkit.init has no loop.
        """
        ended = [attempt for attempt in self.held_lease.journal.status.attempts_of_submission() if attempt.ended]
        return any(end_of(attempt).first_step is not None or ran_until_stopped(attempt) for attempt in ended)

    @property
    def _next_number(self) -> int:
        last = self.held_lease.journal.status.attempt
        return 1 if last is None else last.number + 1

    def places(self, nodes: Sequence[str]) -> dict[str, list[RankPlace]]:
        """Return the ranks of each agent; the agent of this machine has those of all simulated nodes."""
        resources = self.held_lease.config.resources
        is_local = list(nodes) == [LOCAL]
        size = resources.ranks_per_node
        places: dict[str, list[RankPlace]] = {}
        for rank in range(size * (resources.nodes if is_local else len(nodes))):
            place = RankPlace(rank=rank, local_rank=rank % size, local_world_size=size, node=rank // size)
            places.setdefault(LOCAL if is_local else nodes[place.node], []).append(place)
        return places

    def messages(self, number: int, nodes: Sequence[str], ends: float) -> dict[str, StartRanks]:
        """Return the StartRanks message for the agent of each node; attempt `number` has time until `ends`."""
        places = self.places(nodes)
        first = self.agents.by_node.get(nodes[0])
        count = len({place.node for ours in places.values() for place in ours})
        return {
            node: StartRanks(
                attempt=number,
                ranks=ours,
                world_size=sum(map(len, places.values())),
                nodes=count,
                master_addr="127.0.0.1" if len(nodes) == 1 else self.agents.address_of(nodes[0]),
                master_port=(first.port if first is not None else None) or 0,
                time_left=ends - time.monotonic() if ends < math.inf else None,
            )
            for node, ours in places.items()
        }
