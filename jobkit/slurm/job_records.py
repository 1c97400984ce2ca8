"""Questions to Slurm about jobs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.slurm.commands import ANSWER_SECONDS, EVEN_HIDDEN, command, is_away
from jobkit.slurm.job_info import JobInfo, are_same, current_job, parse_job, time_of, value_of


def show_job(job_id: str, timeout: float = ANSWER_SECONDS) -> JobInfo | None:
    """The job as slurmctld knows it, or None once it has forgotten it (MinJobAge after its end)."""
    try:
        text = command("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout)
    except SchedulerError as error:
        if any(words in str(error) for words in ("Invalid job id", f"Job {job_id} not found")):  # a task of an array
            return None
        raise
    job = parse_job(text)
    if job.state != "RUNNING" or job_id != current_job():
        return job
    # A node's clock may be off, and a prolog may have run before anything of ours: only the controller knows since when
    # the time counts.
    return replace(job, elapsed=job.elapsed + clock_offset())


def left_its_array(job_id: str, find_job: Callable[[str], JobInfo | None] = show_job) -> bool:
    """Whether a job that Slurm does not know was a task of a job array that it knows: it forgets those at once that are
    cancelled before they start. Raises SchedulerError."""
    array, _, task = job_id.partition("_")
    return bool(task) and find_job(array) is not None


def clock_offset() -> float:
    """Seconds by which the controller's clock is ahead of this machine's; 0 where they agree, or where none is told."""
    # Asked again where this machine's clock was set in the meantime.
    return _clock_offset(round(time.time() - time.monotonic()))


@cache
def _clock_offset(set_to: int) -> float:
    before = time.time()
    try:
        answer = command("sdiag")
    except SchedulerTimeout:
        raise  # not kept: the next question may be answered
    except SchedulerError as error:
        if is_away(error):
            raise
        return 0.0
    told = re.search(r"output at .*\((\d+)\)", answer)
    if told is None:
        return 0.0
    now, after = float(told[1]), time.time()
    return 0.0 if before - 1 <= now <= after + 1 else now - (before + after) / 2


def jobs_of(users: Collection[str], timeout: float = ANSWER_SECONDS) -> list[JobInfo]:
    """All jobs of some users that Slurm has not forgotten, in one question: less of each than show_job says."""
    options = [*EVEN_HIDDEN, "--array", "--noheader", "--states=all", f"--user={','.join(users)}"]
    options += ["--format=%i|%T|%r|%S|%e|%N|%E|%o"]
    rows = command("squeue", *options, timeout=timeout).splitlines()
    return [_listed_job(*row.split("|", 7)) for row in rows if row.count("|") >= 7]


def _listed_job(
    job_id: str, state: str, reason: str, start: str, end: str, nodes: str, dependency: str, script: str
) -> JobInfo:
    return JobInfo(
        job_id=job_id,
        state=state,
        reason=reason,
        preempt_time=None,
        start=time_of(start),
        end=time_of(end),
        elapsed=0.0,
        restarts=0,
        nodes=nodes,
        script=value_of(script),
        dependency=re.sub(r"_\*|\(\w+\)", "", value_of(dependency)),
    )


def jobs_with(script: Path, task: int | None = None) -> list[str]:
    """Ids of this user's queued and running jobs that were submitted with a batch script; its name may be another's.

    Of a job array those of one of its tasks.
    """
    alive = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"  # not one that is completing
    rows = command("squeue", *EVEN_HIDDEN, "--array", "--noheader", "--me", alive, "--format=%i|%o").splitlines()
    found = ((job_id, Path(path)) for job_id, _, path in (row.partition("|") for row in rows))
    found = ((job_id, path) for job_id, path in found if task is None or job_id.endswith(f"_{task}"))
    return [job_id for job_id, path in found if path.name == script.name and are_same(path, script)]


def steps(job_id: str) -> list[str]:
    """Ids of the steps of a job that srun started and that are not over."""
    listed = command("squeue", *EVEN_HIDDEN, "--noheader", "--steps", f"--jobs={job_id}", "--format=%i").split()
    # Not the batch script's, an interactive one's or `extern`: they have names where srun's have numbers.
    return [step for step in listed if step.rpartition(".")[2].isdigit()]
