"""Slurm: the one way its commands are run, what they say of a job, and why a job is being stopped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime

from jobkit.errors import SchedulerError, SchedulerTimeout

# States in which Slurm will do nothing more with a job by itself.
ENDED = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)

EARLY_SIGNAL_SECONDS = 60
"""sbatch --signal: "may be sent up to 60 seconds earlier than specified"."""

MAX_MARGIN_SECONDS = 90.0


def stop_margin(limit: float) -> float:
    """Seconds before the end of a time limit of `limit` seconds to stop at: a fifth of it, at most 90."""
    return min(MAX_MARGIN_SECONDS, 0.2 * limit)


def available() -> bool:
    """Whether this machine can submit to a Slurm."""
    return shutil.which("sbatch") is not None


def command(*arguments: str, timeout: float = 30.0) -> str:
    """The output of one Slurm command; raises SchedulerError with Slurm's own words, in one line."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        raise SchedulerError(
            f"{arguments[0]} is not on PATH: is this a login node of a Slurm cluster? Without one, use --local"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerTimeout(
            f"{arguments[0]} gave no answer in {timeout:g} s; is slurmctld up? (`scontrol ping`){_NO_SLURM}"
        ) from None
    if done.returncode:
        raise SchedulerError(explain(arguments[0], done.stderr or done.stdout))
    return done.stdout


_NO_SLURM = " (does SLURM_CONF name a cluster that is gone? `unset SLURM_CONF`; without a cluster, use --local)"


def explain(program: str, stderr: str) -> str:
    """Slurm's complaint in one line, with what to do where that is known."""
    words = "; ".join(line.split("error: ", 1)[-1].strip() for line in stderr.splitlines() if line.strip())
    hint = ""
    if "invalid partition" in words.lower():
        hint = " (`sinfo` lists the partitions; set clusters.<name>.partition)"
    elif "invalid account" in words.lower():
        hint = " (`sacctmgr show assoc user=$USER` lists your accounts; set clusters.<name>.account)"
    elif "configuration source" in words.lower() or "resolve_ctls" in words.lower():
        return f"{program}: no Slurm is configured here{_NO_SLURM}"
    elif "contact slurm controller" in words.lower() or "connection refused" in words.lower():
        hint = " (the controller is down or SLURM_CONF points elsewhere: `scontrol ping`; the same command works later)"
    return f"{program}: {words or 'failed without a word'}{hint}"


@dataclass(frozen=True)
class JobInfo:
    """What `scontrol show job` says of one job, as far as jobkit cares."""

    job_id: str
    state: str
    reason: str
    preempted: bool
    """Slurm has chosen this job to make room (PreemptTime is set)."""
    start: float | None
    """When this start of it began, seconds since the epoch."""
    end: float | None
    """When its time is over."""
    restarts: int
    nodes: str

    @property
    def ended(self) -> bool:
        """Whether Slurm will do nothing more with it."""
        return self.state in ENDED

    @property
    def requeued_by_slurm(self) -> bool:
        """Whether its processes are ending and it is in the queue again already, so that its next end is not known."""
        return self.state == "COMPLETING" and self.end is None


def show_job(job_id: str, timeout: float = 30.0) -> JobInfo | None:
    """The job as slurmctld knows it, or None once it has forgotten it (MinJobAge after its end)."""
    try:
        text = command("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout)
    except SchedulerError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return parse_job(text)


def parse_job(text: str) -> JobInfo:
    """A JobInfo of `scontrol --oneliner show job`'s words."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", text))
    return JobInfo(
        job_id=fields.get("JobId", ""),
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", ""),
        preempted=_time(fields.get("PreemptTime")) is not None,
        start=_time(fields.get("StartTime")),
        end=_time(fields.get("EndTime")),
        restarts=int(fields.get("Restarts", 0)),
        nodes=fields.get("NodeList", ""),
    )


def _time(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:  # None, Unknown, N/A
        return None


def stop_cause(job: JobInfo, margin: float, now: float) -> str | None:
    """Why Slurm sends this running job signals: preempted, timeout, cancelled; None where it gives no reason.

    `margin` is how many seconds before its time limit a job of ours stops; `now` is in seconds since the epoch.
    SIGTERM means both preemption and scancel, USR2 both preemption and the time limit: only the job's record tells.
    """
    if job.reason == "TimeLimit" or job.state == "TIMEOUT":
        return "timeout"
    if job.requeued_by_slurm:
        return "preempted"
    if job.state in ("CANCELLED", "COMPLETING"):
        return "cancelled"  # before the next: a job may be cancelled while it is being preempted
    if job.preempted:
        return "preempted"
    if job.end is not None and job.state == "RUNNING" and now >= job.end - margin:
        return "timeout"
    return None


def early_timeout_signal(job: JobInfo, margin: float, now: float) -> bool:
    """Whether a USR2 that came now may be --signal's, which Slurm sends up to a minute before it was asked to."""
    return job.end is not None and now >= job.end - margin - EARLY_SIGNAL_SECONDS - 5


def jobs_named(name: str) -> list[str]:
    """Ids of this user's queued and running jobs with this name."""
    return command("squeue", "--noheader", "--me", f"--name={name}", "--format=%i").split()


def cancel(job_id: str) -> None:
    """End a job for good; one that is gone already is fine."""
    try:
        command("scancel", job_id)
    except SchedulerError as error:
        if "Invalid job id" not in str(error):
            raise


def requeue(job_id: str) -> None:
    """Put a running job back into the queue: it starts again as the same job, with the same script."""
    command("scontrol", "requeue", job_id)


def current_job() -> str | None:
    """The id of the Slurm job this process is in, or None."""
    return os.environ.get("SLURM_JOB_ID")
