"""Is everything here that a run needs? Each answer is a value; nothing is started, and torch is not imported."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jobkit import slurm
from jobkit.errors import SchedulerError, nearest
from jobkit.run.locks import NoLocks, file_system, is_free, lock_at
from jobkit.submission.devices import visible_gpus
from jobkit.submission.submit import is_installed

OK, WARNING, PROBLEM = "ok", "warning", "problem"

LITTLE_SPACE = 10 << 30
"""Bytes: a few checkpoints of a small model with its optimizer's state."""

SHORT_GRACE = 10
"""Seconds from a preemption's signal to the kill (GraceTime, then KillWait): with less, a big model's checkpoint may
not be written whole."""


@dataclass(frozen=True)
class Check:
    """One answer, and for a warning or a problem what to do."""

    name: str
    state: str
    """OK, WARNING (a run works, with a limit), PROBLEM (no run would work)."""
    found: str
    advice: str = ""


def check_machine(gpus_per_task: int) -> Iterator[Check]:
    """This machine and its Python."""
    python = f"Python {platform.python_version()} ({sys.executable})"
    yield Check("python", OK, f"{python}, {os.cpu_count()} cores here")
    yield _check_torch(gpus_per_task)
    found = f"submitit {_version('submitit') or 'is not installed'}, jobkit {_version('jobkit') or 'is not installed'}"
    if is_installed():
        yield Check("submitit", OK, f"{found}, which is its plugin")
    else:
        yield Check("submitit", PROBLEM, f"{found}; it is not Submitit's plugin", f"pip install it in {sys.prefix}")


def _check_torch(gpus_per_task: int) -> Check:
    torch, gpus = _version("torch"), visible_gpus()
    devices = f"{gpus} NVIDIA GPU(s) here"
    if npus := len(list(Path("/dev").glob("davinci[0-9]*"))):
        devices += f", {npus} NPU(s), torch_npu {_version('torch_npu') or 'is not installed'}"
    if torch is None:
        return Check("torch", PROBLEM, f"torch is not installed; {devices}", f"pip install it in {sys.prefix}")
    if torch.endswith("+cpu") and (gpus or gpus_per_task):
        state = PROBLEM if gpus_per_task else WARNING
        return Check("torch", state, f"torch {torch} knows the CPU only; {devices}", "install a build for the GPUs")
    return Check("torch", OK, f"torch {torch}; {devices}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_runs_dir(runs_dir: Path) -> Check:
    """Whether runs can be written, and locked, where they shall live."""
    move = "set --runs-dir or JOBKIT_RUNS"
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=runs_dir) as folder:
            file = Path(folder) / "lock"
            with lock_at(file, elsewhere=move):
                excludes = not is_free(file)
        free = shutil.disk_usage(runs_dir).free
    except NoLocks as error:
        return Check("runs", PROBLEM, str(error))
    except OSError as error:
        return Check("runs", PROBLEM, f"{runs_dir}: not writable ({error.strerror})", move)
    found = f"{runs_dir}: writable, {free / (1 << 30):.1f} GiB free, {file_system(runs_dir)}"
    if not excludes:
        return Check("runs", PROBLEM, f"{found}; locks do not work: a run could be started twice", move)
    if free < LITTLE_SPACE:
        return Check("runs", WARNING, found, f"make room, or {move}: a full disk interrupts runs")
    return Check("runs", OK, f"{found}, locks work")


def check_slurm(partition: str | None, nodes: int) -> Iterator[Check]:
    """The Slurm that commands here talk to, for jobs of some nodes in `partition`, or in its default one."""
    try:
        config = dict(re.findall(r"^(\S+)\s+= (.*?)\s*$", slurm.command("scontrol", "show", "config"), re.MULTILINE))
        listed = slurm.command("scontrol", *slurm.EVEN_HIDDEN, "--oneliner", "show", "partition")
        idle = slurm.command("sinfo", *slurm.EVEN_HIDDEN, "--noheader", "--states=idle", "--format=%R %D")
    except SchedulerError as error:
        yield Check("slurm", PROBLEM, str(error), "use --local for this machine alone")
        return
    about = f"Slurm {config.get('SLURM_VERSION')}, cluster {config.get('ClusterName')}"
    yield Check("slurm", OK, f"{about}, slurmctld up since {config.get('BOOT_TIME')}")
    partitions = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in listed.splitlines()]
    by_name = {one["PartitionName"]: one for one in partitions if "PartitionName" in one}
    default = next((name for name, one in by_name.items() if one.get("Default") == "YES"), None)
    chosen = [*partition.split(",")] if partition else [default]
    idle_nodes = dict(line.split() for line in idle.splitlines())
    found = [_check_partition(name, by_name, idle_nodes, nodes) for name in chosen]
    works = any(check.state == OK for check in found)
    for name, check in zip(chosen, found, strict=True):
        # Slurm refuses a job if one of its partitions is not there; of the others it runs in one.
        yield dataclasses.replace(check, state=WARNING) if works and check.state != OK and name in by_name else check
    known = [by_name[name] for name in chosen if name in by_name]
    if known:
        yield _check_requeue(config)
    for one in known:
        yield _check_preemption(config, one)


def _check_partition(
    chosen: str | None, partitions: Mapping[str, Mapping[str, str]], idle: Mapping[str, str], nodes: int
) -> Check:
    known = ", ".join(list(partitions)[:8]) + (" ..." if len(partitions) > 8 else "")
    say = "set clusters.<name>.partition"
    if chosen is None or chosen not in partitions:
        missing = f"no partition {chosen!r}{nearest(chosen, partitions)}" if chosen else "there is no default partition"
        return Check("partition", PROBLEM, f"{missing} (known: {known})", say)
    own = partitions[chosen]
    total, limit = own.get("TotalNodes", "0"), own.get("MaxTime")
    found = f"{chosen} is {own.get('State')}: {total} node(s), {idle.get(chosen, 0)} idle, MaxTime={limit}"
    if own.get("State") != "UP":
        return Check("partition", PROBLEM, found, f"its jobs wait until it is opened again; known: {known}")
    if int(total) < nodes:
        return Check("partition", PROBLEM, f"{found}; {nodes} are asked for", f"{say}; known: {known}")
    return Check("partition", OK, f"{found} (of {known})")


def _check_requeue(config: Mapping[str, str]) -> Check:
    requeue = config.get("JobRequeue", "?")
    how = "jobs are requeued" if requeue == "1" else "only jobs that ask for it are requeued, and jobkit's do"
    return Check("requeue", OK, f"JobRequeue={requeue}: {how}")


def _check_preemption(config: Mapping[str, str], partition: Mapping[str, str]) -> Check:
    """What Slurm does to a job of a partition that must make room."""
    mode, grace = partition.get("PreemptMode", "OFF"), partition.get("GraceTime", "0")
    kill_wait = config.get("KillWait", "30 sec")
    found = f"{partition['PartitionName']}: PreemptMode={mode}, GraceTime={grace}, KillWait={kill_wait}"
    killed_after = int(grace) + int(kill_wait.split()[0])
    if mode == "OFF" or config.get("PreemptType", "").endswith("none"):
        return Check("preemption", OK, f"{found}: jobs are not preempted")
    if "SUSPEND" in mode:
        advice = "a suspended job keeps its GPUs' memory, and the watchdog may take it for hung: set `watchdog: off`"
        return Check("preemption", WARNING, f"{found}: jobs are suspended", advice)
    if killed_after < SHORT_GRACE:
        advice = "a preempted run may repeat the steps since its last checkpoint: set `checkpoint: {every: 5min}` or so"
        return Check("preemption", WARNING, f"{found}: too short for a big model's checkpoint", advice)
    return Check("preemption", OK, f"{found}: a preempted run has {killed_after} s to save, and continues by itself")
