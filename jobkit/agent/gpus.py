"""NVIDIA's devices, by their driver (NVML): the processes on a device, and its own word about its health.

Devices.take()  --> opened(names)   a device on which another user computes is not free
HealthWatch     --> main(names)     health as the ranks start ... asked: health again --JSON--> devices.Word

The second way is a process of its own. It keeps the handles that it got at first: a device that falls off the bus is
found no more, and another one may get its number. devices.py calls it.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

LOST = {pynvml.NVML_ERROR_GPU_IS_LOST: "lost from the bus", pynvml.NVML_ERROR_RESET_REQUIRED: "needs a reset"}
"""Errors of the driver that are a device's state, in words."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """A device's word. A fact that this kind of device does not know, as most consumers' cards ECC, is well."""

    lost: str = ""
    """Why the driver cannot use the device, in words; empty if it can."""
    errors: int = 0
    """ECC errors that could not be corrected, since the driver was loaded: they may be of another job."""
    is_pending: bool = False
    """True if a bad row of memory gets its replacement at the next reset. Until then its page is not used."""
    has_failed: bool = False
    """True if a bad row got no replacement, at any time: the device is to be exchanged."""

    def __str__(self) -> str:
        errors = f"{self.errors} uncorrected ECC error{'s' if self.errors > 1 else ''}" if self.errors else ""
        remaps = ("row remap pending" if self.is_pending else "", "row remap failed" if self.has_failed else "")
        return ", ".join(filter(None, (self.lost, errors, *remaps)))


@dataclass(frozen=True)
class Gpu:
    """A device of this machine."""

    uuid: str
    handle: Any = None
    """NVML's; None if the driver has no device by that number."""

    @property
    def users(self) -> list[str]:
        """Processes of other users that compute on it, in words."""
        return [f"process {item.pid} of {owner}" for item in self._processes() if (owner := _other_owner(item.pid))]

    @property
    def memory(self) -> str:
        """The memory of processes that are not of this job, in words: other users' and this user's."""
        return ", ".join(
            f"process {item.pid} of {_other_owner(item.pid) or 'yours'} has {(item.usedGpuMemory or 0) / 2**30:.1f} GiB"
            for item in self._processes()
            if not _is_of_this_job(item.pid)
        )

    @property
    def health(self) -> Health:
        """What the device says now."""
        if self.handle is None:
            return Health(lost="not seen by the driver")
        kinds = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        try:
            errors = _fact(pynvml.nvmlDeviceGetTotalEccErrors, self.handle, *kinds) or 0
            _, _, pending, failed = _fact(pynvml.nvmlDeviceGetRemappedRows, self.handle) or (0, 0, 0, 0)
        except pynvml.NVMLError as error:
            return Health(lost=LOST[error.value])
        return Health(errors=errors, is_pending=bool(pending), has_failed=bool(failed))

    def _processes(self) -> list[Any]:
        try:
            return [] if self.handle is None else list(pynvml.nvmlDeviceGetComputeRunningProcesses(self.handle))
        except pynvml.NVMLError:
            return []


@contextmanager
def opened(names: Iterable[str]) -> Iterator[dict[str, Gpu]]:
    """Yield devices by the names that CUDA_VISIBLE_DEVICES takes: numbers, UUIDs, beginnings of UUIDs.

    CUDA numbers devices by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; the driver by the bus. With one model both agree;
    with several a number is left out, as is a part of a device (MIG). Nothing of the driver stays open: agents fork.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # its library is part of the driver
        is_unloaded = error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED
        yield {name: Gpu(f"cuda-{name}") for name in names} if is_unloaded else {}
        return
    try:
        yield _find(names)
    finally:
        pynvml.nvmlShutdown()


def _find(names: Iterable[str]) -> dict[str, Gpu]:
    looked_up = [_look(index) for index in range(pynvml.nvmlDeviceGetCount())]
    models = {model for gpu, model in looked_up if gpu.handle is not None}
    is_in_order = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(models) <= 1
    gpus = {}
    for name in names:
        matching = [gpu for gpu, _ in looked_up if gpu.uuid.startswith(name)]
        if name.isdigit() and is_in_order:
            matching = [looked_up[int(name)][0] if int(name) < len(looked_up) else Gpu(f"cuda-{name}")]
        if len(matching) == 1:
            gpus[name] = matching[0]
    return gpus


def _look(index: int) -> tuple[Gpu, str]:
    """A device and its model."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return Gpu(pynvml.nvmlDeviceGetUUID(handle), handle), pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError:  # it is on the bus no more
        return Gpu(f"cuda-{index}"), ""


def _fact(question: Callable[..., Any], *arguments: Any) -> Any:
    """The driver's answer; None for what this device, driver or user may not ask. Raises a NVMLError of LOST."""
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in LOST:
            raise
        return None


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


def _is_of_this_job(pid: int) -> bool:
    """True for the ranks and all that they have started: they have the agent's environment, as this process has."""
    job_id = os.environ.get("JOBKIT_JOB_ID")
    try:
        return f"JOBKIT_JOB_ID={job_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # another user's, or it has ended
        return False


def main(names: list[str]) -> int:
    """Look at devices; after a line on stdin look again, and print the fields of a devices.Word."""
    with opened(names) as gpus:
        before = {name: gpu.health for name, gpu in gpus.items()}
        if not sys.stdin.readline():  # nobody asks: the agent has ended
            return 0
        now = {name: gpu.health for name, gpu in gpus.items()}
        memory = {name: gpu.memory for name, gpu in gpus.items()}
    word = {
        "health": _joined({name: str(health) for name, health in now.items()}),
        "is_sick": any(health.lost or (str(health) and health != before[name]) for name, health in now.items()),
        "memory": _joined(memory),
    }
    print(json.dumps(word), flush=True)
    return 0


def _joined(words: dict[str, str]) -> str:
    """`cuda:3 on node7: ...` for each device about which there are words."""
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return "; ".join(f"cuda:{name} on {node}: {text}" for name, text in words.items() if text)
