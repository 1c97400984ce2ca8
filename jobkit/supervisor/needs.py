"""What a local run needs of this machine: devices, and CPU slots, each with a lock file of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.errors import InputError
from jobkit.run.config import Config
from jobkit.run.device_kinds import SHARE, DeviceKind, of_this_machine, unit
from jobkit.supervisor import lock_files

CPU_SLOTS = "JOBKIT_CPU_SLOTS"
"""Environment variable with the number of CPU slots of this machine, where it is not that of the cores which the
process may use."""


@dataclass(frozen=True)
class Pool:
    """Devices of one kind, or the CPU slots, that a run may use, and how many of them it needs."""

    count: int
    unit: str
    """What one of them is called, as in `GPU`."""
    locks: tuple[Path, ...]
    names: tuple[str, ...]
    """By which `variable` takes them, in the order of their locks."""
    variable: str = ""
    """The environment variable that names a program's devices; empty for CPU slots, which are only counted."""
    waits: bool = True
    """Whether the run waits for free ones; else it uses what others use, too, where too few are free."""

    @property
    def text(self) -> str:
        """As in `2 GPUs`."""
        return f"{self.count} {self.unit}{'s' if self.count > 1 else ''}"


@dataclass(frozen=True)
class Need:
    """All that a run needs: it gets the whole of it at once, or nothing."""

    folder: Path
    """Of the lock files, and of the tickets of those who wait."""
    pools: tuple[Pool, ...] = ()

    @property
    def waited_for(self) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.waits)

    @property
    def text(self) -> str:
        """What the run waits for, as in `1 GPU and 4 CPU slots`."""
        return " and ".join(pool.text for pool in self.waited_for)


def need_of(config: Config, environ: Mapping[str, str], *, queues: bool) -> Need:
    """What a run needs; `config` has its resources in numbers.

    Devices are waited for, unless JOBKIT_SHARE_DEVICES=1 is in `environ`; CPU slots where the run `queues`, with
    `--queue` or as a point of a sweep. Raises InputError for a number of slots that is none.
    """
    folder, resources = lock_files.folder(environ), config.resources
    pools = []
    kind, devices = of_this_machine(config.device, environ)
    count = resources.world_size * resources.devices_per_rank
    if count and kind.visible is not None and devices is not None:
        locks = tuple(folder / _file_name(name) for name in physical_names(kind, devices, environ))
        shares = environ.get(SHARE) == "1"
        pools.append(Pool(count, unit(kind.name), locks, tuple(devices), kind.visible, waits=not shares))
    cores = [f"cpu-{core}" for core in _cores(environ)]
    # At most all of them: alone on the machine every run can start.
    count = min(resources.world_size * resources.cpus_per_task, len(cores))
    pools.append(Pool(count, "CPU slot", tuple(folder / core for core in cores), tuple(cores), waits=queues))
    return Need(folder, tuple(pools))


def _cores(environ: Mapping[str, str]) -> Sequence[int]:
    """The numbers of this machine's CPU slots."""
    if text := environ.get(CPU_SLOTS):
        if not text.isdecimal() or not 0 < int(text) <= 4096:
            raise InputError(f"{CPU_SLOTS}: found {text!r}, allowed: 1 to 4096 slots")
        return range(int(text))
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


# Which device a name means


def physical_names(kind: DeviceKind, devices: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """A name for each device that does not depend on how the environment numbers them: its UUID where that is told."""
    if kind.name != "cuda":
        return [f"{kind.name}-{device}" for device in devices]
    return _cuda_names(devices, _ask_driver(), by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def _cuda_names(devices: Sequence[str], gpus: Sequence[tuple[str, str]], by_bus: bool) -> list[str]:
    """The UUIDs of CUDA's devices, given as numbers, as UUIDs or as the beginnings of UUIDs, which CUDA takes too.

    `gpus` are (UUID, model) in the order of the PCI bus. CUDA numbers devices so where it is asked to (`by_bus`), else
    by speed; on a machine with one model both are the same. A number whose device cannot be told, and a MIG instance,
    is its own name.
    """
    uuids = [uuid for uuid, _ in gpus]
    in_order = by_bus or len({model for _, model in gpus}) == 1
    names = []
    for device in devices:
        if device.isdigit():
            known = in_order and int(device) < len(uuids)
            names.append(uuids[int(device)] if known else f"cuda-{device}")
        else:
            matching = [uuid for uuid in uuids if uuid.startswith(device)]
            names.append(matching[0] if len(matching) == 1 else device)
    return names


def _ask_driver() -> list[tuple[str, str]]:
    """(UUID, model) of each NVIDIA GPU in the order of the PCI bus, hidden ones too; none without a driver."""
    import pynvml  # here: only a local run on NVIDIA's GPUs needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # its library is part of the driver
        return []
    try:
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [(pynvml.nvmlDeviceGetUUID(gpu), pynvml.nvmlDeviceGetName(gpu)) for gpu in gpus]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
