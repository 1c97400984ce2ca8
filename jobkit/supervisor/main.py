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
from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.supervisor import chain, notify
from jobkit.supervisor.allocation import Allocation
from jobkit.supervisor.attempt import take_over
from jobkit.supervisor.loop import DISK_SECONDS, Supervisor, once_there_is_room
from jobkit.supervisor.protocol import LOCAL
from jobkit.supervisor.tenure import Me, NotRunnable


def main(arguments: Sequence[str]) -> int:
    """Run the attempts of a run in this job; return the exit code."""
    configure()
    scheduler, path, *srun_arguments = arguments
    run = RunDir(path)
    signals: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT):  # job.sh has ignored SIGTERM until here
        signal.signal(signum, lambda number, frame: signals.append(number))
    before = read_status(run)
    try:
        if scheduler == "slurm":
            from jobkit.supervisor.slurm_allocation import this_job

            me = this_job(run)
        else:
            me = Me(job_id=os.environ["JOBKIT_JOB_ID"], token=os.environ["JOBKIT_TOKEN"])
    except NotRunnable as error:
        log.warning("%s: %s", run.name, error)
        return error.exit_code
    code = _run(run, me, scheduler, srun_arguments, signals)
    notify.tell(run, me.token, before)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # at its end Python gives up handlers, and a signal would kill it
    return code


def _run(run: RunDir, me: Me, scheduler: str, srun_arguments: Sequence[str], signals: list[int]) -> int:
    try:
        # Ranks may live, and train on while there is no room for the lease.
        tenure = once_there_is_room(lambda: take_over(run, me), lambda: time.sleep(DISK_SECONDS))
        chain.wait(tenure, signals)
    except NotRunnable as error:
        log.warning("%s: %s", run.name, error)
        return error.exit_code
    if scheduler == "slurm":
        from jobkit.supervisor.slurm_allocation import SlurmAllocation

        allocation: Allocation = SlurmAllocation(run, me, tenure.config, srun_arguments)
    else:
        allocation = Allocation(run, tenure.config.resources.seconds, tenure.config.container)
    supervisor = Supervisor(tenure, allocation, signals)
    try:
        code = supervisor.run()
    except NotRunnable as error:
        log.warning("%s: %s", run.name, error)
        code = error.exit_code
    except LostLease as error:
        log.warning("%s", error)
        code = EXIT_RESUMABLE
    if not supervisor.agents.by_node:
        allocation.lost(LOCAL)  # an agent here that has not called cannot be told to leave
    supervisor.agents.close()  # not after another exception: the next supervisor takes the agents over
    return code
