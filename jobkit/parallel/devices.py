"""The device of a rank, the backend that its tensors are sent with, and the determinism that the YAML asks for.

loop/join.py calls this once, before the process group exists.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from jobkit.errors import DistributedError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each `precision:` but fp32."""

BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}
"""The device's own backend; a device that is not listed sends by gloo."""


def choose_device(name: str, gpus_per_task: int, local_rank: int) -> torch.device:
    """Return the device of a local rank, made torch's current one: the CPU where `gpus_per_task` is 0.

    `name` is the YAML's `device:`. Each rank sees all devices of its node. Raises DistributedError, with what to
    do, for a device that is not there.
    """
    if name == "cpu" or (name == "auto" and gpus_per_task == 0):
        return torch.device("cpu")
    if gpus_per_task == 0:
        raise DistributedError(f"device: {name}, but resources.gpus_per_task is 0: set it to 1, or device: cpu")
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or (name not in ("auto", present.type)):
        seen = "no accelerator" if present is None else present.type
        raise DistributedError(f"device: {name}, and torch sees {seen} here; set resources.gpus_per_task=0 for the CPU")
    count = torch.accelerator.device_count()
    index = 0 if count == gpus_per_task else local_rank * gpus_per_task  # a launcher may show a task its own alone
    if index >= count:
        raise DistributedError(
            f"local rank {local_rank} needs {gpus_per_task} {present.type} device(s) and the node has {count}: fit "
            "resources to them, or set resources.gpus_per_task=0 for the CPU"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(present.type, index)


def group_backend(device: torch.device, backend: str = "auto") -> str:
    """Return the backend for init_process_group: gloo for tensors on the CPU, and the device's own.

    Raises DistributedError for one that this torch was built without.
    """
    chosen = BACKENDS.get(device.type, "gloo") if backend == "auto" else backend
    if ":" in chosen:
        return chosen  # torch's own spelling, device by device
    if not dist.is_backend_available(chosen):
        raise DistributedError(f"backend: {chosen} is not in this torch; try backend: auto")
    return chosen if device.type == "cpu" else f"cpu:gloo,{device.type}:{chosen}"


def check_precision(device: torch.device, precision: str) -> None:
    """Raise DistributedError where autocast cannot compute in the YAML's `precision` on this device."""
    if precision == "fp32":
        return
    if not torch.amp.is_autocast_available(device.type) or (
        device.type == "cuda" and precision == "bf16" and not torch.cuda.is_bf16_supported()
    ):
        raise DistributedError(f"precision: {precision} is not for {device.type}; use fp32")


def set_determinism(deterministic: bool | str) -> None:
    """Make torch compute the same bits each time, as the YAML's `deterministic:` says."""
    if deterministic is False:
        return
    torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
    torch.backends.cudnn.benchmark = False


def devices_of(value: Any) -> list[torch.device]:
    """Return the accelerators on which the tensors of a module, of an optimizer's parameters, or of plain values are.

    Their generators may be drawn from: dropout of a second device draws from that one's.
    """
    if isinstance(value, torch.nn.Module):
        tensors: list[Any] = [*value.parameters(), *value.buffers()]
    elif isinstance(value, torch.optim.Optimizer):
        tensors = [item for group in value.param_groups for item in group["params"]]
    else:
        tensors = tree_leaves(value)
    devices = dict.fromkeys(item.device for item in tensors if isinstance(item, torch.Tensor))
    return [device for device in devices if device.type not in ("cpu", "meta")]


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors have had on a device; None for the CPU."""
    if device.type == "cpu" or not hasattr(torch.accelerator, "max_memory_allocated"):
        return None
    return int(torch.accelerator.max_memory_allocated(device))
