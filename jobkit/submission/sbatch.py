"""Submitit's SlurmExecutor with jobkit's batch script, submitted once."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from submitit.core.utils import DelayedSubmission
from submitit.slurm import slurm as submitit_slurm

from jobkit import slurm, start
from jobkit.errors import EXIT_RESUMABLE, SchedulerError, SchedulerTimeout
from jobkit.log import log
from jobkit.run import secrets
from jobkit.run.files import FOR_ALL, FOR_OWNER, replace_link, write_atomic
from jobkit.run.rundir import RunDir
from jobkit.submission.options import with_dependency
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.signals import hand_over, take_back
from jobkit.supervisor.batch_script import BLIND_RESTARTS, EXIT_DECIDED, EXIT_START_AGAIN
from jobkit.worker.main import Worker

T = TypeVar("T")

RETRY_SECONDS = (2, 4, 8, 16, 30)
"""Pauses between attempts to reach a controller that is away: one that is restarted is back within a minute."""

JOB_SCRIPT = Path(__file__).with_name("job.sh")
"""The shell part of every batch script."""


@dataclass(frozen=True)
class Batch:
    """What one sbatch submits: a run's job, or several runs as the tasks of a job array.

    The plans of an array have equal parameters, but for the job's name.
    """

    plans: Sequence[LaunchPlan]
    array: Path | None = None
    """The folder of a job array: its batch script and the logs of its tasks. None for the job of a run."""
    name: str = ""
    """Of an array: the job's; that of a run's own job is the run's."""
    max_running: int | None = None
    """How many tasks of the array may run at once; None for all."""
    after: Sequence[str] = ()
    """The jobs that have to have ended before this one starts, whatever came of them."""

    @cached_property
    def runs(self) -> list[RunDir]:
        """The run directories of its plans."""
        return [RunDir(plan.run) for plan in self.plans]

    @property
    def folder(self) -> Path:
        """Where Slurm writes what the batch script prints."""
        return self.runs[0].submitit if self.array is None else self.array

    @property
    def options(self) -> list[str]:
        """Of sbatch, beside those in the script: what another job of the same script is not to have."""
        # Of all or of none: nobody would release the others. One that starts too early goes back, and is held then.
        return ["--hold"] if all(plan.is_held for plan in self.plans) else []

    @property
    def script_file(self) -> Path:
        return self.folder / self.runs[0].batch_script.name


class SlurmExecutor(submitit_slurm.SlurmExecutor):  # type: ignore[misc]
    """Submits one Batch. The script can be made, and shown, where there is no Slurm."""

    def __init__(self, batch: Batch, pass_fds: Sequence[int] = ()) -> None:
        self.batch, self.pass_fds = batch, pass_fds
        super().__init__(batch.folder)
        parameters = dict(batch.plans[0].parameters)
        if batch.array is not None:
            parameters |= {"array_parallelism": batch.max_running or len(batch.plans), "job_name": batch.name}
        if batch.after:
            parameters = with_dependency(parameters, f"afterany:{':'.join(batch.after)}")
        self.update_parameters(**parameters)

    @classmethod
    def affinity(cls) -> int:
        return 1

    def script(self) -> str:
        """The batch script, as sbatch will get it."""
        ours = {"setup": _definitions(self.batch), "teardown": None, "srun_args": None, "use_srun": False}
        count = None if self.batch.array is None else len(self.batch.plans)
        text: str = submitit_slurm._make_sbatch_string(
            command=JOB_SCRIPT.read_text(encoding="utf-8"),
            folder=self.folder,
            map_count=count,
            **{**self.parameters, **ours},
        )
        if self.batch.plans[0].config.command:  # its supervisor gives the notice (supervisor/time_limit.py)
            text = re.sub(r"^#SBATCH --signal=.*\n", "", text, flags=re.MULTILINE)
        return text

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit_slurm.SlurmJob[Any]]:
        # Submitit would name the pickle after the job, once sbatch has answered: a controller that is away may queue
        # the job without an answer. Under names of their own pickle and script are there before the job is.
        batch = self.batch
        for run, delayed in zip(batch.runs, delayed_submissions, strict=True):
            delayed.dump(run.submitted_pickle)
        mode = FOR_OWNER if secrets.hidden_in(batch.plans[0].parameters) else FOR_ALL
        write_atomic(batch.script_file, self.script(), mode=mode)
        for task, run in enumerate(batch.runs):
            _refer(run, batch, task)
        job_id = _sbatch(batch, self.pass_fds)
        ids = [job_id] if batch.array is None else [slurm.task_id(job_id, task) for task in range(len(batch.plans))]
        tasks = list(range(self._num_tasks()))
        return [submitit_slurm.SlurmJob(folder=self.folder, job_id=one, tasks=tasks) for one in ids]


def _definitions(batch: Batch) -> list[str]:
    """What job.sh takes for given, in the shell's words."""
    run, parameters = batch.runs[0], batch.plans[0].parameters
    values = {
        "python": sys.executable,
        "start": start.FILE,
        "failed_starts": str(run.failed_starts.relative_to(run.path)),
        "blind_restarts": str(BLIND_RESTARTS),
        "resumable": str(EXIT_RESUMABLE),
        "failed": str(EXIT_DECIDED),
        "start_again": str(EXIT_START_AGAIN),
        "setup": "\n".join(parameters.get("setup") or []),
        "teardown": "\n".join(parameters.get("teardown") or []),
    }
    lists = {"runs": [str(run.path) for run in batch.runs], "srun_args": parameters.get("srun_args") or []}
    variables = [f"jobkit_{name}={shlex.quote(value)}" for name, value in values.items()]
    return [*variables, *(f"jobkit_{name}=({shlex.join(words)})" for name, words in lists.items())]


def _refer(run: RunDir, batch: Batch, task: int) -> None:
    """Let a run find its batch script, and in an array its task."""
    if batch.array is None:
        run.task_file.unlink(missing_ok=True)
        return
    # The script first, of which there is no job yet: in the array before, this task may be another run.
    replace_link(run.batch_script, batch.script_file)
    write_atomic(run.task_file, str(task), durable=False)


def _sbatch(batch: Batch, pass_fds: Sequence[int]) -> str:
    """The id of the new job of a batch script, submitted once."""

    def submit() -> str:
        hand_over()
        try:
            return slurm.submit(str(batch.script_file), *batch.options, pass_fds=pass_fds)
        except SchedulerTimeout as error:
            return _adopt(batch, error)
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


def _adopt(batch: Batch, error: SchedulerTimeout) -> str:
    """The job that an sbatch without an answer may have queued: no other one has its script."""
    for pause in RETRY_SECONDS:
        # A slurmctld that was too busy to answer works its requests off later: the job may appear in a while.
        with contextlib.suppress(SchedulerError):
            if found := slurm.jobs_with(batch.script_file):
                return found[0].partition("_")[0]
        time.sleep(pause)
    raise SchedulerTimeout(
        f"{error}; no job of {batch.script_file} is in the queue; the same command looks for it again before it "
        "submits another"
    )


def script(plan: LaunchPlan) -> str:
    """The batch script of a run's own job, as sbatch will get it."""
    return SlurmExecutor(Batch([plan])).script()


def submit(batch: Batch, pass_fds: Sequence[int] = ()) -> list[str]:
    """Submit a batch and return the ids of its jobs, in the order of its plans; raises SchedulerError when Slurm does
    not take it.

    sbatch gets the files `pass_fds` of this process.
    """
    workers = [Worker(str(plan.run)) for plan in batch.plans]
    return [str(job.job_id) for job in SlurmExecutor(batch, pass_fds).submit_array(workers)]
