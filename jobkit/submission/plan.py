"""LaunchPlan: everything that a submission will do, as a value. --dry-run prints it, submit carries it out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobkit.errors import InputError, InvalidValue, nearest
from jobkit.run import device_kinds, layout, secrets
from jobkit.run.config import ALL, Config, Resources
from jobkit.run.duration import format_seconds
from jobkit.run.strict import build
from jobkit.slurm import stop_margin
from jobkit.submission import devices, options

if TYPE_CHECKING:
    from jobkit.supervisor.device_leases import Leases

SCHEDULERS = ("slurm", "local")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How a local run waits for its turn on this machine."""

    queues: bool = False
    """Whether for CPU slots, too: for devices each run waits."""
    priority: int = 0
    """Among the runs of its user."""
    leases: Leases | None = None
    """What somebody has waited for on its behalf: it starts at once. A submission that starts it closes them."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One submission of one run: where, with what, and the script."""

    run: Path
    config: Config
    cluster: str
    """The name after --cluster, or `local`."""
    scheduler: str
    """`slurm` or `local`."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Submitit's parameters for the batch script; empty for local."""
    notes: Sequence[str] = ()
    """What a person should be told of it."""
    turn: Turn = field(default_factory=Turn)
    expected: Sequence[str] = ()
    """Names of runs that the same command is to make before this one."""
    is_held: bool = False
    """Whether its job is submitted as held: somebody has to continue a run that it comes after."""

    def at(self, run: Path) -> LaunchPlan:
        """The same plan for another run directory: which one it is, is decided last, under the submission's lock."""
        named = {"job_name": run.name} if self.scheduler == "slurm" else {}
        return dataclasses.replace(self, run=run, parameters={**self.parameters, **named})

    def masked(self) -> LaunchPlan:
        """The plan to print: values with secret names are masked in its parameters."""
        return dataclasses.replace(self, parameters=secrets.masked(self.parameters))

    def describe(self) -> str:
        resources = self.config.resources
        spares = f", {resources.spares} spare node(s)" if resources.spares and self.scheduler == "slurm" else ""
        ranks = f"{resources.nodes} node(s) x {resources.ranks_per_node} task(s) = {resources.world_size} rank(s)"
        unit = device_kinds.unit(self.config.device)
        own = f"{resources.devices_per_rank} {unit}(s)" if resources.devices_per_rank else "CPU"
        endless = self.scheduler == "local" and resources.time == "auto"
        limit = "none" if endless else f"{format_seconds(resources.seconds)} an attempt"
        return (
            f"run directory: {self.run}\ncluster:       {self.cluster} ({self.scheduler})\n"
            f"ranks:         {ranks}, {own} and {resources.cpus_per_task} core(s) each{spares}\n"
            f"time limit:    {limit}"
        )


def make_plan(run: Path, config: Config, cluster: str) -> LaunchPlan:
    """The plan for a config on `local`, `slurm`, or a name under `clusters:`. Raises InputError, InvalidValue."""
    entry = _entry(config, cluster)
    for name, other in config.clusters.items():  # a slip is told now, not on the day that its cluster is used
        _scheduler(name, other)
        options.split(name, other)
    scheduler = _scheduler(cluster, entry)
    overridden, parameters = options.split(cluster, entry)
    resources = build(Resources, dataclasses.asdict(config.resources) | overridden, f"clusters.{cluster}.")
    resources, notes = _fitted(config, resources, scheduler, cluster, overridden, parameters)
    config = dataclasses.replace(config, resources=resources)
    try:
        layout.check(config.parallel, config.comm, resources, config.precision)
    except ValueError as error:
        raise InvalidValue("comm" if str(error).startswith("comm.") else "parallel", str(error)) from None
    try:
        layout.check_verification(config)
    except ValueError as error:
        raise InvalidValue("verify_every", str(error)) from None
    if scheduler == "local":
        parameters = {}  # they are sbatch's
    else:
        if resources.min_nodes != ALL and int(resources.min_nodes) > resources.nodes:
            allowed = f"at most resources.nodes, {resources.nodes}"
            raise InvalidValue("resources.min_nodes", f"found {resources.min_nodes}, allowed: {allowed}, or {ALL}")
        parameters = _sbatch_parameters(resources, parameters, config.device)
    return LaunchPlan(
        run=run, config=config, cluster=cluster, scheduler=scheduler, parameters=parameters, notes=notes
    ).at(run)


def _fitted(
    config: Config,
    resources: Resources,
    scheduler: str,
    cluster: str,
    overridden: Mapping[str, Any],
    parameters: Mapping[str, Any],
) -> tuple[Resources, list[str]]:
    """The resources in numbers, and notes about them; `overridden` are those that the cluster's entry sets."""
    if resources.gpus_per_task == 0 and config.device not in (device_kinds.AUTO, device_kinds.CPU):
        raise InvalidValue("device", f"found {config.device!r}, but resources.gpus_per_task is 0: set it to 1")
    if scheduler == "slurm":
        return devices.fit_on_slurm(resources, parameters, cluster, config.device)

    def key_of(name: str) -> str:
        return f"clusters.{cluster}.{name}" if name in overridden else f"resources.{name}"

    return devices.fit_here(config, resources, key_of)


def _entry(config: Config, cluster: str) -> Mapping[str, Any]:
    if cluster in config.clusters:
        return config.clusters[cluster]
    if cluster in SCHEDULERS:
        return {}
    known = [*config.clusters, *SCHEDULERS]
    raise InputError(
        f"--cluster {cluster}: no such cluster{nearest(cluster, known)} (known: {', '.join(dict.fromkeys(known))}; "
        f"add it under `clusters:` in the YAML or in your own config file)"
    )


def _scheduler(cluster: str, entry: Mapping[str, Any]) -> str:
    found: str = entry.get("scheduler", cluster if cluster in SCHEDULERS else "slurm")
    if found not in SCHEDULERS:
        raise InvalidValue(f"clusters.{cluster}.scheduler", f"found {found!r}, allowed: {', '.join(SCHEDULERS)}")
    return found


def _sbatch_parameters(resources: Resources, parameters: Mapping[str, Any], device: str) -> dict[str, Any]:
    minutes = math.ceil(resources.seconds / 60)  # Slurm's own resolution
    ours: dict[str, Any] = {
        "time": minutes,
        "nodes": resources.nodes + resources.spares,
        "ntasks_per_node": resources.ranks_per_node,
        "cpus_per_task": resources.cpus_per_task,
        "signal_delay_s": round(stop_margin(minutes * 60)),
        "wckey": None,  # Submitit's default names itself; a cluster that checks keys would refuse it
    }
    if resources.devices_per_rank and devices.asked_for(parameters, device) is None:
        # Of the node, not of the task: its ranks see all of them, as NCCL needs to send from one to another directly.
        ours["gpus_per_node"] = resources.devices_per_rank * resources.ranks_per_node
    # sbatch's default may be not to requeue (JobRequeue=0): a preempted or node-lost job would be gone.
    # A node that is lost is replaced, or left out, within the job: without --no-kill Slurm would end all of it.
    additional = {"requeue": True, "no_kill": True, **parameters.get("additional_parameters", {})}
    return {**ours, **parameters, "additional_parameters": additional}
