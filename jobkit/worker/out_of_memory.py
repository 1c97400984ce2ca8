"""Whether the kernel has killed processes for lack of memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path


def kernel_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory so far: of this machine, and of our control group."""
    count = 0
    for file in ("/proc/vmstat", "/sys/fs/cgroup/memory.events", *_own_groups()):
        with contextlib.suppress(OSError):
            count += sum(int(number) for number in re.findall(r"^oom_kill (\d+)", Path(file).read_text(), re.MULTILINE))
    return count


def _own_groups() -> list[str]:
    """The files in which our control group counts, of either version of control groups."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(":", 2) for line in lines]
    return [
        f"/sys/fs/cgroup/memory{path}/memory.oom_control"
        if "memory" in controllers.split(",")
        else f"/sys/fs/cgroup{path}/memory.events"
        for _, controllers, path in fields
        if path != "/" and controllers in ("", "memory")
    ]
