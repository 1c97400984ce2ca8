"""`start.py jobkit.supervisor.main slurm|local RUN [SRUN_ARGUMENT ...]`: the supervisor of a job; job.sh starts it.

Exit codes: 0 the run has finished; 75 it ended and can be continued, or continues elsewhere; 3 it has failed. After
any other code job.sh starts the supervisor again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from jobkit.errors import EXIT_RESUMABLE, LostLease
from jobkit.log import configure, log
from jobkit.run.disk import is_full
from jobkit.run.rundir import RunDir
from jobkit.supervisor.allocation import Allocation
from jobkit.supervisor.attempt import Me, NotRunnable, Tenure, take_over
from jobkit.supervisor.loop import DISK_SECONDS, FULL_DISK_SECONDS, Supervisor


def main(arguments: Sequence[str]) -> int:
    """Run the attempts of a run in this job; return the exit code."""
    configure()
    scheduler, path, *srun_arguments = arguments
    run = RunDir(path)
    early: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):  # job.sh has ignored SIGTERM until here
        signal.signal(signum, lambda number, frame: early.append(number))
    try:
        me = _slurm_me(run) if scheduler == "slurm" else _local_me()
        tenure = _take_over(run, me)
    except NotRunnable as error:
        log.warning("%s: %s", run.name, error)
        return error.exit_code
    allocation: Allocation
    if scheduler == "slurm":
        from jobkit.supervisor.slurm_allocation import SlurmAllocation

        allocation = SlurmAllocation(run, me, tenure.config.resources, srun_arguments)
    else:
        from jobkit.supervisor.local_allocation import LocalAllocation

        allocation = LocalAllocation(run, tenure.config.resources.seconds)
    supervisor = Supervisor(tenure, allocation)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, supervisor.on_signal)
    for number in early:
        supervisor.on_signal(number, None)
    try:
        code = supervisor.run()
    except NotRunnable as error:
        log.warning("%s: %s", run.name, error)
        code = error.exit_code
    except LostLease as error:
        log.warning("%s", error)
        code = EXIT_RESUMABLE
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # at its end Python gives up handlers, and a signal would kill it
    supervisor.agents.close()  # not after another exception: the next supervisor takes the agents over
    return code


def _take_over(run: RunDir, me: Me) -> Tenure:
    """Return the right to write. A full disk is waited for: ranks may live, and train on."""
    deadline = time.monotonic() + FULL_DISK_SECONDS
    while True:
        try:
            return take_over(run, me)
        except OSError as error:
            if not is_full(error) or time.monotonic() >= deadline:
                raise
            log.warning("%s: the supervisor waits for room on the disk: %s", run.name, error)
        time.sleep(DISK_SECONDS)


def _local_me() -> Me:
    return Me(job_id=os.environ["JOBKIT_JOB_ID"], token=os.environ["JOBKIT_TOKEN"])


def _slurm_me(run: RunDir) -> Me:
    from jobkit.supervisor.slurm_allocation import this_job

    return this_job(run)
