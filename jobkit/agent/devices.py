"""The devices of this machine that a run has: no two runs of a user have the same, and nobody else computes on them.

    agent --ticket--> line (first come, first served) --lock a device each--> CUDA_VISIBLE_DEVICES of its ranks

Tickets and locks are files in a folder of the user's own; a process that ends gives both back, however it ends. Other
users are seen by the driver's list of computing processes (gpus.py). CPU runs wait for nothing. agent.py takes devices;
`list`, `status` and `doctor` read who has them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit import start
from jobkit.config.machine import KINDS, visible_devices
from jobkit.config.schema import Config
from jobkit.errors import InputError
from jobkit.log import log
from jobkit.run.files import foreign_owner, read_json
from jobkit.run.locks import Lock
from jobkit.run.rundir import RunDir
from jobkit.wire.messages import RankPlace

LOOK_SECONDS = 0.5
"""Between two looks of a run that waits."""

HEALTH_SECONDS = 2.0
"""The time that NVIDIA's driver gets after a failure: the report about the rank waits for it."""

KILL_SECONDS = 0.5
"""The time that a killed process gets to end."""


def folder() -> Path:
    """Return the folder of this user's tickets and locks for this machine, which may share its home with others.

    A user in a container may have no home, or one that belongs to root. Raises InputError if another user has made
    the folder that is used then.
    """
    # Path's own functions raise where there is no home, or where it is another user's.
    state = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))  # noqa: PTH111
    existing = next((path for path in (state, *state.parents) if os.path.exists(path)), state)  # noqa: PTH110
    if not state.is_absolute() or not os.access(existing, os.W_OK):
        state = Path(f"/tmp/jobkit-{os.geteuid()}")  # not $TMPDIR: all of this user's runs have to meet
        if state.exists() and (owner := foreign_owner(state)) is not None:
            raise InputError(f"it belongs to {owner}", hint="set XDG_STATE_HOME to a folder of your own").at(state)
    return Path(state, "jobkit", "devices", socket.gethostname())


def turns() -> dict[str, str]:
    """Return the turns of the runs that wait, by the paths of their directories, as in `no. 2 for 1 of cuda 0, 1`."""
    return {
        ticket["run"]: f"no. {place} for {ticket['count']} of {ticket['kind']} {', '.join(ticket['devices'])}"
        for place, ticket in enumerate(_tickets(folder()), 1)
    }


def of_run(run: RunDir, config: Config) -> Devices | None:
    """Return the devices that a run on this machine needs, not taken yet; None if it needs none.

    Raises InputError if the machine does not have as many, as after a move of the run to another one.
    """
    count = config.resources.world_size * config.resources.devices_per_rank
    kind, names = visible_devices(config.device, os.environ)
    if count == 0 or names is None or KINDS[kind].visible is None:
        return None
    if len(names) < count:
        raise InputError(key="resources.gpus_per_task", found=count, allowed=f"at most {len(names)}, the devices here")
    return Devices(run, kind, names, count, devices_per_rank=config.resources.devices_per_rank)


class Devices:
    """Some devices of this machine, for one run: first in line, then held, until `close` or the end of the process.

    devices = of_run(run, config)
    while not devices.take(): ...          # `list` shows the run as waiting meanwhile
    devices.visible_on(place)              # {"CUDA_VISIBLE_DEVICES": "4,5"}
    """

    def __init__(self, run: RunDir, kind: str, names: list[str], count: int, *, devices_per_rank: int) -> None:
        self.run, self.kind, self.names, self.count, self.devices_per_rank = run, kind, names, count, devices_per_rank
        self.folder = folder()
        self._ticket: Path | None = None
        self._locks: list[Lock] = []
        """That of the ticket, or those of the devices."""
        self.held: list[str] = []
        self._looked_at = 0.0

    @property
    def are_held(self) -> bool:
        return bool(self.held)

    def take(self) -> bool:
        """Look whether this run is first in line and enough devices are free; take them if so."""
        now = time.monotonic()
        if self.are_held or now - self._looked_at < LOOK_SECONDS:
            return self.are_held
        self._looked_at = now
        is_new = self._ticket is None
        ticket = self._ticket = self._ticket or self._draw()
        before = [
            other["run"]
            for other in _tickets(self.folder)
            if other["file"] < ticket.name and not set(other["devices"]).isdisjoint(self.names)
        ]
        uuids, users = _in_use(self.names) if self.kind == "cuda" else ({}, {})
        free = [name for name in self.names if not before and not users.get(name)]
        ids = {name: uuids.get(name, f"{self.kind}-{name}") for name in free}
        taken: dict[str, Lock] = {}
        for name, device in ids.items():
            if len(taken) < self.count and (lock := Lock(self.folder / f"{device}.lock")).take():
                taken[name] = lock
        if len(taken) == self.count:
            ticket.unlink()
            self.close()
            self.held, self._locks = list(taken), list(taken.values())
            return True
        for lock in taken.values():
            lock.close()
        if is_new:
            others = [f"{name}: {user}" for name, names_of_users in users.items() for user in names_of_users]
            words = "; ".join([*before, *others]) or "other runs have them"
            log.info("waiting for %d of %s %s (%s)", self.count, self.kind, ", ".join(self.names), words)
        return False

    def visible_on(self, place: RankPlace) -> dict[str, str]:
        """The variable by which a rank sees the devices of its (simulated) node, and no others.

        All of the node's, as programs for several devices expect: LOCAL_RANK chooses, and NCCL sends directly.
        """
        per_node = place.local_world_size * self.devices_per_rank
        visible = KINDS[self.kind].visible
        assert visible is not None
        return {visible: ",".join(self.held[place.node * per_node : (place.node + 1) * per_node])}

    def close(self) -> None:
        """Close the locks: in a forked process its copies, in the agent they end with that."""
        for lock in self._locks:
            lock.close()
        self._locks = []

    def _draw(self) -> Path:
        """Join the line. The ticket is locked before it has its name: an unlocked one counts as a dead process's."""
        for path in reversed([self.folder, *self.folder.parents]):
            path.mkdir(exist_ok=True, mode=0o700)
        ticket = self.folder / f"{time.time_ns():020d}-{os.getpid()}.ticket"
        text = {"run": str(self.run.path), "kind": self.kind, "devices": self.names, "count": self.count}
        temporary = ticket.with_suffix(".tmp")
        temporary.write_text(json.dumps(text), encoding="utf-8")
        self._locks = [Lock(temporary)]
        self._locks[0].take()
        temporary.rename(ticket)
        return ticket


def _tickets(tickets: Path) -> list[dict[str, Any]]:
    """The tickets of living processes, the first one first; those of dead ones are removed."""
    living = []
    for file in sorted(tickets.glob("*.ticket")):
        ticket = read_json(file)
        if Lock(file).is_held():
            living.append({**ticket, "file": file.name})
        else:  # of a dead process, or of a run that has its devices by now
            file.unlink(missing_ok=True)
    return living


# NVIDIA's devices


def _in_use(names: list[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """By name: the UUIDs of devices, and the processes of other users on them, in words."""
    from jobkit.agent.gpus import opened  # a list of runs needs no driver

    with opened(names) as gpus:
        return {name: gpu.uuid for name, gpu in gpus.items()}, {name: gpu.users for name, gpu in gpus.items()}


@dataclass(frozen=True, kw_only=True)
class Word:
    """What NVIDIA's driver says about devices after a failure, as `cuda:3 on node7: 2 uncorrected ECC errors`."""

    health: str = ""
    """Of the devices that are not well; empty if all are."""
    is_sick: bool = False
    """True if a device is lost, or its health has changed since the watch began."""
    memory: str = ""
    """The processes of other jobs that have memory of the devices."""


class HealthWatch:
    """A process that looks at NVIDIA devices now, and again when it is asked.

    A call into a broken driver may never return, and an agent has one thread. The first look comes before the failure:
    errors are counted since the driver was loaded, and only new ones belong to this attempt.

    watch = HealthWatch(["0", "1"])   # by the names in CUDA_VISIBLE_DEVICES
    watch.ask()                       # Word(health="cuda:1 on node7: row remap pending", is_sick=True)
    watch.close()
    """

    def __init__(self, names: list[str]) -> None:
        words = start.words("jobkit.agent.gpus", *names)
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, seconds: float = HEALTH_SECONDS) -> Word | None:
        """Return the driver's word, once; None if it gives none in time."""
        try:
            answer, _ = self._process.communicate(b"\n", timeout=seconds)
            return Word(**json.loads(answer))
        except (subprocess.TimeoutExpired, ValueError):
            return None

    def close(self) -> bool:
        """End the process; return False if it stays, within a call of a broken driver."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        return self._process.returncode is not None


def watched(config: Config, devices: Devices | None) -> list[str]:
    """Return the NVIDIA devices of the ranks of an agent, by the names in CUDA_VISIBLE_DEVICES."""
    kind, names = visible_devices(config.device) if devices is None else (devices.kind, devices.held)
    return list(names or ()) if kind == "cuda" and config.resources.devices_per_rank else []
