"""The launcher that started this process (jobkit's agent, torchrun, mpirun, srun), and the place that it gives it.

    environment --find_launch--> Launch(launcher, Topology, rendezvous)

One row of LAUNCHERS for each launcher. A rank of jobkit's own agent has the variables of RANK_FAMILY.
foreign_attempt.py and script.py call it.
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
    """The place of a process in a world of ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables in which one launcher tells each process its place; None for a number that it does not give."""

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
    """Variables that tell one launch from the next."""

    def started_this(self, environ: Mapping[str, str]) -> bool:
        return all(environ.get(name) for name in (self.rank, self.world_size, self.only_with) if name is not None)

    def tasks(self, environ: Mapping[str, str]) -> int:
        """The number of tasks that it started by its own account; 1 if it says nothing."""
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
    # torch.distributed.launch is the same program.
    dataclasses.replace(RANK_FAMILY, name="torchrun", only_with="TORCHELASTIC_RUN_ID", launch=("TORCHELASTIC_RUN_ID",)),
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
        world_size="SLURM_STEP_NUM_TASKS",  # in an interactive step SLURM_NTASKS is the job's
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        only_with="SLURM_STEP_ID",  # a batch script without srun is one task, however many the job has
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
"""The innermost first: torchrun under srun, and mpirun in a Slurm job, started this process last."""

PLACE = ("local_rank", "local_world_size", "node", "nodes")
"""Fields of a Topology that a launcher may leave out."""

Rendezvous = Literal["alone", "env", "file", "group"]
"""`env`: at MASTER_ADDR and MASTER_PORT; `file`: through a file that rank 0 writes; `group`: the ranks have met."""


@dataclass(frozen=True)
class Launch:
    """This process's place in a launch, and how it finds the other ranks.

    launch = find_launch(os.environ)
    launch.launcher, launch.topology.rank      # ("torchrun", 3)
    """

    launcher: str
    topology: Topology
    rendezvous: Rendezvous
    key: str = ""
    """Names the launch, for the file."""


def find_launch(environ: Mapping[str, str], group: tuple[int, int] | None = None) -> Launch:
    """Return the place that `environ` gives this process.

    `group` is (rank, world size) of a process group that it is in already. Raises DistributedError where several tasks
    would each take itself for the only one, for values that are no numbers, and for ranks that cannot meet.
    """
    launcher = next((launcher for launcher in LAUNCHERS if launcher.started_this(environ)), None)
    if launcher is None and group is None and environ.get("PMIX_RANK"):
        raise DistributedError(
            f"PMIX_RANK={environ['PMIX_RANK']}: an MPI started this task, but its number of tasks, in "
            "OMPI_COMM_WORLD_SIZE or PMI_SIZE, did not reach it: each task would train alone in the same run directory"
        )
    fields = _fields_of(launcher, environ)
    if group is not None and group != (fields.get("rank", 0), fields.get("world_size", 1)):
        fields = {"rank": group[0], "world_size": group[1]}
    topology = _complete(fields)
    name = launcher.name if launcher is not None else "python"
    _check_one_world(topology, name, environ)
    rendezvous: Rendezvous = "file"
    if group is not None:
        rendezvous = "group"
    elif topology.world_size == 1:
        rendezvous = "alone"
    elif environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        rendezvous = "env"
    variables = launcher.launch if launcher is not None else ()
    words = [environ[variable] for variable in variables if environ.get(variable)]
    if rendezvous == "file" and not words:  # the name of the file would be that of a launch that was killed
        raise DistributedError(
            f"rank {topology.rank} of {topology.world_size} by {name}, which does not say where the ranks meet: set "
            "MASTER_ADDR and MASTER_PORT, alike for all ranks, or start them by torchrun"
        )
    return Launch(name, topology, rendezvous, re.sub(r"[^\w.]+", "-", "-".join([name, *words])))


def _fields_of(launcher: Launcher | None, environ: Mapping[str, str]) -> dict[str, int]:
    """The fields of a Topology that the launcher's variables give."""
    if launcher is None:
        return {}
    node = _number(environ, launcher.node) or 0
    values = {field: _number(environ, getattr(launcher, field), node) for field in ("rank", "world_size", *PLACE)}
    fields = {field: value for field, value in values.items() if value is not None}
    if fields.get("nodes", 0) and fields["world_size"] % fields["nodes"] == 0:
        fields.setdefault("local_world_size", fields["world_size"] // fields["nodes"])
    if fields["rank"] >= fields["world_size"]:
        raise DistributedError(
            f"{launcher.rank}={fields['rank']} with {launcher.world_size}={fields['world_size']}: there is no such rank"
        )
    return fields


def _number(environ: Mapping[str, str], name: str | None, node: int = 0) -> int | None:
    """A variable's value; None if it is not set. Slurm lists a number for each node, as in `2(x3),1`."""
    text = environ.get(name) if name is not None else None
    if not text:
        return None
    runs = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    values = [int(run[1]) for run in runs if run is not None for _ in range(int(run[2] or 1))]
    if None in runs or not values:
        raise DistributedError(f"{name}={text!r} is not a number: what has set it?")
    return values[min(node, len(values) - 1)]


def _complete(fields: dict[str, int]) -> Topology:
    """A Topology in which the unknown fields are guessed: as if the ranks filled one node after the other."""
    place: dict[str, Any] = {"rank": 0, "world_size": 1} | fields
    per_node = max(1, place.setdefault("local_world_size", place["world_size"]))
    place.setdefault("local_rank", place["rank"] % per_node)
    place.setdefault("node", place["rank"] // per_node)
    place.setdefault("nodes", -(-place["world_size"] // per_node))
    return Topology(**place)


def _check_one_world(topology: Topology, name: str, environ: Mapping[str, str]) -> None:
    """Raise DistributedError if somebody started more tasks than this one knows of."""
    for other in LAUNCHERS:
        counted = topology.world_size
        if name == "torchrun" and other.world_size != "WORLD_SIZE":  # one torchrun a task, each with its own ranks
            counted = _number(environ, "GROUP_WORLD_SIZE") or counted
        if other.tasks(environ) > counted:
            raise DistributedError(
                f"{other.world_size}={environ[other.world_size]}: several tasks were started, but by {name} this one "
                f"is rank {topology.rank} of {topology.world_size}: each task would train alone in the same run "
                f"directory. Start one task, let one launcher count them, or unset {other.world_size}."
            )
