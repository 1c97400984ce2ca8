"""Submitit's SlurmExecutor with jobkit's batch script: an attempt begins and ends around srun, without torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

from submitit.core import utils
from submitit.slurm import slurm as submitit_slurm

from jobkit.errors import SchedulerError
from jobkit.launch.plan import LaunchPlan, batch_lines
from jobkit.run.rundir import RunDir
from jobkit.runtime.worker import Worker
from jobkit.scheduler import slurm


class SlurmExecutor(submitit_slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits one LaunchPlan. The script can be made, and shown, where there is no Slurm."""

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__(RunDir(plan.run).submitit)
        self.plan = plan
        self.update_parameters(**plan.parameters)

    @classmethod
    def affinity(cls) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        setup, srun, teardown = batch_lines(self.plan)
        ours = {"setup": setup, "teardown": teardown, "srun_args": None, "use_srun": False}
        text: str = submitit_slurm._make_sbatch_string(command=srun, folder=self.folder, **{**self.parameters, **ours})
        return text

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", str(submission_file_path)]


def script(plan: LaunchPlan) -> str:
    """The batch script of a plan, as sbatch will get it."""
    return SlurmExecutor(plan)._make_submission_file_text("", "")


def submit(plan: LaunchPlan) -> str:
    """Submit a plan and return the job's id; raises SchedulerError when Slurm does not take it."""
    if not slurm.available():
        raise SchedulerError("sbatch is not on PATH: run this on a login node of a cluster, or use --local")
    try:
        job = SlurmExecutor(plan).submit(Worker(str(plan.run)))
    except utils.FailedJobError as error:
        raise SchedulerError(slurm.explain("sbatch", str(error))) from None
    except (subprocess.SubprocessError, utils.FailedSubmissionError) as error:
        raise SchedulerError(slurm.explain("sbatch", str(error))) from None
    return str(job.job_id)
