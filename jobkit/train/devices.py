"""The device of a rank, as torch sees it: which one, what it can do, and how its tensors are sent.

The table is jobkit/run/device_kinds.py. All kinds take the same path through torch's modules.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from jobkit.errors import DistributedError
from jobkit.run import device_kinds
from jobkit.run.device_kinds import DeviceKind

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What is computed in with each `precision` of the YAML but fp32."""


def choose_device(name: str, gpus_per_task: int, local_rank: int, local_world_size: int) -> torch.device:
    """The device of one local rank, made torch's current one: the CPU where `gpus_per_task` is 0.

    `name` is the YAML's `device:`; `auto` is the first kind of the table that torch finds here. A launcher may show a
    task its own devices only, or all of the node's: the first is number 0 for every rank.
    Raises DistributedError, with what to do, for a device that is not there.
    """
    on_cpu = gpus_per_task == 0 and name == device_kinds.AUTO
    kind = device_kinds.kind(device_kinds.CPU if on_cpu else name)
    if kind is None:
        present = (one for one in device_kinds.KINDS if _is_installed(one) and _module(one).device_count())
        kind = next((one for one in present if one.name != device_kinds.CPU), device_kinds.KINDS[0])
    if kind.name == device_kinds.CPU:
        return torch.device(kind.name)
    if gpus_per_task == 0:
        raise DistributedError(f"device: {kind.name}, but resources.gpus_per_task is 0: set it to 1, or device: cpu")
    module = _module(kind)
    count = int(module.device_count())
    if count == gpus_per_task and kind.visible is not None:
        index = 0
    elif count >= gpus_per_task * local_world_size:
        index = local_rank * gpus_per_task
    else:
        shown = f" ({_shown(kind)})" if kind.visible else ""
        raise DistributedError(
            f"rank with local rank {local_rank} of {local_world_size} needs {gpus_per_task} {kind.name} device(s) and "
            f"sees {count}{shown}; fit resources to them, or set resources.gpus_per_task=0 for the CPU"
        )
    if kind.visible is None:
        return torch.device(kind.name)
    module.set_device(index)
    return torch.device(kind.name, index)


def group_backend(device: torch.device, backend: str = device_kinds.AUTO) -> str:
    """What init_process_group is given for ranks on `device`: gloo for tensors on the CPU, and the device's own.

    `backend` is the YAML's. Raises DistributedError for one that this torch was built without.
    """
    kind = _kind_of(device)
    chosen = kind.backend if backend == device_kinds.AUTO else backend
    if ":" in chosen:
        return chosen  # torch's own spelling, device by device
    if not dist.is_backend_available(chosen):
        has = [one for one in dist.Backend.backend_list if one != "undefined" and dist.is_backend_available(one)]
        raise DistributedError(f"backend: {chosen} is not in this torch (it has: {', '.join(has)}); try backend: auto")
    return chosen if kind.name == device_kinds.CPU else f"cpu:gloo,{kind.name}:{chosen}"


def check_precision(device: torch.device, precision: str) -> None:
    """Raise DistributedError where autocast cannot compute in the YAML's `precision` on this device."""
    kind = _kind_of(device)
    known = precision == "fp32" or precision in kind.autocast
    in_hardware: Callable[[], bool] | None = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if not known or (precision == "bf16" and in_hardware is not None and not in_hardware()):
        other = [one for one in ("fp32", *kind.autocast) if one != precision]
        raise DistributedError(f"precision: {precision} is not for {describe(device)}; use {' or '.join(other)}")


def is_spread_by_hand(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether a module is on several devices of this kind already, as with `gpus_per_task: 2`: it is to stay there."""
    return len({tensor.device for tensor in module.parameters() if tensor.device.type == device.type}) > 1


def describe(device: torch.device) -> str:
    """A device for a person: `cpu`, `cuda (NVIDIA H100 80GB HBM3)`."""
    name: Callable[[torch.device], str] | None = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None or device.type == device_kinds.CPU else f"{device.type} ({name(device)})"


def peak_memory(device: torch.device | None = None) -> int | None:
    """The most bytes that tensors have had on a device, as its own module counts; None where it does not (CPU, mps), or
    cannot.

    `device` None is this process's current device of the accelerator that torch knows.
    """
    named = () if device is None else (device,)
    count: Callable[..., int] | None = getattr(torch.get_device_module(*named), "max_memory_allocated", None)
    try:
        return None if count is None else int(count(*named))
    except Exception:  # another's code, and the device may be broken: nobody's run is to end for a statistic
        return None


def report(device: torch.device, backend: str, rank: int, nodes: int, gather: Callable[[object], Iterable[Any]]) -> str:
    """One line about where a rank computes; rank 0's is about them all: `8 rank(s) on 2 node(s), nccl, cuda (...)`.

    `gather` collects a value of every rank; all ranks call this together. Raises DistributedError where two ranks of a
    machine have got the same device and JOBKIT_SHARE_DEVICES is not set.
    """
    kind = _kind_of(device)
    found = list(gather((socket.gethostname(), _identity(device), _shown(kind))))
    for one, (host, identity, _) in enumerate(found):
        first = next(other for other in range(one + 1) if found[other][:2] == (host, identity))
        if identity is not None and first != one and not os.environ.get(device_kinds.SHARE):
            raise DistributedError(
                f"ranks {first} and {one} have both got the same {kind.name} device of {host} ({found[one][2]}): start "
                f"at most one task for each device, or set {device_kinds.SHARE}=1 if that is meant"
            )
    seen = f", {_shown(kind)}" if kind.visible and kind.visible in os.environ else ""
    if rank != 0:
        return f"rank {rank}: {describe(device)}{seen}"
    where = f" on {nodes} node(s)" if nodes > 1 else ""
    return f"{len(found)} rank(s){where}, {backend.rsplit(':', 1)[-1]}, {describe(device)}{seen}"


def _kind_of(device: torch.device) -> DeviceKind:
    kind = device_kinds.kind(device.type)
    if kind is None:
        raise DistributedError(f"{device.type}: not one of jobkit's devices (jobkit/run/device_kinds.py lists them)")
    return kind


def _is_installed(kind: DeviceKind) -> bool:
    return kind.package is None or importlib.util.find_spec(kind.package) is not None


def _module(kind: DeviceKind) -> Any:
    if kind.package is not None:
        try:
            importlib.import_module(kind.package)
        except ImportError as error:
            raise DistributedError(
                f"device: {kind.name} needs the Python package {kind.package} in the release for torch "
                f"{torch.__version__.partition('+')[0]}: pip install it ({error})"
            ) from None
    return torch.get_device_module(kind.name)


def _shown(kind: DeviceKind) -> str:
    return f"{kind.visible}={os.environ.get(kind.visible, '(not set)')}" if kind.visible else kind.name


def _identity(device: torch.device) -> str | None:
    """What no other device of the machine has: its UUID where torch tells it; None for what cannot be told apart."""
    kind = _kind_of(device)
    if kind.visible is None:
        return None if kind.name == device_kinds.CPU else kind.name
    uuid = getattr(torch.get_device_module(device).get_device_properties(device), "uuid", None)
    if uuid is None and kind.visible not in os.environ:
        return None  # each task's number 0 may be another device
    return str(uuid or f"{_shown(kind)}, number {device.index}")
