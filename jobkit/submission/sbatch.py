"""Submitit's SlurmExecutor with jobkit's batch script, submitted exactly once.

    LaunchPlan -> script: header (Submitit) + definitions (bash variables) + job.sh -> sbatch --comment=TOKEN -> job id

transaction.py and sweep.py call this; the values of the header come from plan.py and options.py. A job belongs to a run
when its comment has the run's token, which is journalled before sbatch is called.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from submitit.core.utils import DelayedSubmission
from submitit.slurm import slurm as submitit_slurm

from jobkit import start
from jobkit.config.machine import clean_environment
from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.log import log
from jobkit.run.files import FOR_OWNER, write_atomic
from jobkit.run.rundir import RunDir
from jobkit.slurm import commands, jobs
from jobkit.submission.plan import LaunchPlan
from jobkit.worker.main import Worker

T = TypeVar("T")

PATIENCE_SECONDS = 60.0
"""How long a controller that is away is waited for: one that is restarted is back within a minute."""

PAUSE_SECONDS = 3.0

JOB_SCRIPT = Path(__file__).with_name("job.sh")
"""The shell part of every batch script, here and on Slurm."""


class SlurmExecutor(submitit_slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits one LaunchPlan. The script can be made, and shown, where there is no Slurm.

    SlurmExecutor(plan).script()                                   # --dry-run
    SlurmExecutor(plan, token, lock.inheritable()).submit(Worker(str(plan.run.path)))
    """

    def __init__(self, plan: LaunchPlan, token: str = "", pass_fds: Sequence[int] = ()) -> None:
        self.plan, self.token, self.pass_fds = plan, token, pass_fds
        super().__init__(plan.run.submitit)
        self.update_parameters(**plan.parameters)

    @classmethod
    def affinity(cls) -> int:
        return 1  # Submitit's own is negative without srun: the script is shown on any machine

    def script(self, tasks: Mapping[int, RunDir] | None = None, max_running: int | None = None) -> str:
        """The batch script, as sbatch gets it; with `tasks` that of a job array, of which `max_running` run at once."""
        run = self.plan.run
        additional = {**self.parameters.get("additional_parameters", {}), "output": str(run.job_log)}
        if tasks is not None:  # job.sh knows the log of a task, and Slurm cannot
            array = ("-".join(map(str, sorted({min(tasks), max(tasks)})))) + (f"%{max_running}" if max_running else "")
            additional |= {"output": "/dev/null", "array": array}
        ours = {"additional_parameters": additional, "stderr_to_stdout": True, "use_srun": False}
        text: str = submitit_slurm._make_sbatch_string(
            command=JOB_SCRIPT.read_text(encoding="utf-8"),
            folder=run.submitit,
            **{**self.parameters, **ours, "setup": definitions(self.plan, tasks)},
        )
        # Slurm may send the signal 60 s early, at the birth of a job of one minute. The supervisor watches the clock.
        return re.sub(r"^#SBATCH --signal=.*\n", "", text, flags=re.MULTILINE)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit_slurm.SlurmJob[Any]]:
        # Submitit names the pickle after the job, once sbatch has answered: by then the job may be running.
        run = self.plan.run
        delayed_submissions[0].dump(run.pickle_file)
        write_atomic(run.batch_script, self.script(), mode=FOR_OWNER)  # setup lines may hold a secret
        job_id = _sbatch(str(run.batch_script), self.token, self.pass_fds)
        return [submitit_slurm.SlurmJob(folder=self.folder, job_id=job_id, tasks=[0])]


def submit(plan: LaunchPlan, token: str, pass_fds: Sequence[int] = ()) -> str:
    """Queue a plan's job; returns its id. sbatch inherits the files `pass_fds`.

    Raises SchedulerTimeout where the job may be in the queue, else SchedulerError with Slurm's words.
    """
    job = SlurmExecutor(plan, token, pass_fds).submit(Worker(str(plan.run.path)))
    return str(job.job_id)


def write_task(plan: LaunchPlan, task: int) -> None:
    """Write the files of a task whose job goes on by itself: its successor has the same number in an array."""
    DelayedSubmission(Worker(str(plan.run.path))).dump(plan.run.pickle_file)
    write_atomic(plan.run.batch_script, SlurmExecutor(plan).script({task: plan.run}), durable=False, mode=FOR_OWNER)


def submit_array(
    plan: LaunchPlan, tasks: Mapping[int, RunDir], token: str, pass_fds: Sequence[int], max_running: int | None = None
) -> str:
    """Queue a job array with a run for each task, by the options of `plan`; returns its id. Raises as `submit`."""
    script = tasks[min(tasks)].submitit / "array.sh"
    write_atomic(script, SlurmExecutor(plan).script(tasks, max_running), mode=FOR_OWNER)
    return _sbatch(str(script), token, pass_fds)


def definitions(plan: LaunchPlan, tasks: Mapping[int, RunDir] | None = None) -> list[str]:
    """The bash variables that job.sh takes for given; `tasks` are those of a job array."""
    runs = {0: plan.run} if tasks is None else tasks
    values = {
        "scheduler": plan.target.scheduler,
        "python": sys.executable,
        "start": start.FILE,
    }
    lists = {
        "setup": plan.options.setup,
        "teardown": plan.options.teardown,
        "srun_args": plan.options.srun_args,
    }
    return [
        *(f"jobkit_{name}={shlex.quote(value)}" for name, value in values.items()),
        f"jobkit_runs=({' '.join(f'[{task}]={shlex.quote(str(run.path))}' for task, run in runs.items())})",
        *(f"jobkit_{name}=({shlex.join(words)})" for name, words in lists.items()),
    ]


def patiently(ask: Callable[[], T], retries: Callable[[SchedulerError], bool] = commands.is_away) -> T:
    """Return the answer of `ask`. A controller that is away is asked again for a minute, and the user hears of it."""
    deadline, is_silent = time.monotonic() + PATIENCE_SECONDS, True
    while True:
        try:
            return ask()
        except SchedulerError as error:
            if not retries(error) or time.monotonic() >= deadline:
                raise
            if is_silent:
                log.warning("%s; trying again for a minute, Ctrl-C ends it", error)
                is_silent = False
            try:
                time.sleep(PAUSE_SECONDS)
            except KeyboardInterrupt:
                raise error from None  # nothing was queued: the submission takes itself back


def _sbatch(script: str, token: str, pass_fds: Sequence[int]) -> str:
    """The id of the new job, which is queued at most once."""
    environment = clean_environment()
    try:
        return patiently(
            lambda: commands.submit(script, f"--comment={token}", environment=environment, pass_fds=pass_fds),
            retries=lambda error: commands.is_away(error) and not isinstance(error, SchedulerTimeout),
        )
    except SchedulerTimeout as error:
        if is_limit(error):
            raise  # sbatch said so itself
        log.warning("%s; looking for the job in the queue", error)
        return _look_for(token, error)


def is_limit(error: SchedulerError) -> bool:
    """Return whether Slurm has refused a job for a limit on the number of jobs: fewer tasks may fit."""
    return any(words in str(error) for words in ("job submit limit", "SubmitJob", "sleeping and retrying"))


def _look_for(token: str, error: SchedulerTimeout) -> str:
    """The id of the job with a token, as soon as Slurm shows it: a busy controller works requests off later."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with_token = [job for job in jobs.queue() if token in job.comment.split()]
        except SchedulerError:
            with_token = []  # no answer; a later look may get one
        if with_token:
            return with_token[0].job_id.partition("_")[0]
        if time.monotonic() >= deadline:
            raise SchedulerTimeout(f"{error}; the same command looks for the job before it submits another")
        time.sleep(PAUSE_SECONDS)
