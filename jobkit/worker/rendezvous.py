"""How the ranks of a launch find each other, agree on what they need, and form one process group."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import socket
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous as connect

from jobkit.addresses import RENDEZVOUS_SECONDS, announce, answering, free_port, interface_towards, new_token
from jobkit.errors import DistributedError
from jobkit.group import RankGroup
from jobkit.log import log
from jobkit.worker.launcher import Launch, Topology
from jobkit.worker.restarts import outlives_ranks, store_of_this_start

LISTENING_SECONDS = 60.0
"""How long rank 0, which may hold the store that the ranks talk over, stays for the others to read its answer: a rank
that has come within RENDEZVOUS_SECONDS is only kept from it by a machine that is very busy."""

GROUP_TIMEOUT = timedelta(minutes=30)
"""Of a collective: longer than the slowest checkpoint or compilation on one rank. Hangs are for the watchdog."""


SOCKETS_PER_RANK, OTHER_FILES = 6, 512
"""Open files of a rank: gloo connects it with every other one in each group, of which jobkit has three and the model
some; and everything else, as the samples of data loaders."""


@dataclass(frozen=True)
class Rendezvous:
    """The ranks of a launch, which have found each other and can agree on things before they form a process group."""

    topology: Topology
    group: RankGroup
    """Exchanges JSON values."""
    store: Store | None
    """None where there is a process group, the script's own."""

    def form_group(self, backend: str) -> RankGroup:
        """Form the process group, unless there is one; `backend` is init_process_group's. Collective."""
        if self.store is None:
            return self.group
        allow_open_files(SOCKETS_PER_RANK * self.topology.world_size + OTHER_FILES, self.topology.local_rank == 0)
        dist.init_process_group(
            backend,
            store=PrefixStore("jobkit", self.store),
            rank=self.topology.rank,
            world_size=self.topology.world_size,
            timeout=GROUP_TIMEOUT,
        )
        return RankGroup.of_world()


def rendezvous(launch: Launch, file: Path, purpose: str = "jobkit") -> Rendezvous:
    """Wait for all ranks of a launch, and export RANK, WORLD_SIZE, MASTER_ADDR and the like.

    They connect to MASTER_ADDR where there is one; else rank 0 binds a free port and writes its address to `file`.
    `purpose` tells it from that of a program which these ranks start, in a store that a launcher has for both.
    Raises DistributedError when they do not find each other within RENDEZVOUS_SECONDS, or differ about their number.
    """
    store, own = None, launch.topology
    if launch.rendezvous == "group":
        group = RankGroup.of_world()
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT") or free_port())
    else:
        store, address, port = _connect(launch, file)
        if launch.rendezvous == "env" and outlives_ranks():
            store = store_of_this_start(store, own.rank, own.world_size, purpose)
        exchange = _StoreExchange(PrefixStore(f"{purpose}/{next(_rendezvous)}", store), launch)
        group = RankGroup(own.rank, own.world_size, exchange.gather)
    topology = _placed(launch, group.gather([own.world_size, socket.gethostname()]))
    family = topology.environment(address, port)
    _exported.update({name: value for name, value in family.items() if os.environ.get(name) != value})
    os.environ.update(family)
    if interface := interface_towards(address):
        # Gloo would resolve the host's name to find its interface; on many clusters names do not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if topology.rank == 0:
        file.unlink(missing_ok=True)  # all are here: a later launch must not find it
    return Rendezvous(topology, group, store)


def allow_open_files(needed: int, is_first: bool) -> None:
    """Raise this process's limit of open files as far as it may: the usual 1,024 are too few for 350 ranks.

    Where the hard limit is lower, the first rank of a node says so: gloo ends the process without a word.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed and is_first:
        log.warning(
            "%s allows a process %d open files (ulimit -Hn), and so many ranks may need %d: raise LimitNOFILE of "
            "slurmd there, or the limit of its users",
            socket.gethostname(),
            allowed,
            needed,
        )


_rendezvous = itertools.count()
"""A script may call jobkit.init twice, and a launcher's store still holds what the ranks wrote the first time."""


def existing_group() -> tuple[int, int] | None:
    """(rank, world size) of the process group that the script made itself; None where it made none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def shared_store(world_size: int) -> Store:
    """A store that all ranks of the process group see, whoever formed it."""
    return HashStore() if world_size == 1 else dist.distributed_c10d._get_default_store()


def _connect(launch: Launch, file: Path) -> tuple[Store, str, int]:
    """(store, address, port) that the ranks have in common."""
    topology, timeout = launch.topology, timedelta(seconds=RENDEZVOUS_SECONDS)
    if launch.rendezvous == "alone":
        return HashStore(), "127.0.0.1", free_port()
    if launch.rendezvous == "env":
        try:
            store, _, _ = next(connect("env://", topology.rank, topology.world_size, timeout=timeout))
        except (RuntimeError, ValueError) as error:
            where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
            raise DistributedError(f"the ranks do not find each other at {where}: {_first_line(error)}") from error
        return store, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if topology.rank == 0:
        store = TCPStore("127.0.0.1", 0, topology.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        token = new_token()
        store.set("token", token)
        return store, announce(file, store.port, token, 0 if "nodes" in launch.guessed else topology.nodes), store.port
    for address, port, token in answering(file):
        # Not a store, or gone again: the file is an earlier launch's. Another program on its port may never answer.
        with contextlib.suppress(RuntimeError):
            store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
            if store.get("token").decode() == token:
                store.set_timeout(timeout)
                return store, address, port
    raise AssertionError("unreachable")


class _StoreExchange:
    """The ranks' exchange through a store, before there is a process group: rank 0 reads every value and answers all.

    One answer for all, and not each rank reading for itself, so that all learn the same of ranks that do not come.
    """

    def __init__(self, store: Store, launch: Launch) -> None:
        self.store, self.launch = store, launch
        self.rounds = itertools.count()

    def gather(self, value: object) -> list[Any]:
        """Every rank's value (JSON), by rank; raises DistributedError where ranks do not come or come twice."""
        own, number = self.launch.topology, next(self.rounds)
        if own.world_size == 1:
            return [value]
        if self.store.add(f"{number}/tasks/{own.rank}", 1) > 1:
            raise DistributedError(f"two tasks were told ({self.launch.launcher}) that they are rank {own.rank}")
        self.store.set(f"{number}/value/{own.rank}", json.dumps(value))
        if own.rank == 0:
            self.store.set(f"{number}/answer", json.dumps(self._read(number)))
        try:
            # Longer than rank 0 waits for the others, so that its answer about them arrives.
            self.store.wait([f"{number}/answer"], timedelta(seconds=RENDEZVOUS_SECONDS + 30))
            missing, values = json.loads(self.store.get(f"{number}/answer"))
        except RuntimeError as error:
            raise DistributedError(f"rank 0 gave no answer: {_first_line(error)}") from error
        readers = self.store.add(f"{number}/readers", 1)
        deadline = time.monotonic() + LISTENING_SECONDS
        while own.rank == 0 and not missing and readers < own.world_size and time.monotonic() < deadline:
            time.sleep(0.005)  # asking the store of this very process is cheap, and the others wait to go on
            readers = self.store.add(f"{number}/readers", 0)
        if missing:
            ranks = ", ".join(map(str, missing))
            raise DistributedError(f"rank(s) {ranks} of {own.world_size} did not come within {RENDEZVOUS_SECONDS:g} s")
        return list(values)

    def _read(self, number: int) -> tuple[list[int], list[Any]]:
        """(ranks that did not come, the ranks' values)."""
        keys = [f"{number}/value/{rank}" for rank in range(self.launch.topology.world_size)]
        try:
            self.store.wait(keys, timedelta(seconds=RENDEZVOUS_SECONDS))
        except RuntimeError:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])], []
        return [], [json.loads(self.store.get(key)) for key in keys]


def _placed(launch: Launch, found: list[Any]) -> Topology:
    """The topology, with what the launcher did not tell by the host of each rank; `found` is [world size, host]."""
    own = launch.topology
    if others := [f"rank {rank} of {size}" for rank, (size, _) in enumerate(found) if size != found[0][0]]:
        raise DistributedError(
            f"rank 0 was started as one of {found[0][0]}, but there is also {', '.join(others)}: they would train apart"
        )
    hosts = [host for _, host in found]
    nodes, here = list(dict.fromkeys(hosts)), hosts[own.rank]
    by_host = {
        "local_rank": hosts[: own.rank].count(here),
        "local_world_size": hosts.count(here),
        "node": nodes.index(here),
        "nodes": len(nodes),
    }
    return replace(own, **{field: by_host[field] for field in launch.guessed})


_exported: dict[str, str] = {}


def inherited() -> dict[str, str]:
    """The environment as the launcher made it, without what `rendezvous` has added to it."""
    return {name: value for name, value in os.environ.items() if _exported.get(name) != value}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
