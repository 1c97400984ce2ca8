"""Submitit's SlurmExecutor with jobkit's batch script: an attempt begins and ends around srun, without torch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils as submitit_core
from submitit.slurm import slurm as submitit_slurm

from jobkit import slurm
from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.run.files import write_atomic
from jobkit.run.rundir import RunDir
from jobkit.submission.plan import LaunchPlan, batch_lines
from jobkit.worker.main import Worker

RETRY_SECONDS = (2, 4, 8, 16, 30)
"""Pauses between attempts to reach a controller that is away."""


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
            job_id = _sbatch(RunDir(self.plan.run).name, str(temporary))
        except SchedulerError:
            temporary.unlink(missing_ok=True)
            raise
        job = submitit_slurm.SlurmJob(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))
        job.paths.move_temporary_file(temporary, "submission_file")
        return job


def complete_submission(run: RunDir, job_id: str) -> None:
    """Make what Submitit keeps of a job where the submission ended before sbatch's answer came."""
    paths = submitit_core.JobPaths(run.submitit, job_id)
    if not Path(paths.submitted_pickle).exists():
        submitit_core.DelayedSubmission(Worker(str(run.path))).dump(paths.submitted_pickle)
    if not Path(paths.submission_file).exists():
        with contextlib.suppress(SchedulerError):  # needed for a successor only
            slurm.command("scontrol", "write", "batch_script", job_id, str(paths.submission_file))


def _sbatch(name: str, script: str) -> str:
    """The id of a script's new job, submitted once: a controller that is away for a minute is waited for."""
    for pause in (*RETRY_SECONDS, None):
        try:
            return _job_id(slurm.command("sbatch", "--parsable", script))
        except SchedulerTimeout:
            return _adopt(name)
        except SchedulerError as error:
            if pause is None or not slurm.is_away(error):
                raise
            print(f"{error}; trying again in {pause} s", file=sys.stderr, flush=True)
            time.sleep(pause)
    raise AssertionError("unreachable")


def _adopt(name: str) -> str:
    """The job that an sbatch without an answer may have queued: its run's name is its own. Raises SchedulerTimeout."""
    for pause in RETRY_SECONDS:
        with contextlib.suppress(SchedulerError):
            if found := slurm.jobs_named(name):
                return found[0]
        time.sleep(pause)
    raise SchedulerTimeout(
        f"sbatch gave no answer, and no job {name} is in the queue; the same command looks for it again before it "
        "submits another"
    )


def _job_id(answer: str) -> str:
    return answer.strip().split(";")[0]  # `id` or `id;cluster`


def resubmit(run: RunDir, job_id: str, exclude: Sequence[str]) -> str:
    """Submit the script of a job anew, to start when that has ended; returns the new job's id.

    Raises SchedulerError when Slurm does not take it.
    """
    paths = submitit_core.JobPaths(run.submitit, job_id)
    options = ["--parsable", f"--dependency=afterany:{job_id}"]
    options += [f"--exclude={','.join(exclude)}"] if exclude else []
    # sbatch reads a job's own variables as its options.
    foreign = ("SLURM_", "SBATCH_", "SRUN_", "JOBKIT_", "SUBMITIT_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign) or name == "SLURM_CONF"}
    answer = slurm.command("sbatch", *options, str(paths.submission_file), environment=kept)
    successor = _job_id(answer)
    new = submitit_core.JobPaths(run.submitit, successor)
    for old_file, new_file in [
        (paths.submitted_pickle, new.submitted_pickle),
        (paths.submission_file, new.submission_file),
    ]:
        write_atomic(Path(new_file), Path(old_file).read_bytes())
    return successor


def script(plan: LaunchPlan) -> str:
    """The batch script of a plan, as sbatch will get it."""
    return SlurmExecutor(plan)._make_submission_file_text("", "")


def submit(plan: LaunchPlan) -> str:
    """Submit a plan and return the job's id; raises SchedulerError when Slurm does not take it."""
    return str(SlurmExecutor(plan).submit(Worker(str(plan.run))).job_id)
