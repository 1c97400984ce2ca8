"""The devices and cores of this machine, read without torch, and `auto` of `resources:` as numbers.

    with_counts(config, "local", None)     tasks_per_node: auto -> the GPUs that this machine shows
    with_counts(config, "slurm", 8)        -> the gpus_per_node of the cluster's entry: no node is there to look at
    clean_environment()                    this process's variables, as a job may have them

A login node has neither GPUs nor torch, and starts with this module in a few milliseconds. The submission calls it, and
so do the supervisor and the agent for their own node.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from jobkit import start
from jobkit.config.schema import AUTO, Config, Resources
from jobkit.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A kind of device that torch computes on."""

    visible: str | None = None
    """The environment variable that says which devices a process may use."""
    files: str | None = None
    """A pattern that matches a file for each device of the machine; None if only the driver knows them."""
    gres: str = "gpu"
    """Slurm's usual name of it; `gpu` is counted by --gpus-per-node, other names by --gres alone."""


KINDS = {
    "cuda": DeviceKind(visible="CUDA_VISIBLE_DEVICES", files="/proc/driver/nvidia/gpus/*"),
    "npu": DeviceKind(visible="ASCEND_RT_VISIBLE_DEVICES", files="/dev/davinci[0-9]*", gres="npu"),
    "xpu": DeviceKind(visible="ZE_AFFINITY_MASK"),
    "mps": DeviceKind(),
    "cpu": DeviceKind(),
}
"""By torch's name, in the order in which `device: auto` looks for them."""


def visible_devices(device: str, environ: Mapping[str, str] = os.environ) -> tuple[str, list[str] | None]:
    """(kind, devices of this machine that `environ` allows); None for the devices if only the driver knows them.

    `auto` is the first kind that has devices, else cuda without any.
    """
    if device != AUTO:
        return device, _devices(device, environ)
    return next(((name, devices) for name in KINDS if (devices := _devices(name, environ))), ("cuda", []))


def _devices(name: str, environ: Mapping[str, str]) -> list[str] | None:
    kind = KINDS[name]
    if kind.visible is not None and kind.visible in environ:
        # For CUDA an invalid entry, as -1, hides the entries after it.
        return list(takewhile(_is_device, (entry.strip() for entry in environ[kind.visible].split(","))))
    if kind.files is None:
        return [] if name == "cpu" else None
    count = len(list(Path("/").glob(kind.files.removeprefix("/"))))
    return [str(index) for index in range(count or (_driver_count() if name == "cuda" else 0))]


def _is_device(entry: str) -> bool:
    """Return whether an entry is a number, `0.1` for a part of a device, or an id as `GPU-8932f937`."""
    return entry.replace(".", "").isdecimal() or entry.startswith(("GPU-", "MIG-"))


def _driver_count() -> int:
    """NVIDIA GPUs by the driver's library; WSL has them without /proc/driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:  # the library is part of the driver
        return 0


def with_counts(config: Config, scheduler: str, gpus_per_node: int | None) -> Config:
    """The config with `tasks_per_node` and `gpus_per_task` as numbers.

    Args:
        scheduler: `local` or `slurm`
        gpus_per_node: on Slurm, the devices that the cluster's entry asks for on each node; None if it does not

    Raises InputError if the ranks need more devices than there are, or if their number cannot be known.
    """
    resources = config.resources
    if config.device == "cpu":
        return dataclasses.replace(config, resources=_in_numbers(dataclasses.replace(resources, gpus_per_task=0), 0))
    if scheduler == "local":
        _, devices = visible_devices(config.device)
        room = None if devices is None else len(devices) // resources.nodes  # nodes are simulated, and divide them
        where = "this machine"
    else:
        room, where = gpus_per_node, "a node, by gpus_per_node or gres of the cluster's entry"
        if room is None:
            _refuse_unknown(config)
            room = 0 if config.device == resources.gpus_per_task == AUTO else None
    counted = _in_numbers(resources, room)
    needed = counted.ranks_per_node * counted.devices_per_rank
    if room is not None and needed > room:
        allowed = f"at most {room}, the devices of {where}"
        of_rank = max(1, counted.devices_per_rank)
        fit = f"tasks_per_node={room // of_rank}" if room >= of_rank else "gpus_per_task=0 for the CPU"
        hint = f"{counted.ranks_per_node} rank(s) of {counted.devices_per_rank} each; to make it fit: resources.{fit}"
        raise InputError(key="resources.gpus_per_task", found=needed, allowed=allowed, hint=hint)
    return dataclasses.replace(config, resources=counted)


def idle_devices(config: Config, ranks: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning where `ranks` use no device of this machine, or fewer than a variable as CUDA_VISIBLE_DEVICES
    names; `device: cpu` says that none is wanted.

    Without the variable a run of one rank on a machine with eight devices is nothing special.
    """
    name, devices = visible_devices(config.device, environ)
    variable, used = KINDS[name].visible, ranks * config.resources.devices_per_rank
    if devices and not used:
        hint = "resources.gpus_per_task=1 gives one to each rank"
        return f"the run trains on the CPU, and this machine has {len(devices)} {name} device(s): {hint}"
    if variable is None or variable not in environ or not devices or used >= len(devices):
        return None
    return f"{variable}={environ[variable]} has {len(devices)} devices, and the ranks here use {used}"


def _refuse_unknown(config: Config) -> None:
    """Refuse a job on Slurm whose entry asks for no devices, where their number must be known."""
    resources, kind = config.resources, KINDS.get(config.device)
    if kind is not None and kind.gres != "gpu":
        hint = f"set gres in the cluster's entry, as `gres: {kind.gres}:8` (`sinfo --format=%G` shows the name)"
        raise InputError("to Slurm this device is no GPU", key="device", found=config.device, hint=hint)
    if resources.tasks_per_node == AUTO and resources.gpus_per_task not in (AUTO, 0):
        hint = "set gpus_per_node in the cluster's entry"
        raise InputError(key="resources.tasks_per_node", found=AUTO, allowed="a number of ranks", hint=hint)


def _in_numbers(resources: Resources, room: int | None) -> Resources:
    """The resources with `auto` decided for a node with `room` devices."""
    of_rank, tasks = resources.gpus_per_task, resources.tasks_per_node
    if of_rank == AUTO:
        of_rank = 1 if room is None or room > 0 else 0
        if of_rank and room is not None and tasks != AUTO:
            tasks = min(int(tasks), room)
    if tasks == AUTO:
        tasks = max(1, (room or 0) // int(of_rank)) if of_rank else 1
    return dataclasses.replace(resources, tasks_per_node=tasks, gpus_per_task=of_rank)


_OF_THE_USER = ("JOBKIT_RUNS", "JOBKIT_CONFIG", "JOBKIT_TEST_PAUSE")
"""Variables that a person, or a test, sets; the other JOBKIT_ ones belong to a rank or a job."""

MANY_FILES, FEW_FILES = 65536, 1024
"""A limit that is enough: some programs close all numbers up to theirs, which may be a billion. And one that is not."""


def clean_environment() -> dict[str, str]:
    """The environment for a job: without the variables of a rank or job that submits it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _OF_THE_USER or not name.startswith(("JOBKIT_", "SUBMITIT_"))
    }


def past_shells(*without: str) -> dict[str, str]:
    """This process's variables for an agent, except those named; start.py puts back what a shell before it drops.

    A POSIX shell, as dash, drops functions of bash and names with dots. The node or the container may have no other.
    """
    kept = {name: value for name, value in os.environ.items() if name not in without}
    dropped = [f"{name}={value}" for name, value in kept.items() if not (name.isascii() and name.isidentifier())]
    return kept | {f"{start.COPY}{number}": text for number, text in enumerate(dropped)}


def raise_open_files() -> str:
    """Let this process and its children open as many files as they may; return a warning where that is few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    needs = "a connection and a loader's worker need several each, so errors may follow"
    return (
        f"at most {target} open files on {socket.gethostname()} (`ulimit -Hn`): {needs}" if target < FEW_FILES else ""
    )
