"""From the launcher's ranks to one process group: they meet, see that they are of one mind, and form it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from jobkit.errors import DistributedError, JobkitError
from jobkit.worker.distributed import Control
from jobkit.worker.launcher import Launch, Topology
from jobkit.worker.rendezvous import RENDEZVOUS_SECONDS, announce, free_port, interface_towards, new_token, places

T = TypeVar("T")

LISTENING_SECONDS = 60.0
"""How long rank 0, which may hold what the ranks talk over, stays for the others to read its answer."""


@dataclass(frozen=True)
class Meeting:
    """The ranks of a launch, which have found each other; they can agree on things before they form a group."""

    topology: Topology
    gather: Callable[[object], list[Any]]
    """Every rank's value (JSON), by rank, on every rank."""
    store: Store | None
    """None where there is a process group, the script's own."""

    def together(self, action: Callable[[], T]) -> T:
        """What `action` returns on this rank; where it raises on any, all raise, and none goes on alone."""
        value, raised = None, None
        try:
            value = action()
        except Exception as error:
            raised = error
        problems = self.gather(_describe(raised))
        if raised is not None:
            raise raised
        for rank, problem in enumerate(problems):
            if problem:
                raise DistributedError(f"rank {rank}: {problem}")
        return value  # type: ignore[return-value]

    def lead(self, action: Callable[[], T]) -> T:
        """What `action` returns on rank 0 (JSON), which alone does it, on all ranks; where it raises, all do."""
        mine = self.together(lambda: action() if self.topology.rank == 0 else None)
        answer: T = self.gather(mine)[0]
        return answer

    def form_group(self, backend: str) -> None:
        """Make the process group, unless there is one; `backend` is init_process_group's."""
        if self.store is None:
            return
        dist.init_process_group(
            backend,
            store=PrefixStore("jobkit", self.store),
            rank=self.topology.rank,
            world_size=self.topology.world_size,
            timeout=timedelta(minutes=30),
        )


def meet(launch: Launch, file: Path) -> Meeting:
    """Wait for all ranks of a launch, and export RANK, WORLD_SIZE, MASTER_ADDR and their family.

    They meet at MASTER_ADDR where there is one; else rank 0 binds a free port and writes where it is to `file`.
    Raises DistributedError when they do not find each other within RENDEZVOUS_SECONDS, or differ about their number.
    """
    if launch.rendezvous == "group":
        store, gather = None, Control(launch.topology.world_size).gather
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or free_port())
    else:
        store, address, port = _find(launch, file)
        gather = _Desk(PrefixStore(f"jobkit/{next(_meetings)}", store), launch).gather
    topology = _placed(launch, gather([launch.topology.world_size, socket.gethostname()]))
    _export(topology, address, port)
    if interface := interface_towards(address):
        # Gloo would resolve the host's name to find its interface; on many clusters names do not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if topology.rank == 0:
        file.unlink(missing_ok=True)  # all are here: a later launch must not find it
    return Meeting(topology, gather, store)


_meetings = itertools.count()
"""A script may call jobkit.init twice, and a launcher's store still holds what the ranks said the first time."""


def existing_group() -> tuple[int, int] | None:
    """(rank, world size) of the process group that the script made itself; None where it made none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def _find(launch: Launch, file: Path) -> tuple[Store, str, int]:
    """(store, address, port) that the ranks have in common."""
    topology, timeout = launch.topology, timedelta(seconds=RENDEZVOUS_SECONDS)
    if launch.rendezvous == "alone":
        return HashStore(), "127.0.0.1", free_port()
    if launch.rendezvous == "env":
        try:
            store, _, _ = next(rendezvous("env://", topology.rank, topology.world_size, timeout=timeout))
        except (RuntimeError, ValueError) as error:
            where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
            raise DistributedError(f"the ranks do not meet at {where}: {_first_line(error)}") from error
        return store, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if topology.rank == 0:
        store = TCPStore("127.0.0.1", 0, topology.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        token = new_token()
        store.set("token", token)
        return store, announce(file, store.port, token, 0 if "nodes" in launch.guessed else topology.nodes), store.port
    for address, port, token in places(file):
        with contextlib.suppress(RuntimeError):  # not a store, or gone again: the file is an earlier launch's
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
            if store.get("token").decode() == token:
                store.set_timeout(timeout)
                return store, address, port
    raise AssertionError("unreachable")


class _Desk:
    """Where the ranks leave what they have to say, before there is a process group: rank 0 reads it out to all."""

    def __init__(self, store: Store, launch: Launch) -> None:
        self.store, self.launch = store, launch
        self.rounds = itertools.count()

    def gather(self, value: object) -> list[Any]:
        own, number = self.launch.topology, next(self.rounds)
        if own.world_size == 1:
            return [value]
        if self.store.add(f"{number}/tasks/{own.rank}", 1) > 1:
            raise DistributedError(f"two tasks were told ({self.launch.launcher}) that they are rank {own.rank}")
        self.store.set(f"{number}/said/{own.rank}", json.dumps(value))
        if own.rank == 0:
            self.store.set(f"{number}/answer", json.dumps(self._read(number)))
        try:
            self.store.wait([f"{number}/answer"], timedelta(seconds=RENDEZVOUS_SECONDS + 30))
            missing, said = json.loads(self.store.get(f"{number}/answer"))
        except RuntimeError as error:
            raise DistributedError(f"rank 0 gave no answer: {_first_line(error)}") from error
        heard = self.store.add(f"{number}/heard", 1)
        deadline = time.monotonic() + LISTENING_SECONDS
        while own.rank == 0 and not missing and heard < own.world_size and time.monotonic() < deadline:
            time.sleep(0.005)
            heard = self.store.add(f"{number}/heard", 0)
        if missing:
            ranks = ", ".join(map(str, missing))
            raise DistributedError(f"rank(s) {ranks} of {own.world_size} did not come within {RENDEZVOUS_SECONDS:g} s")
        return list(said)

    def _read(self, number: int) -> tuple[list[int], list[Any]]:
        """(ranks that did not come, what the ranks said)."""
        keys = [f"{number}/said/{rank}" for rank in range(self.launch.topology.world_size)]
        try:
            self.store.wait(keys, timedelta(seconds=RENDEZVOUS_SECONDS))
        except RuntimeError:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])], []
        return [], [json.loads(self.store.get(key)) for key in keys]


def _placed(launch: Launch, said: list[Any]) -> Topology:
    """The topology, with what the launcher did not tell by the host of each rank."""
    own = launch.topology
    if others := [f"rank {rank} of {size}" for rank, (size, _) in enumerate(said) if size != said[0][0]]:
        raise DistributedError(
            f"rank 0 was started as one of {said[0][0]}, but there is also {', '.join(others)}: they would train apart"
        )
    hosts = [host for _, host in said]
    nodes, here = list(dict.fromkeys(hosts)), hosts[own.rank]
    by_host = {
        "local_rank": hosts[: own.rank].count(here),
        "local_world_size": hosts.count(here),
        "node": nodes.index(here),
        "nodes": len(nodes),
    }
    return replace(own, **{field: by_host[field] for field in launch.guessed})


_exported: dict[str, str] = {}


def _export(topology: Topology, address: str, port: int) -> None:
    family = topology.environment(address, port)
    _exported.update({name: value for name, value in family.items() if os.environ.get(name) != value})
    os.environ.update(family)


def inherited() -> dict[str, str]:
    """The environment as the launcher made it, without what `meet` has added to it."""
    return {name: value for name, value in os.environ.items() if _exported.get(name) != value}


def _describe(error: Exception | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, JobkitError) else f"{type(error).__name__}: {error}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
