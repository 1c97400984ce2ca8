"""What Slurm is told to do with jobs: queue, cancel, requeue, release, change, signal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jobkit.errors import SchedulerError, SchedulerTimeout
from jobkit.log import log
from jobkit.slurm.commands import as_text, command, is_away
from jobkit.slurm.job_info import stop_cause
from jobkit.slurm.job_records import show_job, steps


def submit(
    script: str, *options: str, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> str:
    """Queue a batch script; returns the new job's id. Raises SchedulerTimeout where it may have been queued."""
    answer = command("sbatch", "--parsable", *options, script, environment=environment, pass_fds=pass_fds)
    job_id = job_id_of(answer)
    if job_id is None:
        words = "; ".join(line.strip() for line in as_text(answer).splitlines() if line.strip())
        raise SchedulerTimeout(f"sbatch gave no job's id, and may have queued the job: {words or 'it printed nothing'}")
    return job_id


def job_id_of(answer: str) -> str | None:
    """The job's id in what sbatch, or a site's wrapper of it, printed around `id`, `id;cluster` or its sentence.

    None where there is none, or more than one.
    """
    lines = [line.strip() for line in answer.splitlines()]
    # A sentence is surer than a number, which may stand in a banner.
    for pattern in (r".*\bSubmitted batch job (\d+)\b.*", r"(\d+)(?:;[^;\s]*)?"):
        found = {match[1] for line in lines if (match := re.fullmatch(pattern, line))}
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def could_start(script: str, *options: str, environment: Mapping[str, str] | None = None) -> bool:
    """Whether Slurm would ever start a job of a batch script with some options. Raises SchedulerTimeout."""
    try:
        command("sbatch", "--test-only", *options, script, environment=environment)
    except SchedulerTimeout:
        raise
    except SchedulerError as error:
        log.info("%s", error)
        return False
    return True


def release(job_id: str) -> None:
    """Let a held job start. Raises SchedulerError, as for a hold that is an administrator's."""
    command("scontrol", "release", job_id)


IDS_OF_A_COMMAND = 1000
"""How many ids of jobs are given to one command: a command line may have 128 KiB or more, and an id has up to 20."""


def cancel(job_id: str) -> None:
    """End a job for good; one that is gone already is fine."""
    _scancel(job_id)


def cancel_queued(job_ids: Sequence[str]) -> None:
    """End those of some jobs that have not started, by few commands; one that has started meanwhile runs on.

    A task of an array that starts in this moment ends, too: with `--state=PENDING` scancel ends all that wait.
    """
    tasks = [job_id for job_id in job_ids if "_" in job_id]
    jobs = [job_id for job_id in job_ids if "_" not in job_id]
    for ids, options in ((jobs, ["--state=PENDING"]), (tasks, [])):
        for first in range(0, len(ids), IDS_OF_A_COMMAND):
            _scancel(*options, *ids[first : first + IDS_OF_A_COMMAND])


def _scancel(*arguments: str) -> None:
    try:
        command("scancel", *arguments)
    except SchedulerError as error:  # it may have ended since it was listed
        if not any(words in str(error) for words in ("Invalid job id", "already completing or completed")):
            raise


class Refused(SchedulerError):
    """Slurm will not do that with this job, now or later."""


def requeue(job_id: str) -> bool:
    """Put a job back into the queue, as the same job; False where its owner has cancelled it. Raises Refused."""
    for _ in range(3):  # its state may change between the look and the command
        job = show_job(job_id)
        if job is not None and (job.state == "PENDING" or job.requeued_by_slurm):
            return True
        if job is not None and stop_cause(job) == "cancelled":
            return False  # Slurm would take it back: a requeue undoes a scancel
        # One that is cancelled in this very moment is left alone, and Slurm reports no error: so look again.
        only = ["Incomplete"] if job is not None and job.state == "RUNNING" else []
        try:
            command("scontrol", "requeue", *only, job_id)
        except SchedulerError as error:
            if "pending execution" in str(error):
                return True  # it is there already
            if is_away(error):
                raise
            raise Refused(str(error)) from None
        if not only:
            return True
    raise Refused(f"scontrol requeue: job {job_id} runs on")


def comment(job_id: str, text: str) -> None:
    """Say something about a job where `scontrol show job` prints it."""
    command("scontrol", "update", f"JobId={job_id}", f"Comment={text}")


def exclude(job_id: str, nodes: str) -> None:
    """Replace the list of nodes that a job in the queue may not get."""
    command("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={nodes}")


def signal_steps(job_id: str, name: str) -> None:
    """Send a signal to every process of a job's steps, on all nodes; the batch script does not get it."""
    for step in steps(job_id):
        _scancel(f"--signal={name}", step)
