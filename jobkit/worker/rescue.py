"""What the parents of a Slurm job do when their supervisor is gone: start the job again, where nobody else can.

The job of a supervisor that is killed alone is requeued by its batch script within seconds. Where the script is gone
too, with its node or by itself, only somebody on another node can act.
"""

from __future__ import annotations

import os
import time

from filelock import Timeout

from jobkit import slurm
from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.records import StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor.attempt import request_stop
from jobkit.supervisor.slurm_job import SlurmJob

SAVE_SECONDS = 60.0
"""What ranks get to save when their supervisor is gone, and the batch script too, which would end them earlier
(slurm_job.SAVE_SECONDS): twice the KillWait that Slurm leaves them, 30 s by default."""

SILENCE_SECONDS = 15.0
"""After which the batch script is taken for dead, whatever Slurm says: it would have begun to act within a few. Slurm
itself learns of a dead node after SlurmdTimeout, 300 s by default, and then may end the step that this process is in.
"""

ASK_SECONDS = 2.0
"""How often Slurm is asked meanwhile: slurmctld serves all jobs of a cluster."""


def tell_ranks(run: RunDir, attempt: int) -> None:
    """Write down why the ranks of an attempt are being stopped."""
    request_stop(run, attempt, StopRequest(cause="killed", error="the supervisor was killed"))


def start_job_again(run: RunDir, attempt: int) -> None:
    """Return when the job of an attempt whose supervisor is gone goes on, or will not: one parent sees to it.

    `attempt` is the newest that the supervisor has told its parents of: with a newer one it is there, and only the
    connection of this parent is lost.
    """
    job, silent_since = SlurmJob(run, slurm.current_job() or ""), time.monotonic()
    while _is_left_alone(run, attempt):
        if _script_is_dead(job.id) or time.monotonic() - silent_since > SILENCE_SECONDS:
            try:
                with run.begin_lock().acquire(timeout=ASK_SECONDS):
                    if _is_left_alone(run, attempt):  # else another parent was first
                        log.warning("%s: the batch script is gone; %s acts for it", run.name, _node())
                        job.finish(attempt)
                return
            except (Timeout, LookupError):
                pass
        time.sleep(ASK_SECONDS)


def _is_left_alone(run: RunDir, attempt: int) -> bool:
    """Whether the attempt is the newest, and nobody has decided what comes after it."""
    try:
        status = run.status()
        return run.owner() == attempt and status.state in (State.RUNNING, State.INTERRUPTED)
    except OSError:
        return True  # the run directory may be back in the next round


def _script_is_dead(job_id: str) -> bool:
    try:
        job = slurm.show_job(job_id, timeout=5.0)  # within KillWait there is no time for more
    except SchedulerError:
        return False
    return job is not None and (job.script_died or job.state == "NODE_FAIL")


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME", "this node")
