"""The host memory that a process may still take: of the machine, and within its control groups.

memory.py asks it before it takes slots.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes of host memory that are free for this process, by /proc and the control groups under `root`.

    Slurm limits a job by a control group, and shared memory counts there. 0 where the system does not say.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    free = int(available[1]) << 10 if available else 0
    return max(0, min([free, *_free_in_groups(root)]))


def _free_in_groups(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):  # a group has what those above it leave
            if not folder.is_relative_to(base):
                break
            maximum, used_now = _text(folder / limit).strip(), _text(folder / used).strip()
            if maximum.isdigit() and used_now.isdigit():
                yield int(maximum) - int(used_now) + _cache(folder)


def _cache(group: Path) -> int:
    """Bytes of files in the page cache that the group can give back; shared memory is not among them."""
    matches = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return max(map(int, matches), default=0)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
