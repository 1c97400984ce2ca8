"""A real Slurm of several nodes on this machine, in one directory, for trials and tests; no root needed.

Each node is a slurmd of its own on this host. Jobs go to partition `low`; a job in `high` takes nodes away from them.

    eval "$(python tools/slurmbox up)"    # sbatch, squeue, scancel ... now talk to it
    python tools/slurmbox down

    with slurmbox.Cluster("/tmp/box", nodes=2) as cluster:
        print(cluster.command("sinfo"))

Tests use the fixtures of `slurmbox.pytest_plugin`.
"""

from .cluster import Cluster, MissingPackages
from .config import Settings
from .processes import ClusterError, Process, wait_until

__all__ = ["Cluster", "ClusterError", "MissingPackages", "Process", "Settings", "wait_until"]
