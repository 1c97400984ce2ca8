"""One run of a policy through one trace. What comes after an attempt is decided by jobkit's own code: decide() and its
budgets, Placement, CheckpointSchedule, MemorySchedule, and the watchdog's limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.simulation.cluster import PREEMPTED, Cluster, Trace
from bench.simulation.pace import Pace, Way
from bench.simulation.policy import Policy

from jobkit import slurm
from jobkit.run.records import Failure
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, Status
from jobkit.supervisor.placement import Placement, nodes_to_use
from jobkit.supervisor.retry import decide
from jobkit.supervisor.watchdog import Watch, false_alarms


@dataclass
class Account:
    """Where the wall time of a run went, in seconds: each second once."""

    new: float = 0.0
    """Steps that had not been done before, in seconds of all nodes."""
    fewer: float = 0.0
    """What those took longer on fewer nodes."""
    repeated: float = 0.0
    checkpoints: float = 0.0
    snapshots: float = 0.0
    noticing: float = 0.0
    """From a failure until it was known; the last checkpoint of a stop."""
    starting: float = 0.0
    queue: float = 0.0
    person: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(asdict(self).values())

    @property
    def goodput(self) -> float:
        """As `jobkit status` has it: new steps over wall time since the first start."""
        return self.new / self.seconds


class Over(Exception):
    """The horizon is reached."""


class Run:
    """A run, from its first start to the horizon."""

    def __init__(self, cluster: Cluster, policy: Policy, trace: Trace, horizon: float) -> None:
        self.cluster, self.policy, self.trace, self.horizon = cluster, policy, trace, horizon
        self.account = Account()
        self.attempts: list[Attempt] = []
        self.resubmitted = 0
        """How often a person had to."""
        self.requeued = 0
        self.now = 0.0
        self._config = policy.config(cluster)
        self._names = [f"node{number}" for number in range(cluster.fleet)]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._next = 0
        """Of the trace."""
        self._gone_until = [0.0] * cluster.fleet
        """Until when Slurm does not have a node."""
        self._broken_until = [0.0] * cluster.fleet
        """Until when each process on a node dies, which Slurm does not know."""
        self._best = self._durable = 0.0
        self._memory: float | None = None
        self._submission = 1
        self._excluded: list[str] = []
        self._seen_broken: list[str] = []
        self._job: list[str] = []
        self._lost: set[str] = set()
        self._used: list[str] = []
        self._ends = 0.0
        self._in_place = False

    def play(self) -> Account:
        """Where the time until the horizon went."""
        try:
            self._allocate()
            while True:
                self._run_attempt()
        except Over:
            return self.account

    # Time

    def _spend(self, what: str, seconds: float) -> None:
        seconds = min(seconds, self.horizon - self.now)
        setattr(self.account, what, getattr(self.account, what) + seconds)
        self.now += seconds
        if self.now >= self.horizon:
            raise Over

    def _until_event(self, until: float) -> tuple[float, str, str]:
        """The next that happens to the attempt: when, what and to which node; (`until`, "", "") for nothing. What
        happens to other nodes is noted on the way."""
        used = set(self._used)
        while self._next < len(self.trace.times) and self.trace.times[self._next] < until:
            when, cause = self.trace.times[self._next], self.trace.causes[self._next]
            number = self.trace.nodes[self._next]
            self._next += 1
            name = self._names[number]
            happens = cause == PREEMPTED or name in used
            if happens and when < self.now:
                continue  # while nothing ran there
            if cause in ("node", "gpu") and not self.policy.ideal:
                until_repaired = self._gone_until if cause == "node" or name not in self._job else self._broken_until
                until_repaired[number] = when + self.cluster.repair
                if cause == "node" and name in self._job:
                    self._lost.add(name)
            if happens:
                return when, cause, name
        return until, "", ""

    # The job

    def _allocate(self) -> None:
        """Nodes for a job, in the order in which Slurm has them: more often than not those of the last one."""
        wanted = self.cluster.nodes
        self._until_event(self.now)
        while len(free := self._free(self._excluded)) < wanted and len(free := self._free(())) < wanted:
            self._spend("queue", min(until for until in self._gone_until if until > self.now) - self.now)
        self._job = free[: wanted + self.policy.spares]
        self._used, self._lost, self._memory, self._in_place = [], set(), None, False
        self._ends = self.now + self.cluster.time_limit

    def _free(self, excluded: Sequence[str]) -> list[str]:
        taken = set(excluded)
        return [
            name
            for name, until in zip(self._names, self._gone_until, strict=True)
            if until <= self.now and name not in taken
        ]

    @property
    def _placement(self) -> Placement:
        return Placement(self._job, self._lost, set(self._excluded), partial(nodes_to_use, self._config))

    # The attempts

    def _run_attempt(self) -> None:
        cluster = self.cluster
        self._used = self._placement.choose(self._used, self._config.resources.nodes)
        attempt = Attempt(
            id=len(self.attempts) + 1,
            cluster="slurm",
            job_id=str(self.requeued),
            started=self.now,
            submission=self._submission,
            nodes=self._used,
            began="in place" if self._in_place else "requeued",
            durable_step=self._steps(self._durable),
        )
        from_memory = self._memory is not None and self._memory > self._durable
        start = cluster.restart_in_place if self._in_place else cluster.start
        if not from_memory and self._durable:
            start += cluster.durable
        stop_at = self._ends - slurm.stop_margin(cluster.time_limit)
        when, cause, node = self._until_event(min(self.now + start, stop_at))
        self._spend("starting", when - self.now)
        if not cause and when >= stop_at:
            cause = "timeout"
        if not cause and (broken := self._broken_node()):
            cause, node = "gpu", broken
        if not cause:
            attempt.resumed, attempt.from_memory = self.now, from_memory
            began = max(self._durable, self._memory or 0.0)
            attempt.first_step = self._steps(began)
            cause, node = self._train(attempt, began, stop_at)
        self._end(attempt, cause, node)

    def _broken_node(self) -> str | None:
        return next((name for name in self._used if self._broken_until[self._number[name]] > self.now), None)

    def _train(self, attempt: Attempt, began: float, stop_at: float) -> tuple[str, str]:
        """The loop, until something ends it."""
        pace = Pace.of(self.policy, self.cluster, self.attempts)
        speed = len(self._used) / self.cluster.nodes
        when, cause, node = self._until_event(stop_at)
        way = pace.after(min(when, self.horizon) - self.now)
        reached = began + way.progress * speed
        self._keep(began, way, speed)
        again = max(0.0, min(reached, self._best) - began) / speed
        new = max(0.0, reached - max(self._best, began))
        self._best = max(self._best, reached)
        attempt.last_step = self._steps(reached)
        self.account.checkpoints += way.checkpoints
        self.account.snapshots += way.snapshots
        self.account.repeated += again
        self.account.new += new
        self.account.fewer += new / speed - new
        self.now += way.checkpoints + way.snapshots + way.progress
        if when >= self.horizon:
            raise Over
        cause = cause or "timeout"
        saves = cause in (PREEMPTED, "timeout") if self.policy.retry else cause in self.policy.saves_at
        if saves:
            self._spend("checkpoints", pace.stall)
            self._spend("noticing", max(0.0, pace.durable - pace.stall))
            self._durable = reached
        attempt.durable_step = self._steps(self._durable)
        return cause, node

    def _keep(self, began: float, way: Way, speed: float) -> None:
        """What the disk and the memory hold after an attempt."""
        if way.durable is not None:
            self._durable = began + way.durable * speed
        if way.memory is not None:
            self._memory = began + way.memory * speed

    def _end(self, attempt: Attempt, cause: str, node: str) -> None:
        """Notice it, and do what the policy says."""
        cluster = self.cluster
        lost_batch_node = cause == "node" and node == self._job[0] and not self.policy.ideal
        self._spend("noticing", self._seconds_to_notice(cause, lost_batch_node))
        attempt.ended = self.now
        attempt.cause = {"rank": "killed", "gpu": "crashed", "node": "node_failure"}.get(cause, cause)
        if cause not in (PREEMPTED, "timeout"):
            attempt.failure = self._failure(cause, node)
        self.attempts.append(attempt)
        if cause == "gpu" and node not in self._seen_broken:
            self._seen_broken.append(node)
        action = self._next_action(cause, lost_batch_node)
        if action == "in_place":
            self._in_place = True
            return
        if action == "stop":
            self._submission += 1
            # A person sees which GPUs broke, and whether they have been repaired.
            self._excluded = [name for name in self._seen_broken if self._broken_until[self._number[name]] > self.now]
            self.resubmitted += 1
            self._spend("person", cluster.person)
        else:
            self.requeued += 1
            self._spend("queue", cluster.credential)
        self._spend("queue", cluster.queue)
        self._allocate()

    def _failure(self, cause: str, node: str) -> Failure:
        """What is known of it: of a hang not who it was, of a lost node not which rank."""
        if cause == "hang":
            return Failure(error="no progress")
        if cause == "node":
            return Failure(node=node)
        return Failure(node=node, rank=self._used.index(node) * self._config.resources.ranks_per_node)

    def _seconds_to_notice(self, cause: str, lost_batch_node: bool) -> float:
        cluster = self.cluster
        if lost_batch_node:
            alone = len(self._job) == 1 or not self.policy.retry
            return cluster.slurmd_timeout if alone else cluster.batch_node
        if cause == "hang":
            if self.policy.hang_notice is not None:
                return self.policy.hang_notice
            own = [one for one in self.attempts if one.submission == self._submission]
            return Watch(RunDir(Path()), 0, self._config.watchdog, false_alarms(own)).limit(True, cluster.step)
        return {"rank": cluster.notice_death, "gpu": cluster.notice_death, "node": cluster.notice_node}.get(cause, 0.0)

    def _next_action(self, cause: str, lost_batch_node: bool) -> str:
        retry = self.policy.retry
        if retry is None:
            return "requeue" if ("batch_node" if lost_batch_node else cause) in self.policy.survives else "stop"
        if self.policy.ideal and cause not in (PREEMPTED, "timeout"):
            return "in_place"
        status = Status(attempts=self.attempts[-2:], checkpoint_seconds=self.cluster.durable)
        needed = slurm.stop_margin(self.cluster.time_limit) + status.seconds_to_progress
        job_goes_on = not lost_batch_node and self._ends - self.now > needed
        placement = self._placement
        decision = decide(
            self.attempts,
            retry,
            excluded=self._excluded,
            keeps_nodes=lambda without: job_goes_on and placement.can_start_again(without),
            can_replace=lambda nodes: len(self._free(nodes)) >= self.cluster.nodes,
        )
        self._excluded += decision.exclude
        if decision.action == "in_place":
            self._spend("starting", decision.pause)
        return decision.action

    def _steps(self, progress: float) -> int:
        return math.floor(progress / self.cluster.step)
