"""The device's Python package, as torch_npu is one: importing it makes torch know `standin`, here as four devices.

STANDIN_LIBRARY is the path of standin.cpp's library, built. Without streams or events: what it is told is done at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

torch.ops.load_library(os.environ["STANDIN_LIBRARY"])
_library = torch.ops.standin


def _number(device: Any = None) -> int:
    """Of a device that torch may name by a number, a text or not at all."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return int(_library.current() if index is None else index)


def _device_count() -> int:
    visible = os.environ.get("STANDIN_VISIBLE_DEVICES")
    return int(_library.count()) if visible is None else len([one for one in visible.split(",") if one])


@contextmanager
def _device(device: Any) -> Iterator[None]:
    before = _library.current()
    _library.set_current(_number(device))
    try:
        yield
    finally:
        _library.set_current(before)


def _seed_all(seed: int) -> None:
    for number in range(_library.count()):
        _library.seed(number, seed)


def _module() -> ModuleType:
    module: Any = ModuleType("torch.standin")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count, module.device = _device_count, _device
    module.current_device, module.set_device = _number, lambda device: _library.set_current(_number(device))
    module.get_device_name = lambda device=None: "stand-in"
    module.get_device_properties = lambda device=None: None
    module.synchronize = lambda device=None: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.max_memory_allocated = lambda device=None: _library.peak(_number(device))
    module.set_memory_limit = lambda size, device=None: _library.set_limit(_number(device), size)
    module.manual_seed, module.manual_seed_all = lambda seed: _library.seed(_number(), seed), _seed_all
    module.get_rng_state = lambda device=None: _library.state(_number(device))
    module.set_rng_state = lambda state, device=None: _library.set_state(_number(device), state)
    return module  # type: ignore[no-any-return]


class _Group(dist.ProcessGroup):
    """Collectives of the devices' memory by gloo, which sees the same memory as the CPU's."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return "standin_ccl"


def _collective(name: str) -> Callable[..., dist.Work]:
    def call(self: _Group, *values: Any, **options: Any) -> dist.Work:
        done = getattr(self._gloo, name)(*map(_on_host, values), **options)
        done.wait()
        future: torch.futures.Future[Any] = torch.futures.Future(devices=_devices(values))
        future.set_result(values[0] if values else [])
        return torch._C._distributed_c10d._create_work_from_future(future)

    return call


def _on_host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_on_host(one) for one in value]
    return _library.on_host(value) if isinstance(value, torch.Tensor) and value.device.type == "standin" else value


def _devices(value: Any) -> list[torch.device]:
    if isinstance(value, (list, tuple)):
        return sorted({device for one in value for device in _devices(one)}, key=str)
    return [value.device] if isinstance(value, torch.Tensor) and value.device.type == "standin" else []


for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "send", "recv"),
    *("allgather", "_allgather_base", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base"),
):
    setattr(_Group, _name, _collective(_name))

torch.utils.rename_privateuse1_backend("standin")
torch._register_device_module("standin", _module())
torch.utils.generate_methods_for_privateuse1_backend()
dist.Backend.register_backend("standin_ccl", _Group, devices=["standin"])
