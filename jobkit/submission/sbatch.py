"""Submitit's SlurmExecutor with jobkit's batch script, submitted once."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from submitit.core.utils import DelayedSubmission
from submitit.slurm import slurm as submitit_slurm

from jobkit import slurm, start
from jobkit.errors import EXIT_RESUMABLE, SchedulerError, SchedulerTimeout
from jobkit.log import log
from jobkit.run import secrets
from jobkit.run.files import FOR_ALL, FOR_OWNER, write_atomic
from jobkit.run.rundir import RunDir
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.signals import hand_over, take_back
from jobkit.supervisor.slurm_job import BLIND_RESTARTS, EXIT_DECIDED, EXIT_START_AGAIN
from jobkit.worker.main import Worker

T = TypeVar("T")

RETRY_SECONDS = (2, 4, 8, 16, 30)
"""Pauses between attempts to reach a controller that is away: one that is restarted is back within a minute."""

JOB_SCRIPT = Path(__file__).with_name("job.sh")
"""The shell part of every batch script."""


class SlurmExecutor(submitit_slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits one LaunchPlan. The script can be made, and shown, where there is no Slurm."""

    def __init__(self, plan: LaunchPlan, pass_fds: Sequence[int] = ()) -> None:
        self.plan, self.run, self.pass_fds = plan, RunDir(plan.run), pass_fds
        super().__init__(self.run.submitit)
        self.update_parameters(**plan.parameters)

    @classmethod
    def affinity(cls) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        ours = {"setup": _definitions(self.plan), "teardown": None, "srun_args": None, "use_srun": False}
        text: str = submitit_slurm._make_sbatch_string(
            command=JOB_SCRIPT.read_text(), folder=self.folder, **{**self.parameters, **ours}
        )
        if self.plan.config.command:  # its supervisor gives the notice, to what catches it (supervisor/time_limit.py)
            text = re.sub(r"^#SBATCH --signal=.*\n", "", text, flags=re.MULTILINE)
        return text

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit_slurm.SlurmJob[Any]]:
        # Submitit would name the pickle after the job, once sbatch has answered: a controller that is away may queue
        # the job without an answer. Under names of their own pickle and script are there before the job is.
        (delayed,) = delayed_submissions
        delayed.dump(self.run.submitted_pickle)
        mode = FOR_OWNER if secrets.hidden_in(self.plan.parameters) else FOR_ALL
        write_atomic(self.run.batch_script, self._make_submission_file_text("", ""), mode=mode)
        job_id = _sbatch(self.run, self.pass_fds)
        return [submitit_slurm.SlurmJob(folder=self.folder, job_id=job_id, tasks=list(range(self._num_tasks())))]


def _definitions(plan: LaunchPlan) -> list[str]:
    """What job.sh takes for given, in the shell's words."""
    run, parameters = RunDir(plan.run), plan.parameters
    values = {
        "python": sys.executable,
        "start": start.FILE,
        "run": str(run.path),
        "failed_starts": str(run.failed_starts),
        "blind_restarts": str(BLIND_RESTARTS),
        "resumable": str(EXIT_RESUMABLE),
        "failed": str(EXIT_DECIDED),
        "start_again": str(EXIT_START_AGAIN),
        "setup": "\n".join(parameters.get("setup") or []),
        "teardown": "\n".join(parameters.get("teardown") or []),
    }
    variables = [f"jobkit_{name}={shlex.quote(value)}" for name, value in values.items()]
    return [*variables, f"jobkit_srun_args=({shlex.join(parameters.get('srun_args') or [])})"]


def _sbatch(run: RunDir, pass_fds: Sequence[int]) -> str:
    """The id of the new job of a run's script, submitted once."""

    def submit() -> str:
        hand_over()
        try:
            return slurm.submit(str(run.batch_script), pass_fds=pass_fds)
        except SchedulerTimeout as error:
            return _adopt(run, error)
        except SchedulerError:
            take_back()
            raise

    return patiently(submit, is_question=False)


def patiently(ask: Callable[[], T], *, is_question: bool = True) -> T:
    """What `ask` returns, which asks Slurm something: a controller that is away for a minute is waited for.

    What is no mere question is not repeated where it got no answer: it may have been done.
    """
    for pause in (*RETRY_SECONDS, None):
        try:
            return ask()
        except SchedulerError as error:
            unknown = isinstance(error, SchedulerTimeout) and not is_question
            if pause is None or unknown or not slurm.is_away(error):
                raise
            if pause == RETRY_SECONDS[0]:
                log.warning("%s; trying again for a minute or two, Ctrl-C ends it", error)
            time.sleep(pause)
    raise AssertionError("unreachable")


def _adopt(run: RunDir, error: SchedulerTimeout) -> str:
    """The job that an sbatch without an answer may have queued: no other run has its script."""
    for pause in RETRY_SECONDS:
        # A slurmctld that was too busy to answer works its requests off later: the job may appear in a while.
        with contextlib.suppress(SchedulerError):
            if found := slurm.jobs_with(run.batch_script):
                return found[0]
        time.sleep(pause)
    raise SchedulerTimeout(
        f"{error}; no job of {run.path} is in the queue; the same command looks for it again before it submits another"
    )


def script(plan: LaunchPlan) -> str:
    """The batch script of a plan, as sbatch will get it."""
    return SlurmExecutor(plan)._make_submission_file_text("", "")


def submit(plan: LaunchPlan, pass_fds: Sequence[int] = ()) -> str:
    """Submit a plan and return the job's id; raises SchedulerError when Slurm does not take it.

    sbatch gets the files `pass_fds` of this process.
    """
    return str(SlurmExecutor(plan, pass_fds).submit(Worker(str(plan.run))).job_id)
