"""The place of a process by the variables of its launcher."""

from __future__ import annotations

import pytest

from jobkit.errors import DistributedError
from jobkit.worker.launchers import Launch, Topology, find_launch

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "r1",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-1@1",
}

LAUNCHES: dict[str, tuple[dict[str, str], Launch]] = {
    "nobody": ({}, Launch("python", Topology(), "alone", "python")),
    "srun": (SRUN, Launch("srun", Topology(5, 8, 1, 4, 1, 2), "file", "srun-7-0")),
    "srun, uneven nodes": (
        {**SRUN, "SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "4,1"},
        Launch("srun", Topology(4, 5, 1, 1, 1, 2), "file", "srun-7-0"),
    ),
    "torchrun": (TORCHRUN, Launch("torchrun", Topology(3, 4, 1, 2, 1, 2), "env", "torchrun-r1")),
    "torchrun in a task of srun": (
        {**SRUN, **TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
        Launch("torchrun", Topology(3, 4, 1, 2, 1, 2), "env", "torchrun-r1"),
    ),
    "mpirun": (OPEN_MPI, Launch("mpirun", Topology(2, 4, 0, 2, 1, 2), "file", "mpirun-prterun-1-1")),
    "a batch script": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        Launch("python", Topology(), "alone", "python"),
    ),
    "variables by hand": (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"},
        Launch("RANK and WORLD_SIZE", Topology(1, 2, 1, 2, 0, 1), "env", "RANK-and-WORLD_SIZE"),
    ),
}


@pytest.mark.parametrize(("environ", "launch"), LAUNCHES.values(), ids=LAUNCHES)
def test_the_place_of_a_process(environ: dict[str, str], launch: Launch) -> None:
    assert find_launch(environ) == launch


REFUSED = {
    "a rank beyond the world": {"RANK": "4", "WORLD_SIZE": "4"},
    "variables by hand without an address": {"RANK": "1", "WORLD_SIZE": "2"},
    "no number": {"RANK": "a", "WORLD_SIZE": "4"},
    "several tasks, each a world of its own": {**SRUN, "RANK": "0", "WORLD_SIZE": "1"},
    "an MPI that does not say how many": {"PMIX_RANK": "1"},
}


@pytest.mark.parametrize("environ", REFUSED.values(), ids=REFUSED)
def test_tasks_that_would_train_apart_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(DistributedError):
        find_launch(environ)


def test_a_process_group_that_exists_decides() -> None:
    launch = find_launch({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, group=(1, 4))
    assert (launch.topology.rank, launch.topology.world_size, launch.rendezvous) == (1, 4, "group")
