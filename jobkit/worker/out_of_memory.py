"""Whether the kernel has killed processes for lack of memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def kernel_oom_kills() -> int:
    """How many processes of our control group the kernel has killed for lack of memory so far, of the group or machine.

    Of the whole machine where no group counts: else what another job on the node dies of would be taken for ours.
    """
    counts = [count for file in _own_groups() if (count := _count(file)) is not None]
    return max(counts) if counts else _count("/proc/vmstat") or 0


def _count(file: str) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)", Path(file).read_text(encoding="utf-8"), re.MULTILINE):
            return int(found[1])
    return None


def _own_groups() -> list[str]:
    """The files in which our control group counts, of either version of control groups."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    fields = [line.split(":", 2) for line in lines]
    own = [
        f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        if "memory" in controllers.split(",")
        else f"/sys/fs/cgroup{path}/memory.events"
        for _, controllers, path in fields
        if path != "/" and controllers in ("", "memory")
    ]
    return [*own, "/sys/fs/cgroup/memory.events"]  # the last is there in a container, whose own group is its root
