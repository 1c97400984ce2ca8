"""The ranks that an agent has forked: stopped, watched, reaped, and ended with all that they have started.

    agent --fork--> first process of a rank (a session of its own) --> its children
          <--exit code--                                           orphans come to the agent (subreaper)

A rank has ended when its first process has, unless a stop ended that one (a shell) before the program within it: then
the program may still save. agent.py calls it.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from jobkit import mirror
from jobkit.agent import processes
from jobkit.agent.devices import HealthWatch, Word
from jobkit.agent.processes import Process
from jobkit.agent.watchdog import Watch
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.supervisor.diagnosis import OF_A_STOP
from jobkit.wire.messages import RankExited, Signal, Silent
from jobkit.wire.pages import Page, Phase

LOOK_SECONDS = 1.0

SHELLS = ("sh", "bash", "dash", "ksh", "zsh")


@dataclass(eq=False)
class Child:
    """One rank."""

    rank: int
    pid: int
    page: Page
    watch: Watch
    oom_kills: int
    """Of this node, when it was forked."""
    code: int | None = None
    """The exit code of its first process; None while that runs."""
    is_stopping: bool = False
    terminated: set[Process] = field(default_factory=set)
    """Its processes that got SIGTERM, because they handle it."""


class Children:
    """The ranks of one attempt on this node.

    children.add(0, pid, page, watch)
    for exited in children.reap(): ...
    children.obey(Signal(attempt=3, name="STOP"))
    """

    def __init__(self) -> None:
        self.attempt: int | None = None
        self.others: dict[int, int | None] = {}
        """Processes of the agent that are no ranks, with their exit codes; None while they run."""
        self._alive: dict[int, Child] = {}
        """By process id, until the end is reported."""
        self._sessions: set[int] = set()
        """Of all ranks of the attempt: the process ids of their first processes."""
        self._all_finished = True
        self._looked_at = 0.0
        self._health: HealthWatch | None = None
        """Of the attempt's devices, until a rank fails."""

    def begin(self, attempt: int) -> None:
        """Forget the last attempt, of which nothing is left."""
        self._end_health_watch()  # a rank that is forked would inherit its pipes
        self.attempt, self._sessions, self._all_finished = attempt, set(), True

    def add(self, rank: int, pid: int, page: Page, watch: Watch) -> None:
        self._alive[pid] = Child(rank, pid, page, watch, kernel_oom_kills())
        self._sessions.add(pid)

    def watch_devices(self, names: list[str]) -> None:
        """Watch NVIDIA devices, by the names in CUDA_VISIBLE_DEVICES, until a rank fails."""
        if names:
            self._health = HealthWatch(names)
            self.others[self._health.pid] = None

    @property
    def ranks(self) -> list[int]:
        """The ranks that run."""
        return sorted(child.rank for child in self._alive.values())

    @property
    def pages(self) -> list[Page]:
        return [child.page for child in self._alive.values()]

    @property
    def needs_looks(self) -> bool:
        """True while the kernel sends no signal about the processes that are waited for."""
        return any(child.is_stopping or child.code is not None for child in self._alive.values())

    # Ends

    def reap(self) -> list[Child]:
        """Take in the ends of all processes that have ended; return the ranks among them.

        Ranks that a signal killed come first: another one that ended meanwhile may have lost its connection to them.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self.others:
                self.others[pid] = os.waitstatus_to_exitcode(status)
            elif pid in self._alive:
                self._alive[pid].code = os.waitstatus_to_exitcode(status)
        for child in self._alive.values():
            if child.is_stopping and child.code is None:
                self._stop_shell(child)
        ended = [child for child in self._alive.values() if child.code is not None and not self._saves_on(child)]
        for child in ended:
            del self._alive[child.pid]
            self._all_finished = self._all_finished and child.code == 0
        return sorted(ended, key=lambda child: (child.code or 0) >= 0)

    def _saves_on(self, child: Child) -> bool:
        """True while a program of a rank saves whose shell the stop has ended already."""
        if child.code not in OF_A_STOP:
            return False
        saving = [pid for pid in processes.in_sessions({child.pid}) if processes.catches(pid, signal.SIGTERM)]
        self._terminate(child, saving)  # Slurm's signal may have reached the shell alone
        return bool(saving)

    def exited(self, child: Child, serial: int) -> RankExited:
        """The message that a rank ended; its page is closed."""
        beat, snapshot_step = child.page.read(), child.page.snapshot_step
        child.page.close()
        assert self.attempt is not None and child.code is not None
        word = Word() if child.code in (EXIT_FINISHED, EXIT_RESUMABLE) else self._device_word()
        return RankExited(
            serial=serial,
            attempt=self.attempt,
            rank=child.rank,
            code=child.code,
            out_of_memory=child.code != 0 and kernel_oom_kills() > child.oom_kills,
            step=beat.step if beat.attempt == self.attempt else -1,
            snapshot_step=snapshot_step,
            in_step=beat.attempt == self.attempt and beat.phase in (Phase.STEPPING, Phase.OUTSIDE),
            device=word.health,
            device_is_sick=word.is_sick,
            device_memory=word.memory,
        )

    def _device_word(self) -> Word:
        """The driver's word after the first failure here; the others of the attempt follow from that."""
        word = None if self._health is None else self._health.ask()
        self._end_health_watch()
        return word or Word()

    def _end_health_watch(self) -> None:
        if self._health is not None and self._health.close():
            del self.others[self._health.pid]
        self._health = None

    def is_gone(self) -> bool:
        """True once nothing of the attempt is left; kill what ranks have left behind, unless all have finished.

        It would use the devices that the next ranks need. Processes that finished ranks leave running are the user's.
        """
        if self._alive:
            return False
        if self._all_finished:
            return True
        strays = self._orphans() - self.mirrors() | set(processes.in_sessions(self._sessions))
        for pid in strays:
            send(pid, signal.SIGKILL)
        return not strays

    def mirrors(self) -> set[int]:
        """The copiers of curves that rank 0 has left behind: they use no device, and end by themselves."""
        return {pid for pid in self._orphans() if processes.has_variables(pid, mirror.MARK)}

    def _orphans(self) -> set[int]:
        return set(processes.children(os.getpid())) - set(self.others)

    # Signals

    def obey(self, message: Signal) -> None:
        """Pass a supervisor's signal on."""
        for child in list(self._alive.values()) if message.attempt == self.attempt else ():
            if message.unless_saving and child.page.read().phase is Phase.SAVING:
                continue
            match message.name:
                case "STOP":
                    self.stop(child)
                case "STACKS":
                    _notify(child, signal.SIGUSR1)
                    send(child.pid, signal.SIGCONT)  # one that was stopped writes its stacks when it goes on
                case "KILL":
                    self._all_finished = False
                    self.kill(child)

    def stop_all(self, number: int = signal.SIGTERM) -> None:
        """Pass on a signal that this agent got. After SIGUSR2 only programs that handle it get it: the others may save
        in time, once the supervisor knows why it came."""
        for child in self._alive.values():
            if number == signal.SIGTERM:
                self.stop(child)
            else:
                child.page.ask_to_stop()
                _notify(child, number)

    def stop(self, child: Child) -> None:
        """Ask a rank to save and end: by the flag, and by SIGTERM to those of its processes that handle it.

        The shell of a `command:` would die of SIGTERM. It stands still while its program saves, and ends then: else it
        would go on with its next line.
        """
        child.page.ask_to_stop()
        if not child.is_stopping:
            child.is_stopping = True
            if not processes.catches(child.pid, signal.SIGTERM) and processes.name_of(child.pid) in SHELLS:
                send(child.pid, signal.SIGSTOP)
            self._terminate(child, processes.that_catch(child.pid, signal.SIGTERM))

    def _stop_shell(self, child: Child) -> None:
        """End the first process of a rank once all that save have ended."""
        if not any(processes.lives(process) for process in child.terminated):
            self._terminate(child, [child.pid])
            send(child.pid, signal.SIGCONT)

    def _terminate(self, child: Child, pids: Collection[int]) -> None:
        """SIGTERM to processes, to each once: a second one may mean `at once` to a program."""
        for process in map(processes.identify, pids):
            if process not in child.terminated:
                child.terminated.add(process)
                send(process[0], signal.SIGTERM)

    def kill_all(self) -> None:
        self._all_finished = False
        for child in self._alive.values():
            self.kill(child)

    def kill(self, child: Child) -> None:
        """Kill a rank and all that it has started in its session."""
        for pid in {child.pid, *processes.in_sessions({child.pid})}:
            send(pid, signal.SIGKILL)

    # The watchdog

    def silent(self) -> list[Silent]:
        """Messages for the ranks that have been silent for too long; it looks once a second."""
        now, messages = time.monotonic(), list[Silent]()
        if now - self._looked_at < LOOK_SECONDS:
            return []
        self._looked_at = now
        for child in self._alive.values():
            beat = child.page.read()
            seconds = child.watch.silence(beat, now)
            if seconds is not None and self.attempt is not None:
                in_step = beat.phase is Phase.STEPPING
                messages.append(
                    Silent(attempt=self.attempt, rank=child.rank, seconds=seconds, step=beat.step, in_step=in_step)
                )
        return messages


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended by now."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it ended in this moment
        return


def _notify(child: Child, number: int) -> None:
    """Send a signal to those processes of a rank that handle it; the others would die of it."""
    for pid in processes.that_catch(child.pid, number, below=True):
        send(pid, number)


def kernel_oom_kills() -> int:
    """How many processes of our control group the kernel has killed for lack of memory so far.

    Of the whole machine only where no group counts: else what another job on the node dies of would be taken for ours.
    """
    counts = [count for file in _own_groups() if (count := _count(file)) is not None]
    return max(counts) if counts else _count("/proc/vmstat") or 0


def _count(file: str) -> int | None:
    try:
        match = re.search(r"^oom_kill (\d+)", Path(file).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def _own_groups() -> list[str]:
    """The files in which our control group counts, of either version of control groups."""
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    paths = [
        f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        if "memory" in controllers.split(",")
        else f"/sys/fs/cgroup{path}/memory.events"
        for _, controllers, path in (line.split(":", 2) for line in lines)
        if path != "/" and controllers in ("", "memory")
    ]
    return [*paths, "/sys/fs/cgroup/memory.events"]  # the last is there in a container, whose own group is its root
