"""Submitit's SlurmExecutor with jobkit's batch script: an attempt begins and ends around srun, without torch."""

from __future__ import annotations

import os
from typing import Any

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

    def _submit_command(self, command: str) -> submitit_slurm.SlurmJob[Any]:
        # Submitit's own would print sbatch's complaint beside ours, and wait for a mute controller without a limit.
        temporary = self.folder / f".{os.getpid()}.sh"
        temporary.write_text(self._make_submission_file_text(command, ""))
        try:
            answer = slurm.command("sbatch", "--parsable", str(temporary))
        except SchedulerError:
            temporary.unlink(missing_ok=True)
            raise
        job_id = answer.strip().split(";")[0]  # `id` or `id;cluster`
        job = submitit_slurm.SlurmJob(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))
        job.paths.move_temporary_file(temporary, "submission_file")
        return job


def script(plan: LaunchPlan) -> str:
    """The batch script of a plan, as sbatch will get it."""
    return SlurmExecutor(plan)._make_submission_file_text("", "")


def submit(plan: LaunchPlan) -> str:
    """Submit a plan and return the job's id; raises SchedulerError when Slurm does not take it."""
    return str(SlurmExecutor(plan).submit(Worker(str(plan.run))).job_id)
