"""`jobkit/start.py jobkit.agent.agent RUNDIR`: the process of each node that forks the ranks, and outlives them.

    supervisor --StartRanks, Signal, Leave-------------> agent --fork-----------> ranks
               <--Ready, RankExited, Signalled, Silent--       <--exit codes, pages--

It imports torch for all attempts, so that a rank starts in milliseconds. A fork copies one thread and no state of a
device, so an agent has one thread and touches no device. A supervisor that is killed comes back: meanwhile the ranks
train on, and agent/unsupervised.py decides how long.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

from jobkit import mirror
from jobkit.agent import devices
from jobkit.agent.children import Children, send
from jobkit.agent.link import Link
from jobkit.agent.preload import import_for_ranks
from jobkit.agent.processes import Process, has_variables, identify, lives, with_variables
from jobkit.agent.unsupervised import Unsupervised
from jobkit.agent.watchdog import Watch, silence_of
from jobkit.config.schema import Config
from jobkit.log import configure, log
from jobkit.run.rundir import RunDir
from jobkit.slurm.jobs import restart_count
from jobkit.wire.messages import (
    LOCAL,
    Hello,
    Leave,
    NotReady,
    NotStarted,
    RankExited,
    RankPlace,
    Ready,
    Signal,
    Signalled,
    StartRanks,
)
from jobkit.wire.pages import Kept, Page
from jobkit.wire.signals import STOP_SIGNALS, AgentSignals
from jobkit.worker.forked import become_rank, run_rank_program, start_anew
from jobkit.worker.rendezvous import Reservation, environment_of
from jobkit.worker.salvage import run_salvage

LOOK_SECONDS = 1.0
"""Between two looks at the pages of the ranks, and at the line for devices."""

BUSY_SECONDS = 0.02
"""The same while processes end of which the kernel tells us nothing."""

LEAVE_SECONDS = 5.0
"""How long killed processes are waited for, at the end and at the beginning."""

CALL_SECONDS, OFTEN_SECONDS = 0.25, 10.0
"""Between two calls for a supervisor that is gone, for so long; then LOOK_SECONDS: each call reads a shared disk."""


class Agent:
    """One node's agent.

    program = Agent(run, node="node1", job_id="12").serve()   # None at the end; in each forked process its program
    """

    def __init__(self, run: RunDir, hello: Hello) -> None:
        self.run = run
        self.hello = hello
        """The Hello of this agent, without the state of its ranks."""
        self.config: Config = run.config()
        self.link = Link(run)
        self.children = Children()
        self.alone = Unsupervised(run, hello)
        self.devices = devices.of_run(run, self.config) if hello.node == LOCAL else None
        self.cannot_fork = ""
        """Why ranks have to be new processes; empty if a fork is good."""
        self._ready: Ready | None = None
        """The facts that the supervisor needs before it can start ranks; None while it cannot."""
        self._signals = AgentSignals()
        self._reservation: Reservation | None = None
        self._kept = Kept(with_slots=self.config.checkpoint.memory not in (False, "off"))

    def serve(self) -> Callable[[], NoReturn] | None:
        """Carry out the messages of supervisors; return None at the end. In each forked process, return its program.

        So a rank runs at the top of the program, and ends as any program does.
        """
        self.link.connect(self._hello())
        self.cannot_fork = import_for_ranks(self.run, self.config, self._explain)
        self._signals.install()
        self._explain("its imports are done")
        if self.hello.node == LOCAL:
            self._kill_left_behind()
        is_dismissed = False
        while not is_dismissed:
            self._wait()
            self._pass_on_signals()
            self._report_ends()
            self._get_ready()
            for silent in self.children.silent():
                self.link.tell(silent)
            if not self.link.is_open and not self._go_on_alone():
                break
            for message in self.link.receive():
                match message:
                    case StartRanks():
                        if (program := self._start(message)) is not None:
                            return program
                    case Signal():
                        self.children.obey(message)
                    case Leave():
                        is_dismissed = True
        self._leave()
        return None

    def _wait(self) -> None:
        """Return when something has happened, or when it is time for a look."""
        is_busy = self.children.needs_looks or (self._ready is None and not self.children.ranks)
        if is_busy and self.devices is not None and not self.devices.are_held:
            is_busy = False
        is_calling = 0 < self.link.silent_seconds < OFTEN_SECONDS
        pause = BUSY_SECONDS if is_busy else CALL_SECONDS if is_calling else LOOK_SECONDS
        sources = [self._signals.fileno(), *([self.link.fileno()] if self.link.is_open else [])]
        select.select(sources, [], [], pause)
        self._signals.clear()

    # Ranks

    def _start(self, start: StartRanks) -> Callable[[], NoReturn] | None:
        """Fork the ranks of an attempt; return the program in each forked process, None here."""
        self.children.begin(start.attempt)
        self.alone.note_start(start)
        self._ready = None
        agent, silence = os.getpid(), silence_of(self.config.watchdog)
        for number, place in enumerate(start.ranks):
            page = Page.create()
            if start.salvage:
                memory = self._kept.slots(number)
            else:
                memory = self._kept.environment(number, page, start.world_size)
            if self.link.keeps(Signalled):  # StartRanks was sent before the supervisor heard of the signal
                page.ask_to_stop()
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the child's belong to its own handlers
            try:
                pid = os.fork()
            except OSError as error:
                self.link.tell(NotStarted(attempt=start.attempt, error=f"no process for rank {place.rank}: {error}"))
                self.children.kill_all()
                pid = agent
            if pid == 0:
                return self._become(place, start, page, memory)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            if pid == agent:
                page.close()
                break
            self.children.add(place.rank, pid, page, Watch(silence, not self.config.command, time.monotonic()))
        self._signals.pages = self.children.pages
        self.children.watch_devices(devices.watched(self.config, self.devices))
        return None

    def _become(
        self, place: RankPlace, start: StartRanks, page: Page, memory: Mapping[str, str]
    ) -> Callable[[], NoReturn]:
        """In a forked process: let go of all that is the agent's, and become a rank."""
        environment = environment_of(place, start, self.run, self.config.resources, os.environ)
        if self.devices is not None:
            environment.update(self.devices.visible_on(place))
        environment.update(memory)
        self.let_go()
        become_rank(self.run, place, start, page, environment)
        run = self.run
        if self.cannot_fork:
            start_anew(run, "jobkit.worker.salvage" if start.salvage else "jobkit.worker.forked")
        return lambda: run_salvage(run) if start.salvage else run_rank_program(run)

    def let_go(self) -> None:
        """Close the agent's sockets and files: a supervisor must see its death, and nobody else may keep its locks."""
        self._signals.close()
        self.link.close()
        for page in self.children.pages:
            page.close()
        for resource in (self._reservation, self.devices):
            if resource is not None:
                resource.close()

    def _report_ends(self) -> None:
        if ended := self.children.reap():
            self._signals.pages = self.children.pages  # first: the handler must not touch a page that is closed
            for child in ended:
                self.link.tell(self.children.exited(child, self.link.next_serial()))

    def _get_ready(self) -> None:
        """Tell the supervisor once the next ranks can be started: nothing of the last attempt is left."""
        if self._ready is not None or not self.children.is_gone():
            return
        if self.devices is not None and not self.devices.are_held and not self.devices.take():
            self._explain("it looks for free devices")  # each time: it may do so for days, and a driver may hang
            return
        last, self._reservation = self._reservation, Reservation()
        if last is not None:  # only now: another port each time, for late ranks of a lost node know the last one
            last.close()
        self._ready = Ready(port=self._reservation.port)
        self.link.tell(self._ready)

    def _explain(self, why: str) -> None:
        self.link.tell(NotReady(why=why))

    def _kill_left_behind(self) -> None:
        """Kill what the ranks of an earlier agent of this job have started: the kernel has killed those ranks with it.

        Return once it has ended, for until then it has the devices. On Slurm slurmstepd does that.
        """
        killed: list[Process] = []
        for pid in with_variables(f"JOBKIT_RUN={self.run.path}", "SUBMITIT_EXECUTOR=jobkit"):
            if not has_variables(pid, mirror.MARK):
                log.warning("process %d of an earlier attempt is still there: killed", pid)
                killed.append(identify(pid))
                send(pid, signal.SIGKILL)
        until = time.monotonic() + LEAVE_SECONDS
        while any(map(lives, killed)) and time.monotonic() < until:
            time.sleep(BUSY_SECONDS)

    def _leave(self) -> None:
        """End: nothing of the ranks stays, so that whoever gets the devices next has them alone."""
        self.children.kill_all()
        until = time.monotonic() + LEAVE_SECONDS
        while (not self.children.is_gone() or self.children.mirrors()) and time.monotonic() < until:
            time.sleep(BUSY_SECONDS)
            self.children.reap()

    # Supervisors

    def _hello(self) -> Hello:
        ranks = self.children.ranks
        attempt = self.children.attempt if ranks or self.link.keeps(RankExited) else None
        return replace(self.hello, attempt=attempt, alive=ranks)

    def _pass_on_signals(self) -> None:
        for number in self._signals.take():
            name = "TERM" if number == signal.SIGTERM else "USR2"
            log.info("got SIG%s", name)
            self.link.tell(Signalled(serial=self.link.next_serial(), attempt=self.children.attempt, signal=name))
            self.children.stop_all(number)

    def _go_on_alone(self) -> bool:
        """Call the supervisor again, and act without a supervisor meanwhile; False at the end."""
        if self.link.connect(self._hello()):
            self.alone.end(self.children)
            if self._ready is not None:
                self.link.tell(self._ready)
            return True
        return not self.link.is_dismissed and self.alone.go_on(self.link, self.children)


def adopt_orphans() -> None:
    """Become the parent of processes that ranks leave behind, so that the agent can end them."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def main(arguments: list[str]) -> int:
    """Serve one job's supervisors; in a forked process, run a rank."""
    configure("stderr")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run = RunDir(arguments[0])
    job_id = os.environ["JOBKIT_JOB_ID"]
    hello = Hello(secret="", node=LOCAL, job_id=job_id, process=secrets.token_hex(4))
    if not job_id.startswith("local-"):
        node, step = os.environ["SLURMD_NODENAME"], os.environ["SLURM_STEP_ID"]
        hello = replace(hello, node=node, step=step, restart=restart_count(os.environ))
    adopt_orphans()
    program = Agent(run, hello).serve()
    if program is not None:
        program()
    os._exit(0)  # Python would wait for a thread that a module of `preload` has started
