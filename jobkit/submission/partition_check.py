"""Requests that no node of a partition can meet: their job would wait for ever, or be refused without a reason.

Only what is certain is refused: nodes that are down or drained come back, so all that Slurm lists count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobkit import slurm
from jobkit.errors import InvalidValue, SchedulerError
from jobkit.run.device_kinds import GPU, KINDS
from jobkit.submission.plan import LaunchPlan

UNKNOWN_MEGABYTES = 1
"""Slurm's RealMemory of a node whose memory nobody has configured."""

_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class _Need:
    """What each node has to have."""

    key: str
    """Which key of the config asks for it."""
    what: str
    """As in `2 task(s) of 9 core(s) need 18 cores on each node`."""
    least: float
    amount: Callable[[slurm.Node], float]
    """How much of it a node has."""


def refuse_impossible(plan: LaunchPlan) -> None:
    """Raise InvalidValue for a job on Slurm that its partition has too few nodes for, or too small ones.

    Nothing is refused where Slurm does not answer: sbatch is tried again when it does.
    """
    if plan.scheduler != "slurm" or not slurm.available():
        return
    try:
        nodes = slurm.nodes(plan.parameters.get("partition"))
    except SchedulerError:
        return
    found: list[InvalidValue] = []
    for partition, there in nodes.items():
        problem = _problem(plan, partition, there)
        if problem is None:
            return  # a job of several partitions runs in one of them
        found.append(problem)
    if found:
        raise found[0]


def _problem(plan: LaunchPlan, partition: str, nodes: Sequence[slurm.Node]) -> InvalidValue | None:
    resources, wanted = plan.config.resources, int(plan.parameters["nodes"])
    where = f"partition {partition} has {len(nodes)} node(s)"
    if wanted > len(nodes):
        if resources.spares and resources.nodes <= len(nodes):
            most = f"with nodes: {resources.nodes} at most {len(nodes) - resources.nodes}"
            return InvalidValue(_key(plan, "spares"), f"found {resources.spares}, but {where}: {most}")
        return InvalidValue(_key(plan, "nodes"), f"found {resources.nodes}, but {where}")
    left = list(nodes)
    for need in _needs(plan):
        meet = [node for node in left if need.amount(node) >= need.least]
        if len(meet) < wanted:
            most = f"{len(meet)} of them have as many" if meet else f"none has more than {max(map(need.amount, left))}"
            return InvalidValue(need.key, f"{need.what} of {wanted} node(s), but {where}, and {most}")
        left = meet
    return None


def _needs(plan: LaunchPlan) -> Iterator[_Need]:
    resources = plan.config.resources
    options = {key.replace("-", "_"): value for key, value in _options(plan).items()}
    cores, devices = resources.ranks_per_node * resources.cpus_per_task, _devices(options)
    if "overcommit" not in options:
        each = f"{resources.ranks_per_node} task(s) of {resources.cpus_per_task} core(s) need {cores} cores on each"
        yield _Need(_key(plan, "cpus_per_task"), each, cores, lambda node: node.cpus)
    entered = next((key for key in ("gpus_per_node", "gres") if key in plan.config.clusters.get(plan.cluster, {})), "")
    for (name, kind), count in devices.items():
        key = f"clusters.{plan.cluster}.{entered}" if entered else _key(plan, "gpus_per_task")
        what = f"found {count} {kind + ' ' if kind else ''}{'GPU' if name == GPU else name}(s) on each"
        yield _Need(key, what, count, partial(slurm.Node.count, name=name, kind=kind))
    gpus = sum(count for (name, _), count in devices.items() if name == GPU)
    for name, times in (("mem", 1), ("mem_per_cpu", cores), ("mem_per_gpu", gpus)):
        if megabytes := _megabytes(options.get(name)) * times:
            what = f"found {options[name]}, which is {megabytes:.0f} MB on each"
            yield _Need(f"clusters.{plan.cluster}.{name}", what, megabytes, _memory)


def _memory(node: slurm.Node) -> float:
    return math.inf if node.megabytes <= UNKNOWN_MEGABYTES else node.megabytes


def _key(plan: LaunchPlan, name: str) -> str:
    """Where a value of the resources was set."""
    is_entered = name in plan.config.clusters.get(plan.cluster, {})
    return f"clusters.{plan.cluster}.{name}" if is_entered else f"resources.{name}"


def _options(plan: LaunchPlan) -> dict[str, Any]:
    parameters = dict(plan.parameters)
    return {**parameters, **parameters.pop("additional_parameters", {})}


def _devices(options: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Devices that each node has to have, by (name, type), as Slurm calls them; "" is any type."""
    names = "|".join({kind.gres for kind in KINDS if kind.gres is not None})  # of others a number may be an amount
    wanted: dict[tuple[str, str], int] = {}
    for key, prefix in (("gpus_per_node", f"{GPU}:"), ("gres", "")):
        for part in str(options.get(key, "")).split(","):
            if found := re.fullmatch(rf"({names}):(?:([^:]+):)?(\d+)", f"{prefix}{part.strip()}"):
                kind = found[1], (found[2] or "").lower()
                wanted[kind] = wanted.get(kind, 0) + int(found[3])
    return wanted


def _megabytes(text: Any) -> float:
    """Of `4G`, `500M` or a number, which is megabytes; 0, which is all of the node's, for what is something else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", str(text or "").upper())
    return float(found[1]) * _UNITS[found[2] or "M"] if found else 0.0
