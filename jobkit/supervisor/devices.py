"""The devices of this machine that a run has: no two runs of a user have the same, and nobody else computes on them.

    agent --ticket--> line (first come, first served) --lock a device each--> CUDA_VISIBLE_DEVICES of its ranks

Tickets and locks are files in a folder of the user's own; a process that ends gives both back, however it ends. Other
users are seen by the driver's list of computing processes (nvidia-ml-py). CPU runs wait for nothing.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobkit.errors import InputError
from jobkit.log import log
from jobkit.run.files import read_json
from jobkit.run.locks import Lock
from jobkit.run.machine import KINDS, visible_devices
from jobkit.run.rundir import RunDir
from jobkit.run.schema import Config
from jobkit.supervisor.protocol import RankPlace

LOOK_SECONDS = 0.5
"""Between two looks of a run that waits."""


def folder() -> Path:
    """Return the folder of this user's tickets and locks for this machine, which may share its home with others."""
    state = os.environ.get("XDG_STATE_HOME") or Path(os.environ.get("HOME") or Path.home(), ".local", "state")
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
    return Devices(run, kind, names, count, each=config.resources.devices_per_rank)


class Devices:
    """Some devices of this machine, for one run: first in line, then held, until `close` or the end of the process.

    devices = of_run(run, config)
    while not devices.take(): ...          # `list` shows the run as waiting meanwhile
    devices.visible_on(place)              # {"CUDA_VISIBLE_DEVICES": "4,5"}
    """

    def __init__(self, run: RunDir, kind: str, names: list[str], count: int, *, each: int) -> None:
        self.run, self.kind, self.names, self.count, self.each = run, kind, names, count, each
        self.folder = folder()
        self._ticket: Path | None = None
        self._locks: list[Lock] = []
        """That of the ticket, or those of the devices."""
        self._held: list[str] = []
        self._looked_at = 0.0

    @property
    def are_held(self) -> bool:
        return bool(self._held)

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
        gpus = _gpus(self.names) if self.kind == "cuda" else {}
        free = [name for name in self.names if not before and not (name in gpus and gpus[name].users)]
        ids = {name: gpus[name].uuid if name in gpus else f"{self.kind}-{name}" for name in free}
        taken: dict[str, Lock] = {}
        for name, device in ids.items():
            if len(taken) < self.count and (lock := Lock(self.folder / f"{device}.lock")).take():
                taken[name] = lock
        if len(taken) == self.count:
            ticket.unlink()
            self.close()
            self._held, self._locks = list(taken), list(taken.values())
            return True
        for lock in taken.values():
            lock.close()
        if is_new:
            users = [f"{name}: {user}" for name, gpu in gpus.items() for user in gpu.users]
            words = "; ".join([*before, *users]) or "other runs have them"
            log.info("waiting for %d of %s %s (%s)", self.count, self.kind, ", ".join(self.names), words)
        return False

    def visible_on(self, place: RankPlace) -> dict[str, str]:
        """The variable by which a rank sees the devices of its (simulated) node, and no others.

        All of the node's, as programs for several devices expect: LOCAL_RANK chooses, and NCCL sends directly.
        """
        per_node = place.local_world_size * self.each
        visible = KINDS[self.kind].visible
        assert visible is not None
        return {visible: ",".join(self._held[place.node * per_node : (place.node + 1) * per_node])}

    def close(self) -> None:
        """Close the locks: in a forked process its copies, in the agent they end with that."""
        for lock in self._locks:
            lock.close()
        self._locks = []

    def _draw(self) -> Path:
        """Join the line. The ticket is locked before it has its name: an unlocked one counts as a dead process's."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
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


# NVIDIA's driver


@dataclass(frozen=True)
class _Gpu:
    uuid: str
    users: list[str]
    """Processes of others that compute on it, in words."""


def _gpus(names: list[str]) -> dict[str, _Gpu]:
    """CUDA's devices by the names that CUDA_VISIBLE_DEVICES takes: numbers, UUIDs, beginnings of UUIDs.

    CUDA numbers devices by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; the driver by the bus. With one model both agree;
    with several a number is left out, as is a part of a device (MIG).
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # its library is part of the driver
        return {}
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        is_in_order = (
            os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(set(map(pynvml.nvmlDeviceGetName, handles))) == 1
        )
        gpus = {}
        for name in names:
            matching = [index for index, uuid in enumerate(uuids) if uuid.startswith(name)]
            if name.isdigit() and is_in_order and int(name) < len(uuids):
                matching = [int(name)]
            if len(matching) == 1:
                pids = [item.pid for item in pynvml.nvmlDeviceGetComputeRunningProcesses(handles[matching[0]])]
                users = [f"process {pid} of {owner}" for pid in pids if (owner := _other_owner(pid)) is not None]
                gpus[name] = _Gpu(uuids[matching[0]], users)
        return gpus
    finally:
        pynvml.nvmlShutdown()


def _other_owner(pid: int) -> str | None:
    """The owner of a process that is not this user's; this user's runs have locks, and other programs are the user's
    own choice."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return "another container"
    if uid == os.geteuid():
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
