"""Which launcher started this process (jobkit's own parents fork their ranks), and what it says.

One row of environment variables for each launcher.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jobkit.errors import DistributedError


@dataclass(frozen=True)
class Topology:
    """Which rank of which world this process is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1

    def check(self, per_node: int, least: int, most: int) -> None:
        """Raise DistributedError where there are other ranks than `per_node` on each of `least` to `most` nodes."""
        if self.world_size != self.nodes * per_node or not least <= self.nodes <= most:
            raise DistributedError(
                f"this task was started as rank {self.rank} of {self.world_size}, but the run has resources for "
                f"{most * per_node} rank(s): the tasks would train apart from each other. Check resources.nodes, "
                "resources.tasks_per_node and the cluster's own options."
            )

    def environment(self, address: str, port: int) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }


def topology_of(environment: Any) -> Topology:
    """The Topology that a Submitit JobEnvironment describes; nodes have equally many tasks."""
    nodes = environment.num_nodes
    return Topology(
        rank=environment.global_rank,
        world_size=environment.num_tasks,
        local_rank=environment.local_rank,
        local_world_size=max(1, environment.num_tasks // nodes),
        node=environment.node,
        nodes=nodes,
    )


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables in which one launcher tells each process its place; None for what it does not tell."""

    name: str
    rank: str
    world_size: str
    local_rank: str | None = None
    local_world_size: str | None = None
    node: str | None = None
    nodes: str | None = None
    only_with: str | None = None
    """A variable without which the others do not mean this process."""
    launch: tuple[str, ...] = ()
    """What tells one launch from the next."""

    def started_this(self, environ: Mapping[str, str]) -> bool:
        return all(environ.get(name) for name in (self.rank, self.world_size, self.only_with) if name is not None)

    def tasks(self, environ: Mapping[str, str]) -> int:
        """How many tasks it says that it started; 1 where it says nothing."""
        if self.only_with is not None and not environ.get(self.only_with):
            return 1
        return _number(environ, self.world_size) or 1


RANK_FAMILY = Launcher(
    name="RANK and WORLD_SIZE",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node="GROUP_RANK",
    nodes="GROUP_WORLD_SIZE",
)

LAUNCHERS = (
    dataclasses.replace(  # and torch.distributed.launch, which is the same program
        RANK_FAMILY, name="torchrun", only_with="TORCHELASTIC_RUN_ID", launch=("TORCHELASTIC_RUN_ID",)
    ),
    RANK_FAMILY,
    Launcher(
        name="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        launch=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Launcher(
        name="Submitit's LocalExecutor",
        rank="SUBMITIT_LOCAL_GLOBALID",
        world_size="SUBMITIT_LOCAL_NTASKS",
        local_rank="SUBMITIT_LOCAL_LOCALID",
        node="SUBMITIT_LOCAL_NODEID",
        nodes="SUBMITIT_LOCAL_JOB_NUM_NODES",
        launch=("SUBMITIT_LOCAL_JOB_ID",),
    ),
    Launcher(
        name="srun",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",  # of an interactive step SLURM_NTASKS is the job's
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        only_with="SLURM_STEP_ID",  # a batch script without srun is one task, however many the job may have
        launch=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    Launcher(
        name="an MPI with PMI",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        launch=("PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
"""Innermost first: torchrun under srun, and mpirun in a Slurm job, are what they were started by last."""

PLACE = ("local_rank", "local_world_size", "node", "nodes")
"""Fields of a Topology that a launcher may leave out."""


@dataclass(frozen=True)
class Launch:
    """This process's place in a launch, and how it finds the others."""

    launcher: str
    topology: Topology
    rendezvous: Literal["alone", "env", "file", "group"]
    """`env`: at MASTER_ADDR and MASTER_PORT; `file`: through a file that rank 0 writes; `group`: they have met."""
    key: str = ""
    """Names the launch, for the file."""
    guessed: tuple[str, ...] = ()
    """Fields of `topology` that no variable gives: the hosts' names will, once the ranks know them."""


def find_topology(environ: Mapping[str, str], group: tuple[int, int] | None = None) -> Launch:
    """What `environ` says about this process; `group` is (rank, world size) of a process group that it is in already.

    Raises DistributedError for several tasks each of which would take itself for the only one, and for values that
    are none.
    """
    launcher = next((one for one in LAUNCHERS if one.started_this(environ)), None)
    if launcher is None and group is None and environ.get("PMIX_RANK"):
        raise DistributedError(
            f"PMIX_RANK={environ['PMIX_RANK']}: an MPI started this task, but OMPI_COMM_WORLD_SIZE and PMI_SIZE, which "
            "say how many there are, did not reach it: each would train alone in the same run directory"
        )
    given = _given(launcher, environ)
    if group is not None and group != (given.get("rank", 0), given.get("world_size", 1)):
        given = {"rank": group[0], "world_size": group[1]}
    topology = _complete(given)
    name = launcher.name if launcher is not None else "python"
    _check_one_world(topology, name, environ)
    rendezvous: Literal["alone", "env", "file", "group"] = "file"
    if group is not None:
        rendezvous = "group"
    elif topology.world_size == 1:
        rendezvous = "alone"
    elif environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        rendezvous = "env"
    key = "-".join([name, *(environ[one] for one in (launcher.launch if launcher else ()) if environ.get(one))])
    guessed = tuple(field for field in PLACE if field not in given) if topology.world_size > 1 else ()
    return Launch(name, topology, rendezvous, re.sub(r"[^\w.]+", "-", key), guessed)


def _given(launcher: Launcher | None, environ: Mapping[str, str]) -> dict[str, int]:
    if launcher is None:
        return {}
    node = _number(environ, launcher.node) or 0
    values = {field: _number(environ, getattr(launcher, field), node) for field in ("rank", "world_size", *PLACE)}
    found = {field: value for field, value in values.items() if value is not None}
    if found.get("nodes", 0) and found["world_size"] % found["nodes"] == 0:
        found.setdefault("local_world_size", found["world_size"] // found["nodes"])
    if found["rank"] >= found["world_size"]:
        raise DistributedError(
            f"{launcher.rank}={found['rank']} with {launcher.world_size}={found['world_size']}: there is no such rank"
        )
    return found


def _number(environ: Mapping[str, str], name: str | None, node: int = 0) -> int | None:
    """A variable's value; None where it is not set. Slurm lists one number for each node, as in `2(x3),1`."""
    text = environ.get(name) if name is not None else None
    if not text:
        return None
    runs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    values = [int(run[1]) for run in runs if run is not None for _ in range(int(run[2] or 1))]
    if None in runs or not values:
        raise DistributedError(f"{name}={text!r} is not a number: what has set it?")
    return values[min(node, len(values) - 1)]


def _complete(given: dict[str, int]) -> Topology:
    """A Topology with what is not known guessed: as if the ranks filled one node after the other."""
    place: dict[str, Any] = {"rank": 0, "world_size": 1} | given
    per_node = max(1, place.setdefault("local_world_size", place["world_size"]))
    place.setdefault("local_rank", place["rank"] % per_node)
    place.setdefault("node", place["rank"] // per_node)
    place.setdefault("nodes", -(-place["world_size"] // per_node))
    return Topology(**place)


def _check_one_world(topology: Topology, name: str, environ: Mapping[str, str]) -> None:
    """Raise DistributedError where somebody started more tasks than this one knows of."""
    for other in LAUNCHERS:
        known = topology.world_size
        if name == "torchrun" and other.world_size != "WORLD_SIZE":  # one agent a task, each with its own ranks
            known = _number(environ, "GROUP_WORLD_SIZE") or known
        if other.tasks(environ) > known:
            raise DistributedError(
                f"{other.world_size}={environ[other.world_size]}: several tasks were started, but this one is told "
                f"({name}) that it is rank {topology.rank} of {topology.world_size}, so each would train alone in the "
                f"same run directory. Start one task, let one launcher count them, or unset {other.world_size}."
            )
