"""The one table of what jobkit computes on. Plain values: it is read on login nodes too, where there is no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from jobkit.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GPU = "gpu"
"""What Slurm calls AMD's, Intel's and NVIDIA's devices (gres): `--gpus-per-node` counts these and no others."""

ADDED_BY = "jobkit_devices"
"""Group of entry points by which an installed package adds a kind: the device's name, and where its DeviceKind is."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device: the YAML's `device:` and all of jobkit take it from here.

    To add one, add it to KINDS, or let an installed package declare it by an entry point of the group ADDED_BY.
    """

    name: str
    """torch's name of it: `torch.device(name)`."""
    backend: str
    """What torch.distributed sends its tensors with."""
    visible: str | None = None
    """The environment variable that says which of a machine's devices a process may use; None where there is one."""
    files: str | None = None
    """A pattern that matches one file for each device of a machine; None where only its driver knows."""
    gres: str | None = None
    """What Slurm's GresTypes call it, as a rule; None where there is no rule."""
    package: str | None = None
    """What must be installed, and imported, for torch to know this kind."""
    fused_adamw: bool = False
    """Whether torch.optim.AdamW(fused=True) runs on it."""
    streams: bool = False
    """Whether copies to and from pinned host memory go on beside the program."""
    autocast: tuple[str, ...] = ("bf16", "fp16")
    """What `precision:` may be, beside fp32; bf16 where the device at hand has it."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU for Slurm."""
        return self.gres == GPU


KINDS = (
    DeviceKind(
        name="cuda",
        backend="nccl",
        visible="CUDA_VISIBLE_DEVICES",
        files="/proc/driver/nvidia/gpus/*",
        gres=GPU,
        fused_adamw=True,
        streams=True,
    ),
    DeviceKind(
        name="npu",
        backend="hccl",
        visible="ASCEND_RT_VISIBLE_DEVICES",
        files="/dev/davinci[0-9]*",
        gres="npu",
        package="torch_npu",
        fused_adamw=False,  # only newer releases of torch_npu have it, and none that jobkit was run with
        streams=True,
    ),
    DeviceKind(name="xpu", backend="xccl", visible="ZE_AFFINITY_MASK", gres=GPU, fused_adamw=True, streams=True),
    DeviceKind(name="mps", backend="gloo", fused_adamw=True),
    DeviceKind(name="cpu", backend="gloo", fused_adamw=True),
)
"""In the order in which `device: auto` looks for them. Tests run on the CPU; the rest follows the makers' documents."""

AUTO = "auto"
CPU = "cpu"

SHARE = "JOBKIT_SHARE_DEVICES"
"""Environment variable that, set to 1, lets several runs, or ranks, use one device."""


def kind(name: str) -> DeviceKind | None:
    """The entry of a name, or None where there is none; raises InputError for a package's that is no DeviceKind."""
    return next((one for one in KINDS if one.name == name), None) or (None if name == AUTO else _added(name))


@cache
def _added(name: str) -> DeviceKind | None:
    for entry in (one for one in _entries() if one.name == name):
        try:
            found = entry.load()
        except Exception as error:  # another's code
            raise InputError(f"device: {name}: the entry point {entry.value} cannot be loaded: {error!r}") from None
        if not isinstance(found, DeviceKind) or found.name != name:
            raise InputError(f"device: {name}: the entry point {entry.value} is no DeviceKind of that name")
        return found
    return None


def names() -> list[str]:
    """Of all kinds, those of installed packages last."""
    return [*(one.name for one in KINDS), *sorted({entry.name for entry in _entries()})]


def _entries() -> Iterator[EntryPoint]:
    from importlib.metadata import entry_points  # here: it takes 10 ms, and few runs are on such a device

    yield from entry_points(group=ADDED_BY)


def unit(device: str) -> str:
    """What a person calls the devices of the YAML's `device`: GPU, or the kind's name."""
    one = kind(device)
    return "GPU" if one is None or one.is_gpu else one.name


def has_streams(name: str) -> bool:
    """Whether copies between the host and a device of this kind go on beside the program."""
    one = kind(name)
    return one is not None and one.streams


def none_visible() -> dict[str, str]:
    """The environment of a process that is to see none of a machine's devices."""
    hidden = {}
    for name in names():
        with suppress(InputError):  # what another package declares wrongly, which may be none of the run's
            if (one := kind(name)) is not None and one.visible is not None:
                hidden[one.visible] = ""
    return hidden


def listed(one: DeviceKind, environ: Mapping[str, str]) -> list[str] | None:
    """A machine's devices of a kind that `environ` allows; None where only its driver can tell."""
    if one.visible is not None and one.visible in environ:
        entries = [entry.strip() for entry in environ[one.visible].split(",")]
        found = list(takewhile(_is_device, entries))  # an invalid one hides those after it
        return found if len(set(found)) == len(found) else []  # with one that comes twice all are hidden
    if one.visible is None or one.files is None:
        return None
    return [str(index) for index, _ in enumerate(Path("/").glob(one.files.removeprefix("/")))]


def _is_device(entry: str) -> bool:
    """Whether an entry of a list of visible devices is a number, `0.1` a part of one, or a name, as `GPU-8932f937`."""
    return entry.replace(".", "").isdecimal() or entry.startswith(("GPU-", "MIG-"))


def of_this_machine(device: str, environ: Mapping[str, str]) -> tuple[DeviceKind, list[str] | None]:
    """The kind that a YAML's `device` is here, and its `listed`; for `auto` the first that has devices, else cuda."""
    chosen = kind(device)
    if chosen is not None:
        return chosen, listed(chosen, environ)
    found = [(one, listed(one, environ)) for one in KINDS]
    return next(((one, devices) for one, devices in found if devices), found[0])
