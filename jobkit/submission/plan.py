"""LaunchPlan: everything that a submission will do, as a value. --dry-run prints it, transaction.py carries it out.

Loaded (YAML, overrides) + Target (--local, --cluster) -> make_plan -> LaunchPlan -> sbatch.py or local.py
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobkit.config.identity import run_name
from jobkit.config.load import Loaded
from jobkit.config.machine import with_counts
from jobkit.config.schema import ALL, AUTO, Config, ContainerConfig, Resources
from jobkit.config.strict import build
from jobkit.duration import format_seconds
from jobkit.errors import InputError, SchedulerError, nearest
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.slurm import commands, nodes
from jobkit.slurm.nodes import Partition
from jobkit.submission.options import Options, split

SCHEDULERS = ("slurm", "local")

AUTO_SECONDS = 3600
"""`time: auto` on Slurm."""


@dataclass(frozen=True)
class Target:
    """Where a run shall go."""

    name: str
    """The name under `clusters:`, or `slurm` or `local`."""
    scheduler: Literal["slurm", "local"]
    entry: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One submission of one run.

    plan = make_plan(load(Path("toy.yaml")), runs_dir, target(config, local=False, cluster="h100"))
    plan.run.name, plan.config.resources.world_size, plan.parameters["partition"]
    """

    run: RunDir
    loaded: Loaded
    """The config with resources in numbers."""
    target: Target
    options: Options
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Submitit's parameters of the batch script; empty for this machine."""
    notes: Sequence[str] = ()
    """Lines for the user."""

    @property
    def config(self) -> Config:
        return self.loaded.config

    def at(self, run: RunDir) -> LaunchPlan:
        """The same plan for another run directory, which is chosen under the run's lock."""
        named = {"job_name": run.name} if self.target.scheduler == "slurm" else {}
        return dataclasses.replace(self, run=run, parameters={**self.parameters, **named})

    def describe(self) -> str:
        """The lines of --dry-run."""
        resources, is_local = self.config.resources, self.target.scheduler == "local"
        spares = f", {resources.spares} spare node(s)" if resources.spares and not is_local else ""
        ranks = f"{resources.nodes} node(s) x {resources.ranks_per_node} task(s) = {resources.world_size} rank(s)"
        devices = f"{resources.devices_per_rank} GPU(s)" if resources.devices_per_rank else "CPU"
        limit = "none" if resources.seconds is None else f"{format_seconds(resources.seconds)} an attempt"
        container = self.config.container
        inside = shlex.join([*container.prefix, container.python or sys.executable]) if container is not None else ""
        return (
            f"run directory: {self.run.path}\n"
            f"cluster:       {self.target.name} ({self.target.scheduler})\n"
            f"ranks:         {ranks}, {devices} and {resources.cpus_per_task} core(s) each{spares}\n"
            f"time limit:    {limit}" + (f"\ncontainer:     {inside}" if inside else "")
        )


def target(config: Config, *, local: bool, cluster: str | None) -> Target:
    """The place that --local and --cluster name; without them Slurm where sbatch is on PATH, else this machine."""
    name = "local" if local else cluster or ("slurm" if commands.is_available() else "local")
    if name not in config.clusters and name not in SCHEDULERS:
        names = [*dict.fromkeys([*config.clusters, *SCHEDULERS])]
        raise InputError(
            "no such entry under `clusters:`",
            key="--cluster",
            found=name,
            allowed=" or ".join(names),
            hint=nearest(name, names),
        )
    entry = config.clusters.get(name, {})
    scheduler = entry.get("scheduler", "local" if name == "local" else "slurm")
    if scheduler not in SCHEDULERS:
        raise InputError(key=f"clusters.{name}.scheduler", found=scheduler, allowed=" or ".join(SCHEDULERS))
    return Target(name, scheduler, entry)


def make_plan(loaded: Loaded, runs_dir: Path, target: Target) -> LaunchPlan:
    """The plan for a config. Raises InputError; Slurm is asked about the partition's limits where it is here."""
    config, is_slurm = loaded.config, target.scheduler == "slurm"
    for name, entry in config.clusters.items():
        if name != target.name:
            split(name, entry)  # a slip shows now, and not on the day that its cluster is used
    options = split(target.name, target.entry)
    values = dataclasses.asdict(config.resources) | options.resources
    resources = build(Resources, values, f"clusters.{target.name}.")
    if is_slurm and resources.min_nodes != ALL and int(resources.min_nodes) > resources.nodes:
        raise InputError(key="resources.min_nodes", found=resources.min_nodes, allowed=f"{ALL}, or at most nodes")
    partitions = _partitions(options) if is_slurm else []
    if is_slurm and resources.time == AUTO:
        resources = dataclasses.replace(resources, time=format_seconds(_auto_seconds(partitions)))
    container = container_of(config, options, target.name)
    config = dataclasses.replace(config, resources=resources, container=container)
    config = with_counts(config, target.scheduler, devices_asked(options, config.device))
    if is_slurm:
        _refuse_limits(config.resources, options, partitions, target.name)
    plan = LaunchPlan(
        run=RunDir(runs_dir / run_name(config)),
        loaded=dataclasses.replace(loaded, config=config),
        target=target,
        options=options,
        parameters=_parameters(config.resources, options) if is_slurm else {},
        notes=_words_of_down(partitions),
    )
    return plan.at(plan.run)


def container_of(config: Config, options: Options, cluster: str) -> ContainerConfig | None:
    """The container of the YAML, with the keys of a cluster's entry over it. Raises InputError."""
    if not options.container:
        return config.container if options.container is None else None
    values = {**(dataclasses.asdict(config.container) if config.container else {}), **options.container}
    return build(ContainerConfig, values, f"clusters.{cluster}.container.")


def devices_asked(options: Options, device: str) -> int | None:
    """The number of devices on each node that a cluster entry asks for by `gpus_per_node` or `gres`; else None."""
    if (value := options.of_sbatch("gpus_per_node")) is not None:
        return sum(_count(part) for part in str(value).split(","))
    parts = [part.strip() for part in str(options.of_sbatch("gres") or "").split(",")]
    counts = [_count(part) for part in parts if part.partition(":")[0] in ("gpu", device)]
    return sum(counts) if counts else None


def _count(text: str) -> int:
    """The number in `4`, `a100:4` or `gpu:a100:4`; 1 without a number."""
    last = text.strip().rpartition(":")[2]
    return int(last) if last.isdigit() else 1


def _partitions(options: Options) -> list[Partition]:
    """The partitions that the job may get; none where there is no Slurm, or where it does not answer."""
    if not commands.is_available():
        return []  # --dry-run shows the script on any machine
    try:
        return nodes.partitions(options.of_sbatch("partition"))
    except SchedulerError as error:
        if commands.is_away(error):  # else the submission meets the same error
            log.warning("%s; the limits of the partition are not looked at", error)
        return []


def _words_of_down(partitions: Sequence[Partition]) -> list[str]:
    """A line for the user where no partition of the job is up."""
    if not partitions or any(part.state == "UP" for part in partitions):
        return []
    return [f"partition {part.name} is {part.state}: the job waits until it is up" for part in partitions]


def _auto_seconds(partitions: Sequence[Partition]) -> float:
    """`time: auto`: an hour, or the limit of the partition if that is shorter."""
    limits = [math.inf if part.max_seconds is None else part.max_seconds for part in partitions]
    return min(AUTO_SECONDS, max(limits, default=AUTO_SECONDS))


def _refuse_limits(resources: Resources, options: Options, partitions: Sequence[Partition], cluster: str) -> None:
    """Raise InputError for a job that no partition of its list ever starts."""
    if options.of_sbatch("qos") is not None:
        return  # flags of a QOS may lift the limits of a partition
    cores = resources.ranks_per_node * resources.cpus_per_task
    memory = next((name for name in ("mem", "mem_per_cpu") if options.of_sbatch(name) is not None), "mem")
    megabytes = _megabytes(options.of_sbatch(memory))
    needs = nodes.Needs(
        nodes=resources.nodes + resources.spares,
        seconds=_minutes(resources) * 60,
        cpus=cores,
        megabytes=megabytes * cores if megabytes is not None and memory == "mem_per_cpu" else megabytes,
    )
    error = nodes.limits_refuse(partitions, needs)
    if error is None:
        return
    name = error.key.rpartition(".")[2]
    if name == "mem":
        name, error.found = memory, options.of_sbatch(memory)
    if name == memory or name in options.resources:
        error.key = f"clusters.{cluster}.{name}"
    raise error


def _megabytes(text: Any) -> float | None:
    """Megabytes of `4G`, `4GB`, `500M` or a bare number; None for another text. 0, all of a node's memory, is more than
    any limit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", str("" if text is None else text).upper())
    scale = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
    return float(match[1]) * scale[match[2]] or math.inf if match else None


def _minutes(resources: Resources) -> int:
    """The time limit in Slurm's own resolution."""
    return math.ceil((resources.seconds or AUTO_SECONDS) / 60)


def _parameters(resources: Resources, options: Options) -> dict[str, Any]:
    """Submitit's parameters of the batch script."""
    ours: dict[str, Any] = {
        "time": _minutes(resources),
        "nodes": resources.nodes + resources.spares,
        "ntasks_per_node": resources.ranks_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "wckey": None,  # Submitit's default is its own name; a cluster that checks keys would refuse that
    }
    if resources.devices_per_rank and not any(options.of_sbatch(name) for name in ("gpus_per_node", "gres")):
        # Of the node, not of the task: with one visible GPU a rank, NCCL cannot send from GPU to GPU directly.
        ours["gpus_per_node"] = resources.devices_per_rank * resources.ranks_per_node
    # --requeue: with JobRequeue=0 a preempted job would be gone. --no-kill: Slurm would end the job with a lost node.
    additional = {**options.additional, "requeue": True, "no_kill": True}
    return {**ours, **options.sbatch, "additional_parameters": additional}
