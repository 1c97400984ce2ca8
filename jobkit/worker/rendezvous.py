"""The port at which rank 0 will listen, and the environment in which each rank finds its place.

    agent: Reservation() --Ready(port)--> supervisor --StartRanks(master_port)--> agents --environment--> ranks

Here are ports and variables only; torch's process group is formed by the rank. agent.py calls it, and
foreign_attempt.py for a launcher's ranks.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping

from jobkit.config.schema import Resources
from jobkit.errors import DistributedError
from jobkit.run.rundir import RunDir
from jobkit.wire.messages import RankPlace, StartRanks

PORTS = range(20000, 32768)
"""Below the range from which systems take ports for outgoing connections: such a one could take it at any moment."""

OF_OTHER_LAUNCHERS = ("PMI_", "PMIX_", "SLURM_STEP_NODELIST", "SLURM_TASK_PID")
"""Variables of the agent's srun that say nothing true about a rank."""


class Reservation:
    """A port that this agent keeps free for a program which is to listen there.

    The socket is bound and does not listen: Linux lets another socket with SO_REUSEADDR, as that of torch's store, bind
    the same port. Another agent's reservation fails, since it binds without that option first.
    """

    def __init__(self) -> None:
        for port in random.SystemRandom().sample(PORTS, 200):
            self._socket = socket.socket()
            try:
                self._socket.bind(("", port))
            except OSError:  # in use
                self._socket.close()
                continue
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.port = port
            return
        raise DistributedError(f"no free port between {PORTS.start} and {PORTS.stop - 1} on {socket.gethostname()}")

    def close(self) -> None:
        self._socket.close()


def environment_of(
    place: RankPlace, start: StartRanks, run: RunDir, resources: Resources, before: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a rank; `before` is its agent's, which is one task of srun on its node."""
    kept = {name: value for name, value in before.items() if not name.startswith(OF_OTHER_LAUNCHERS)}
    return {
        **kept,
        **(_slurm(place, start, resources) if "SLURM_JOB_ID" in before else {}),
        "RANK": str(place.rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "GROUP_RANK": str(place.node),
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "JOBKIT_RUN": str(run.path),
        "JOBKIT_ATTEMPT": str(start.attempt),
        # For Submitit's view of a rank: worker/job_environment.py.
        "SUBMITIT_EXECUTOR": "jobkit",
        "JOBKIT_PROCID": str(place.rank),
        "JOBKIT_LOCALID": str(place.local_rank),
        "JOBKIT_NODEID": str(place.node),
        "JOBKIT_NTASKS": str(start.world_size),
        "JOBKIT_NNODES": str(start.nodes),
    }


def _slurm(place: RankPlace, start: StartRanks, resources: Resources) -> dict[str, str]:
    """The variables that srun would give a task for each rank. Libraries read them too, as mpi4py and Lightning."""
    world, on_node = str(start.world_size), str(place.local_world_size)
    per_node = f"{on_node}(x{start.nodes})" if start.nodes > 1 else on_node
    first = place.node * place.local_world_size
    return {
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node),
        "SLURM_NTASKS": world,
        "SLURM_NPROCS": world,
        "SLURM_NNODES": str(start.nodes),
        "SLURM_STEP_NUM_TASKS": world,
        "SLURM_STEP_NUM_NODES": str(start.nodes),
        "SLURM_NTASKS_PER_NODE": on_node,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_CPUS_PER_TASK": str(resources.cpus_per_task),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + place.local_world_size))),
    }
