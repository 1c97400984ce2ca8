"""The process table, and which of its processes belong to the jobs of a cluster. Reads /proc only."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 240.0
"""How long to wait for something that must happen: on a busy machine a daemon's answer takes minutes."""

SLURM_DAEMONS = ("slurmd", "slurmstepd")  # of a node. A slurmd forks before it starts a slurmstepd.


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message says why."""


@dataclass(frozen=True)
class Process:
    """A line of the process table; `started` tells it from a later process with the same id."""

    pid: int
    parent: int
    name: str
    started: int

    @classmethod
    def read(cls, pid: int) -> Process | None:
        """Return the living process `pid`; None if it has ended, reaped or not."""
        try:
            head, _, tail = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            return None
        fields = tail.split()
        return None if fields[0] in "ZX" else cls(pid, int(fields[1]), head.partition("(")[2], int(fields[19]))

    @property
    def alive(self) -> bool:
        """True until the process has ended."""
        now = Process.read(self.pid)
        return now is not None and now.started == self.started

    def send(self, number: int) -> None:
        """Send a signal; nothing happens if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                os.kill(self.pid, number)

    def environment(self) -> set[str]:
        """Return the lines NAME=value that the process was started with; empty if we may not read them."""
        with contextlib.suppress(OSError):
            return set(Path(f"/proc/{self.pid}/environ").read_text(encoding="utf-8", errors="replace").split("\0"))
        return set()

    def has_open(self, prefix: str) -> bool:
        """True if the process has a file open whose path starts with `prefix`."""
        with contextlib.suppress(OSError):
            return any(str(fd.readlink()).startswith(prefix) for fd in Path(f"/proc/{self.pid}/fd").iterdir())
        return False


def process_table() -> dict[int, Process]:
    """Return all living processes by their id."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return {pid: process for pid in pids if (process := Process.read(pid))}


def job_processes(directory: Path, node: str | None, daemons: Iterable[Process]) -> list[Process]:
    """Return the processes of jobs with their slurmstepd, on a node or on all, and the clients that wait for them.

    SLURM_CONF in the environment is not enough: a user's shell and all that it starts have it too.
    """
    table = process_table()
    for daemon in daemons:
        table.pop(daemon.pid, None)
    ancestor = table.get(os.getpid())
    while ancestor:  # a test may run in a job itself
        del table[ancestor.pid]
        ancestor = table.get(ancestor.parent)

    selected = {process.pid: process for process in table.values() if _is_of_job(process, directory, node)}
    while children := {p.pid: p for p in table.values() if p.parent in selected and p.pid not in selected}:
        selected |= children
    return list(selected.values())


def _is_of_job(process: Process, directory: Path, node: str | None) -> bool:
    """True if the process itself shows that it runs for a job; a child of such a process may not show it."""
    environment = process.environment()
    has_conf = f"SLURM_CONF={directory}/slurm.conf" in environment
    if process.name in SLURM_DAEMONS:
        # A slurmstepd overwrites its environment with its title, but first it opens the log of its node.
        return process.has_open(f"{directory}/log/{node}.log" if node else f"{directory}/") or (has_conf and not node)
    if node:
        return has_conf and f"SLURMD_NODENAME={node}" in environment
    in_job = any(line.startswith("SLURMD_NODENAME=") for line in environment)
    return has_conf and (in_job or process.name in ("srun", "salloc"))


def kill_at_once(select: Callable[[], list[Process]]) -> None:
    """Kill all that `select` returns so that none sees another die.

    All are stopped before the first is killed. Otherwise srun's helper would end the step when it sees srun die.
    """
    stopped: dict[int, Process] = {}
    while fresh := {process.pid: process for process in select() if process.pid not in stopped}:
        for process in fresh.values():
            process.send(signal.SIGSTOP)
        stopped |= fresh
    for process in stopped.values():
        process.send(signal.SIGKILL)
    wait_until(lambda: not any(process.alive for process in stopped.values()), "killed processes to end")


def kill_until_none(select: Callable[[], list[Process]]) -> None:
    """Kill what `select` returns until it returns nothing."""

    def none_remain() -> bool:
        remaining = select()
        for process in remaining:
            process.send(signal.SIGKILL)
        return not remaining

    wait_until(none_remain, "killed processes to end")


def wait_until(done: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Call `done()` again and again until it is true; ClusterError if it is not in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise ClusterError(f"still waiting after {seconds:.0f} s: {what}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, below the range of outgoing connections."""
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    ports: list[int] = []
    with contextlib.ExitStack() as sockets:
        for port in random.SystemRandom().sample(range(10000, max(ephemeral, 20000)), 5000):
            with contextlib.suppress(OSError):
                sockets.enter_context(socket.socket()).bind(("", port))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise ClusterError(f"fewer than {count} free ports")
