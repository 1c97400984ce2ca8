"""The supervisor's loop: agents ready -> begin -> ranks -> close -> in place, or out of the job.

    agents (TCP) --news------------> main thread --StartRanks, Signal--> agents
    Slurm thread --SchedulerReport-> (waits in   --close---------------> journal (attempt.py, closing.py)
    disk thread  --Request---------> a selector) --again---------------> Allocation

The main thread decides, and asks neither Slurm nor a slow disk while ranks live. An unexpected error ends the process:
job.sh starts it again, and the ranks train on meanwhile. main.py calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from jobkit.disk import FULL_DISK_SECONDS, may_return
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.log import log
from jobkit.run.records import AttemptBegan, Cause, Request
from jobkit.run.status import State
from jobkit.supervisor import attempt as attempts
from jobkit.supervisor import notify
from jobkit.supervisor.agents import Agents, Lost, News, NodeAgent
from jobkit.supervisor.allocation import MARGIN_SECONDS, Allocation, SchedulerReport, margin_of
from jobkit.supervisor.attempt import EXIT_RUN_FAILED
from jobkit.supervisor.closing import REQUESTS, Unsaved, request_of
from jobkit.supervisor.lease import HeldLease
from jobkit.supervisor.poller import Poller
from jobkit.supervisor.retry import Decision
from jobkit.supervisor.running import Pressure, Running
from jobkit.supervisor.starter import CannotStart, Starter
from jobkit.wire.messages import LOCAL, Hello, Signal, Signalled, SignalName

QUIET_SECONDS, UNCLEAR_SECONDS = 30.0, 2.0
"""How often Slurm is asked, and how often while a signal or a lost node waits for its explanation."""

EXPLANATION_SECONDS = 60.0
"""How long after such an event Slurm is asked more often; no attempt begins after an unexplained signal meanwhile.

A slurmctld that is busy, or starts again, needs so long to say why."""

DISK_SECONDS = 1.0
"""How often requests are read: each look is a request to a file server that all supervisors share."""

LOST_NODE_SECONDS = 10.0
"""How long a decision about lost nodes waits for Slurm's word."""

LONG_PAUSE_SECONDS = 45.0
"""At the start of a pause of 60 s, a part of which is over, the newest snapshot is written to the disk."""

SALVAGE_SECONDS, SALVAGE_AGENTS_SECONDS = 300.0, 5.0
"""How long that may take where nothing stops the job: 100 GB to a slow disk. And how long it waits for agents, which
have to see the end of all that the last ranks have started."""

ORDERS: dict[Pressure, tuple[SignalName, bool]] = {
    Pressure.STOP: ("STOP", False),
    Pressure.STACKS: ("STACKS", False),
    Pressure.KILL_IDLE: ("KILL", True),
    Pressure.KILL: ("KILL", False),
}
"""The signal of each pressure, and whether it spares ranks that save."""


T = TypeVar("T")


def once_there_is_room(act: Callable[[], T], wait: Callable[[], object]) -> T:
    """Return the result of `act`; where the disk is full or away try for FULL_DISK_SECONDS, else raise OSError."""
    deadline = math.inf
    while True:
        began = time.monotonic()
        try:
            return act()
        except OSError as error:
            now = time.monotonic()
            if deadline == math.inf or now - began > FULL_DISK_SECONDS:  # the disk was there for long
                deadline = now + FULL_DISK_SECONDS
            if not may_return(error) or now >= deadline:
                raise
            log.warning("waiting for the disk: %s", error)
        wait()


@dataclass(frozen=True, kw_only=True)
class StopReason:
    """A reason to stop the ranks, and by when all has to be over."""

    cause: Cause
    words: str = ""
    end: float = math.inf
    margin: float = 0.0
    """See Running.ask."""


class Supervisor:
    """Runs the attempts of one run in one job.

    code = Supervisor(held_lease, Allocation(run), signals).run()

    Handlers append to `signals`; each signal wakes the main thread.
    """

    def __init__(self, held_lease: HeldLease, allocation: Allocation, signals: list[int]) -> None:
        this_job = held_lease.this_job
        self.held_lease, self.allocation = held_lease, allocation
        self.agents = Agents(
            held_lease.run, this_job.job_id, writer=held_lease.writer, host=allocation.host, restart=this_job.restart
        )
        self.starter = Starter(held_lease, allocation, self.agents)
        self.running: Running | None = None
        self.report = SchedulerReport(asked_at=-math.inf)
        """Slurm's newest answer."""
        self._signals = signals
        self._request: Request | None = None
        self._unfinished = -1
        """Bytes of the checkpoint that is being written, while a person waits for it."""
        self._unclear_since = self._signalled_at = -math.inf
        self._started_at = math.inf
        """When the ranks of this attempt were started; infinity between attempts."""
        self._slurm = Poller(allocation.poll, self.agents.wake, every=QUIET_SECONDS)
        self._disk = Poller(self._look_at_disk, self.agents.wake, every=DISK_SECONDS)

    def run(self) -> int:
        """Run attempts until nothing is left to run here; return the exit code for job.sh."""
        if self.held_lease.decision is not None:
            return self._leave(self.held_lease.decision)
        self._ask_slurm()
        adopted = self.held_lease.adopted
        running = self._adopt(adopted.began) if adopted is not None else self._next()
        while True:
            while running.alive and (self.report.runs or self.report.cause == "cancelled"):
                self._turn()
            decision = self._close(running)
            notify.tell_waiting(self.held_lease.run)
            if decision.action != "in_place":
                code = self._leave(decision)
                while running.alive:  # they save in the KillWait that Slurm leaves them; it ends this process too
                    self._turn()
                return code
            if decision.rotate:
                self.starter.rotate()
            self.running, self._started_at = None, math.inf
            running = self._next()

    # Begin

    def _adopt(self, began: AttemptBegan) -> Running:
        """Take over the ranks of an attempt that a supervisor before this one began."""
        self.starter.used = began.nodes or self.allocation.nodes()
        places = self.starter.places(self.starter.used)
        for node in places:
            self.agents.expect(node)
        self._started_at = time.monotonic() - (time.time() - began.time)
        log.info("attempt %d goes on: its agents are expected to call again", began.attempt)
        return self._follow(began.attempt, {place.rank: node for node, ours in places.items() for place in ours})

    def _next(self) -> Running:
        """Begin an attempt and start its ranks; without ranks if they cannot be started or there is a reason to stop.

        Such an attempt is closed at once: its reason belongs in the journal.
        """
        self._pause()
        nodes: list[str] = []
        problem = None
        if self.starter.misses_agents:
            self._ask_slurm()  # a launch that fails is explained by its answers
        while not nodes and problem is None and self._reason() is None:
            try:
                nodes = [] if self._may_be_ended() else self.starter.ready(self.report)
            except CannotStart as error:
                problem = error.problem
            if not nodes and problem is None:
                self._turn()
        stop = None if nodes else self._reason()
        if not nodes:  # now: a supervisor that took over an attempt without ranks would wait for them
            self._salvage()
        used = nodes or self.starter.used
        ranks = sum(map(len, self.starter.places(nodes).values())) if nodes else 0
        names = [] if used == [LOCAL] else used
        number = self._once_saved(lambda is_saved: attempts.begin(self.held_lease, names, ranks, is_saved=is_saved))
        self._started_at = time.monotonic()
        ends = min(self.report.ends, self._started_at + self.allocation.attempt_seconds)
        messages = self.starter.messages(number, nodes, ends) if nodes else {}
        alive = {place.rank: node for node, message in messages.items() for place in message.ranks}
        running = self._follow(number, alive)
        for node, message in messages.items():
            if (agent := self.agents.by_node.get(node)) is not None:
                self.agents.send(agent, message)
            else:  # it went while the attempt waited for the disk
                running.note(NodeAgent(node, process=""), Lost("gone"), time.monotonic())
        if problem is not None:
            running.cannot_start(problem)
        self._obey(running, stop)  # without ranks no turn follows: the reason to stop is the attempt's cause
        return running

    def _once_there_is_room(self, act: Callable[[], T]) -> T:
        return once_there_is_room(act, lambda: self._turn(time.monotonic() + DISK_SECONDS))

    def _once_saved(self, act: Callable[[bool], T]) -> T:
        """Return the result of `act(is_saved)`, which journals; before an end it has the newest snapshot saved."""
        try:
            return self._once_there_is_room(lambda: act(False))
        except Unsaved:
            self._salvage()
            return self._once_there_is_room(lambda: act(True))

    def _follow(self, number: int, alive: dict[int, str]) -> Running:
        folder = self.held_lease.run.ends_folder(number)
        self.running = Running(
            number, alive, lambda: frozenset(int(file.stem) for file in folder.glob("*.json") if file.stem.isdigit())
        )
        return self.running

    # Between attempts

    def _pause(self) -> None:
        """Wait until the next attempt may begin, or until there is a reason to stop."""
        seconds = attempts.pause(self.held_lease)
        until = time.monotonic() + seconds
        if seconds >= LONG_PAUSE_SECONDS:
            self._salvage()
        while time.monotonic() < until and self._reason() is None:
            before = self._signalled_at
            self._turn(until)
            if self._signalled_at > before:  # a controller that is busy may not say why before the agents are killed
                self._salvage()

    def _salvage(self) -> None:
        """Let the agents write the newest snapshot in their memory to the disk, unless a checkpoint is as new.

        Ranks of the last attempt's number do it, which run no program of the user's. If they fail, or are killed
        meanwhile, the older checkpoint stays.
        """
        stop, last = self._reason(), self.running
        facts = last.facts if last is not None else None
        step = attempts.unsaved_step(self.held_lease, facts)
        attempt = self.held_lease.journal.status.attempt
        if step is None or attempt is None or (stop is not None and stop.end <= time.monotonic()):
            return
        until, by_node = time.monotonic() + SALVAGE_AGENTS_SECONDS, self.agents.by_node
        while not (by_node and all(agent.is_ready for agent in by_node.values())) and time.monotonic() < until:
            self._turn(until)
        nodes = [node for node in self.starter.names if node in by_node and by_node[node].is_ready]
        messages = self.starter.messages(attempt.number, nodes, math.inf) if nodes else {}
        alive = {place.rank: node for node, message in messages.items() for place in message.ranks}
        running = self.running = Running(attempt.number, alive, lambda: frozenset())
        if last is not None:  # the time that Slurm leaves counts from its signal
            running.signalled, running.signalled_at = last.signalled, last.signalled_at
        now = time.monotonic()
        running.ask("stopped", "", now, end=now + SALVAGE_SECONDS)  # they ignore it, but for its end
        for node, message in messages.items():
            self.agents.send(by_node[node], replace(message, salvage=True))
        while running.alive:
            self._turn()
        self.running = last
        if last is None:  # else the ends of its ranks are not in the journal yet
            self.agents.acknowledge_exits()
        if attempts.unsaved_step(self.held_lease, facts) is not None:
            log.warning("the snapshot of step %d was not saved: logs/%d may say why", step, attempt.number)

    # While ranks live

    def _turn(self, until: float = math.inf) -> None:
        """Take in news, or wait for them a second at most, and press ranks that have to end."""
        now, running = time.monotonic(), self.running
        self._slurm.every = UNCLEAR_SECONDS if now - self._unclear_since < EXPLANATION_SECONDS else QUIET_SECONDS
        change = math.inf if running is None else running.next_change(now)
        for agent, news in self.agents.wait(min(1.0, until - now, change - now)):
            self._take(agent, news)
        for report in self._slurm.take():
            self.report = report or self.report
        for request, unfinished in self._disk.take():
            is_progress = unfinished != self._unfinished
            self._request, self._unfinished = request, unfinished
            if is_progress and running is not None and self._person_waits:
                running.put_off(min(now + MARGIN_SECONDS, self.report.ends))
        if running is not None:
            self._obey(running)
            self._press(running)

    def _obey(self, running: Running, stop: StopReason | None = None) -> None:
        """Pass the reason to stop on, if there is one: `stop`, else that of now."""
        if (stop := stop or self._reason()) is not None:
            running.ask(stop.cause, stop.words, time.monotonic(), end=stop.end, margin=stop.margin)

    def _take(self, agent: NodeAgent, news: News) -> None:
        if isinstance(news, Hello) and news.alive and self.held_lease.adopted is not None:
            self.held_lease.run.failed_starts.unlink(missing_ok=True)  # to job.sh they are as good as a beginning
        if isinstance(news, Signalled):
            self._signalled_at = time.monotonic()
        if isinstance(news, (Signalled, Lost)):
            self._ask_slurm()
        if self.running is not None:
            self.running.note(agent, news, time.monotonic())
        if isinstance(news, Lost):
            log.warning("the agent on %s is gone (%s)", agent.node, news.why)
            self.allocation.lost(agent.node, agent.why)

    def _ask_slurm(self) -> None:
        """Ask Slurm now, and more often for a while."""
        self._unclear_since = time.monotonic()
        self._slurm.every = UNCLEAR_SECONDS
        self._slurm.poke()

    def _press(self, running: Running) -> None:
        level = running.pressure(time.monotonic())
        for node in set(running.alive.values()):
            agent = self.agents.by_node.get(node)
            if level is Pressure.GIVE_UP:
                log.warning("ranks on %s do not end", node)
                self.starter.give_up(node)
                self.agents.lose(node)
            elif agent is not None and agent.connection is not None and agent.pressed < level:
                name, spares_saving = ORDERS[level]
                self.agents.send(agent, Signal(attempt=running.attempt, name=name, unless_saving=spares_saving))
                agent.pressed = level

    def _reason(self) -> StopReason | None:
        """Return the reason to stop that there is now, if any."""
        now, report = time.monotonic(), self.report
        if self._signals and self.allocation.signals_stop:
            return StopReason(cause="stopped", end=now + MARGIN_SECONDS if len(self._signals) == 1 else now)
        if self._signals:  # Slurm's SIGTERM to the batch step
            self._signals.clear()
            self._ask_slurm()
        request = self._request
        if request is not None and (request.kind == "cancel" or self._is_open(request)):
            grace = MARGIN_SECONDS if request.grace is None else request.grace
            cause = REQUESTS[request.kind]
            return StopReason(cause=cause, words=f"{cause} by {request.user or 'a person'}", end=now + grace)
        if report.cause in ("preempted", "cancelled", "timeout"):
            # srun kills the agents KillWait after SIGTERM, however long the grace time is; not after SIGUSR2.
            signalled = self.running.signalled if self.running is not None else None
            since = self.running.signalled_at if self.running is not None and signalled is not None else now
            end = report.ends if signalled is not None and signalled.signal == "USR2" else since + report.kill_wait
            return StopReason(cause=report.cause, end=min(end, report.ends), margin=min(end, report.ends) - since)
        limit = self.allocation.attempt_seconds
        for end, margin in ((report.ends, report.margin), (self._started_at + limit, margin_of(limit))):
            if now >= end - margin:
                return StopReason(cause="timeout", end=end, margin=margin)
        return None

    def _is_open(self, request: Request) -> bool:
        """Return whether a request is about the attempt that runs, or came in the pause after the last one."""
        attempt = self.held_lease.journal.status.attempt
        if attempt is None or attempt.number != request.attempt:
            return False
        if attempt.ended is None:
            return self._started_at < math.inf  # else its ranks have ended, and its end is being journalled
        return attempt.ended.cause != REQUESTS[request.kind]

    @property
    def _person_waits(self) -> bool:
        """Whether a person has asked for a stop, and named no time for it."""
        request = self._request
        if request is not None:
            return request.kind != "preempt" and request.grace is None
        return len(self._signals) == 1 and self.allocation.signals_stop

    def _look_at_disk(self) -> tuple[Request | None, int]:
        """Return a request for this attempt, and the size of a save that a person waits for; called in a thread."""
        status = self.held_lease.journal.status
        attempt = 0 if status.attempt is None else status.attempt.number
        unfinished = self.held_lease.run.unfinished_bytes() if self._person_waits else -1
        return request_of(self.held_lease.run, status.person_submission, attempt), unfinished

    # End

    def _close(self, running: Running) -> Decision:
        """Journal the end of an attempt, after Slurm's explanation where it needs one."""
        facts = running.facts
        if running.signalled is not None:
            while self._may_be_ended():
                self._turn()
        elif (
            facts.lost_nodes
            or facts.failed_setup
            or (facts.stop_reason is not None and facts.stop_reason[0] == "killed")
        ):
            # The other node of a setup line comes by Slurm alone, and no rank waits meanwhile.
            self._wait_for_word(self._unclear_since, math.inf if facts.failed_setup else LOST_NODE_SECONDS)
            if self.report.asked_at >= self._unclear_since:  # else silence, which is no answer
                running.keep_nodes({lost.node for lost in facts.lost_nodes} - self.report.down - self.starter.lost)
        self.starter.lost |= {lost.node for lost in facts.lost_nodes}
        facts.slurm_cause = self.report.cause
        options = self.allocation.restart_options(self.held_lease, self.report, self.starter.placement)
        ranks_live = bool(running.alive)
        if not ranks_live:
            self._started_at = math.inf
        decision = self._once_saved(
            # Ranks that live save themselves; Slurm leaves this process no time to wait for them.
            lambda is_saved: attempts.close(self.held_lease, facts, options, is_saved=is_saved or ranks_live)
        )
        log.info("attempt %d ended: %s (%s)", running.attempt, decision.reason, decision.action)
        ended = self.held_lease.journal.status.attempt
        if ended is not None and ended.ended is not None and ended.ended.cause == "disk":
            self.held_lease.journal.flush()  # the ranks have waited for room already
        else:
            self._once_there_is_room(self.held_lease.journal.flush)
        self.agents.acknowledge_exits()
        return decision

    def _may_be_ended(self) -> bool:
        """Return whether Slurm has signalled the agents, and has not said why: the next attempt may be ended at once.

        Srun may kill them yet, KillWait after the signal; a busy controller may not answer a question or two.
        """
        is_explained = self.report.asked_at >= self._signalled_at
        seconds = max(EXPLANATION_SECONDS, self.report.kill_wait + 2.0)
        return not is_explained and time.monotonic() < self._signalled_at + seconds

    def _wait_for_word(self, since: float, seconds: float) -> None:
        while self.report.asked_at < since and time.monotonic() < since + seconds:
            self._turn(since + seconds)

    def _leave(self, decision: Decision) -> int:
        """Carry out a decision that ends this job; return the exit code."""
        if decision.action in ("requeue", "successor"):
            self.allocation.again(self.held_lease, decision, self.starter.lost)
            return EXIT_RESUMABLE
        if decision.action == "fail":
            return EXIT_RUN_FAILED
        return EXIT_FINISHED if self.held_lease.journal.status.state == State.FINISHED else EXIT_RESUMABLE
