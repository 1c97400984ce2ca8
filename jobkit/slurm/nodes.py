"""Slurm's nodes and partitions: which nodes are dead or usable, and limits that would let a job wait for ever.

The supervisor asks about the nodes of its job, an agent without a supervisor about the batch script's node, the
submission about the limits of a partition. Node lists are in Slurm's notation: `node[1-3],node7`.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from jobkit.duration import parse_seconds
from jobkit.errors import InputError
from jobkit.slurm.commands import EVEN_HIDDEN, config, fields, run
from jobkit.slurm.jobs import parse_time

_DEAD = {"DOWN", "FAIL", "NOT_RESPONDING"}


def expand(nodes: str) -> list[str]:
    """The names in a list of nodes, each once; Slurm's controller is not asked."""
    return list(dict.fromkeys(run("scontrol", "show", "hostnames", nodes).split())) if nodes else []


def dead_node(nodes: str) -> str | None:
    """The first of some nodes that is down or does not respond; None if all are well."""
    # Not by sinfo: where it was asked again and again, it showed a node that had come back as down for minutes.
    return next((record["NodeName"] for record in _records("node", nodes) if _is_dead(record["State"])), None)


def _is_dead(state: str) -> bool:
    return state.endswith("*") or not _DEAD.isdisjoint(state.split("+"))  # POWERED_DOWN is a node that sleeps


def died_since(node: str, when: float) -> bool:
    """True if a node is down, or its slurmd started after `when`, in seconds since the epoch."""
    record = _records("node", node)[0]
    # A node that has rebooted is up again when the job's next start asks: only the age of its slurmd tells.
    started = parse_time(record.get("SlurmdStartTime", ""))
    return _is_dead(record["State"]) or started is None or started > when


def usable_nodes(partition: str) -> set[str]:
    """The nodes of partitions `a,b` that take jobs, now or later. A job that excludes too many of them never starts."""
    names = set(partition.split(","))
    return {
        record["NodeName"]
        for record in _records("node")
        if names.intersection(record.get("Partitions", "").split(","))
        and not _is_dead(record["State"])
        and "DRAIN" not in record["State"].split("+")
    }


def batch_step_alive(job_id: str) -> bool:
    """True while Slurm lists the batch step of a job and the slurmd of its node takes connections."""
    rows = run("squeue", EVEN_HIDDEN, "--noheader", "--steps", f"--jobs={job_id}", "--format=%i|%N").splitlines()
    steps = dict(row.split("|") for row in rows if "|" in row)
    return any(slurmd_answers(node) for step, node in steps.items() if step.endswith(".batch"))


def slurmd_answers(node: str) -> bool:
    """True if the slurmd of a node takes connections, or if nobody can say."""
    # Slurm itself calls a node down only after SlurmdTimeout, 300 s by default.
    record = _records("node", node)[0]
    port = int(record.get("Port") or config()["SlurmdPort"])  # shown where it is not the cluster's usual one
    try:
        socket.create_connection((record["NodeAddr"], port), timeout=5.0).close()
    except (ConnectionRefusedError, TimeoutError):
        return False
    except OSError as error:  # else nobody knows: the address may not resolve here
        return error.errno != errno.EHOSTUNREACH
    return True


def _records(kind: str, *names: str) -> list[dict[str, str]]:
    answer = run("scontrol", "--oneliner", EVEN_HIDDEN, "show", kind, *names)
    return [fields(line) for line in answer.splitlines() if "=" in line]


# Partitions


@dataclass(frozen=True)
class Partition:
    """A partition and its limits for a job; None is no limit. Cores and megabytes are of each node."""

    name: str
    total_nodes: int
    is_default: bool = False
    state: str = "UP"
    min_nodes: int = 0
    max_nodes: int | None = None
    max_seconds: float | None = None
    max_cpus: int | None = None
    max_megabytes: int | None = None
    preempt_mode: str = "OFF"
    grace_seconds: int = 0
    """The time that a preempted job gets."""


def partitions(names: str | None) -> list[Partition]:
    """The partitions `a,b`, as far as Slurm knows them; None: those that a job without a partition may get.

    That is the default one, or any where the site has a job_submit plugin, which may choose.
    """
    parts = [parse_partition(record) for record in _records("partition")]
    if names is not None:
        return [part for part in parts if part.name in names.split(",")]
    return parts if config().get("JobSubmitPlugins") not in (None, "(null)") else [p for p in parts if p.is_default]


def parse_partition(record: dict[str, str]) -> Partition:
    """The partition of one record of `scontrol show partition`."""
    limits = {key: value for key, value in record.items() if value != "UNLIMITED"}
    number = {key: int(value) for key, value in limits.items() if key.startswith("Max") and value.isdecimal()}
    return Partition(
        name=record["PartitionName"],
        total_nodes=int(record["TotalNodes"]),
        is_default=record["Default"] == "YES",
        state=record["State"],
        min_nodes=int(record.get("MinNodes", 0)),
        max_nodes=number.get("MaxNodes"),
        max_seconds=parse_seconds(limits["MaxTime"]) if "MaxTime" in limits else None,
        max_cpus=number.get("MaxCPUsPerNode"),
        max_megabytes=number.get("MaxMemPerNode"),  # MaxMemPerCPU may stand in its place
        preempt_mode=record.get("PreemptMode", "OFF"),
        grace_seconds=int(record.get("GraceTime", 0)),
    )


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of a job: cores and megabytes of each node; None if it does not say."""

    nodes: int
    seconds: float
    cpus: int | None = None
    megabytes: float | None = None


def limits_refuse(choice: Sequence[Partition], needs: Needs) -> InputError | None:
    """The error for a job that none of the partitions ever starts; None if one of them does.

    sbatch takes such a job where EnforcePartLimits is off, the default, and lets it wait for ever; `list` says why.
    Nodes that are down count: they come back. Do not call it for a job that names a QOS: its flags may lift limits.
    """
    refusals = [_refusal(part, needs) for part in choice]
    return None if None in refusals else next(iter(refusals), None)


def _refusal(part: Partition, needs: Needs) -> InputError | None:
    never = f"partition {part.name} never starts such a job"
    for key, requested, limit, unit in (
        ("resources.nodes", needs.nodes, part.total_nodes, "nodes in it"),
        ("resources.nodes", needs.nodes, part.max_nodes, "nodes, MaxNodes"),
        ("resources.time", needs.seconds, part.max_seconds, "seconds, MaxTime"),
        ("resources.cpus_per_task", needs.cpus, part.max_cpus, "cores a node, MaxCPUsPerNode"),
        ("mem", needs.megabytes, part.max_megabytes, "MB a node, MaxMemPerNode"),
    ):
        if requested is not None and limit is not None and requested > limit:
            return InputError(never, key=key, found=requested, allowed=f"at most {limit:g} {unit}")
    if needs.nodes < part.min_nodes:
        return InputError(
            never, key="resources.nodes", found=needs.nodes, allowed=f"{part.min_nodes} or more, MinNodes"
        )
    return None
