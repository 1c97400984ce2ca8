"""Submitit's view of the rank that this process is, on Slurm and on this machine (a Submitit plugin).

worker/forked.py --SUBMITIT_EXECUTOR=jobkit, JOBKIT_PROCID ...--> Submitit's process_job --> JobkitJobEnvironment
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import JobPaths

from jobkit.wire.signals import take_stop_signals


class _RunPaths(JobPaths):  # type: ignore[misc]
    """One pickle for all jobs of a run: a successor job, and a requeued one, run the same Worker."""

    @property
    def submitted_pickle(self) -> Path:
        return Path(self._folder) / "submitted.pkl"


class JobkitJobEnvironment(JobEnvironment):  # type: ignore[misc]
    """Chosen by SUBMITIT_EXECUTOR=jobkit. Signals only set a flag.

    Submitit's own handlers would requeue the job from inside a signal handler of rank 0, and ignore SIGTERM.
    """

    _env: ClassVar[dict[str, str]] = {
        "job_id": "JOBKIT_JOB_ID",
        "num_tasks": "JOBKIT_NTASKS",
        "num_nodes": "JOBKIT_NNODES",
        "node": "JOBKIT_NODEID",
        "global_rank": "JOBKIT_PROCID",
        "local_rank": "JOBKIT_LOCALID",
    }

    @classmethod
    def name(cls) -> str:
        return "jobkit"

    @property
    def paths(self) -> JobPaths:
        paths = super().paths
        return _RunPaths(paths._folder, paths.job_id, paths.task_id)

    def _handle_signals(self, paths: Any, submission: Any) -> None:
        take_stop_signals()
