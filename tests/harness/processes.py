"""The processes of one run, and nobody else's, as the system's table shows them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from slurm_cluster import Process, process_table


def ranks_of(run: Path, attempt: int) -> dict[int, Process]:
    """The ranks of an attempt by number, without what they have started, such as a data loader's workers."""
    table = process_table()
    found = {pid: rank for pid, process in table.items() if (rank := _rank(process, run, attempt)) is not None}
    return {rank: table[pid] for pid, rank in found.items() if table[pid].parent not in found}


def processes_of(run: Path) -> list[Process]:
    """All processes of a run that still live: supervisor, ranks, and what they have started."""
    return [process for process in process_table().values() if _belongs(process, run)]


def command_line(process: Process) -> str:
    """Its words, or nothing where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def _rank(process: Process, run: Path, attempt: int) -> int | None:
    """Which rank of the attempt a process is, or belongs to.

    A forked one shows the environment of its server: there the log file that it prints into tells.
    """
    if not process.name.startswith(("python", "pt_")):
        return None
    with contextlib.suppress(OSError):
        output = Path(f"/proc/{process.pid}/fd/1").readlink()
        if output.parent == run / "logs" / str(attempt) and (number := re.fullmatch(r"rank_(\d+)\.out", output.name)):
            return int(number[1])
    if "submitit.core._submit" not in command_line(process):
        return None
    variables = dict(line.partition("=")[::2] for line in process.environment())
    if (variables.get("JOBKIT_RUN"), variables.get("JOBKIT_ATTEMPT")) != (str(run), str(attempt)):
        return None
    return int(variables.get("JOBKIT_PROCID") or variables.get("SLURM_PROCID") or 0)


def _belongs(process: Process, run: Path) -> bool:
    if f"JOBKIT_RUN={run}" in process.environment():
        return True
    if process.name.startswith("python") and str(run) in command_line(process).split():
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/fd/1").readlink().is_relative_to(run / "logs")
    return False
