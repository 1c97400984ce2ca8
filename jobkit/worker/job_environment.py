"""Submitit's view of the rank this process is, under Slurm and on this machine (a Submitit plugin)."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from submitit.core.job_environment import JobEnvironment
from submitit.core.logger import get_logger

from jobkit.worker.stop import STOP_SIGNALS, follow_parent

if os.environ.get("SUBMITIT_EXECUTOR") == "jobkit":
    get_logger().setLevel("WARNING")  # a rank's log is for what the user's code prints
    # Before each traceback, which says it all.
    get_logger().addFilter(lambda record: record.getMessage() != "Submitted job triggered an exception")

_VARIABLES = {
    "job_id": "JOBKIT_JOB_ID",
    "num_tasks": "JOBKIT_NTASKS",
    "num_nodes": "JOBKIT_NNODES",
    "node": "JOBKIT_NODEID",
    "global_rank": "JOBKIT_PROCID",
    "local_rank": "JOBKIT_LOCALID",
}


class JobkitJobEnvironment(JobEnvironment):  # type: ignore[misc]
    """Chosen by SUBMITIT_EXECUTOR=jobkit. It differs from Submitit's own in one thing: signals only set a flag.

    Submitit's handlers would requeue the job from inside a signal handler of rank 0, and ignore SIGTERM.
    """

    _env: ClassVar[dict[str, str]] = _VARIABLES

    @classmethod
    def name(cls) -> str:
        return "jobkit"

    def _handle_signals(self, paths: Any, submission: Any) -> None:
        STOP_SIGNALS.install()
        follow_parent()
