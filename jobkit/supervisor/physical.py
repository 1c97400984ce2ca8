"""Names of devices that do not depend on how an environment numbers them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

from jobkit.run.device_kinds import DeviceKind


def physical_names(kind: DeviceKind, devices: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """A name for each device that does not depend on how the environment numbers them: its UUID where that is told."""
    if kind.name != "cuda":
        return [f"{kind.name}-{device}" for device in devices]
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return cuda_names(devices, _ask_driver(), by_bus)


def cuda_names(devices: Sequence[str], query: str, by_bus: bool) -> list[str]:
    """The UUIDs of CUDA's devices, given as numbers, as UUIDs or as the beginnings of UUIDs.

    `query` is nvidia-smi's list of `uuid, name` in the order of the PCI bus. CUDA numbers devices so where it is asked
    to (`by_bus`), else by speed; on a machine with one model both are the same. A number whose device cannot be told,
    and one of a MIG, is its own name.
    """
    rows = [[cell.strip() for cell in line.split(",", 1)] for line in query.splitlines() if line.count(",")]
    uuids = [row[0] for row in rows]
    in_order = by_bus or len({row[1] for row in rows}) == 1
    names = []
    for device in devices:
        if device.isdigit():
            known = in_order and int(device) < len(uuids)
            names.append(uuids[int(device)] if known else f"cuda-{device}")
        else:
            matching = [uuid for uuid in uuids if uuid.startswith(device)]
            names.append(matching[0] if len(matching) == 1 else device)
    return names


def _ask_driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=uuid,name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
