"""`start.py jobkit.supervisor.main slurm|local RUN [SRUN_ARGUMENT ...]`: the supervisor of a job; job.sh starts it.

Exit codes: 0 the run has finished; 75 it ended and can be continued, or continues elsewhere; 3 it has failed; 4 its
disk takes nothing, and the same command continues it. After any other code job.sh starts the supervisor again.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jobkit.config.machine import raise_open_files
from jobkit.disk import may_return
from jobkit.errors import EXIT_FAILED, LostLease
from jobkit.log import configure, log
from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.run.secrets import masked_word
from jobkit.supervisor import after, notify
from jobkit.supervisor.allocation import Allocation
from jobkit.supervisor.attempt import take_over
from jobkit.supervisor.diagnosis import FailedSetup, last_words
from jobkit.supervisor.lease import NotRunnable, ThisJob
from jobkit.supervisor.loop import DISK_SECONDS, Supervisor, once_there_is_room
from jobkit.wire.messages import LOCAL

T = TypeVar("T")

EXIT_NO_ROOM = 4

SAID_LINES = 8


def main(arguments: Sequence[str]) -> int:
    """Run the attempts of a run in this job; return the exit code."""
    configure()
    raise_open_files()  # for a connection to each node, and for its agents, which inherit it
    scheduler, path, *srun_arguments = arguments
    run = RunDir(path)
    signals: list[int] = []
    if os.environ.pop("JOBKIT_SIGNALLED", ""):  # during the setup lines
        signals.append(signal.SIGTERM)
    for signum in (signal.SIGTERM, signal.SIGINT):  # job.sh has ignored SIGTERM until here
        signal.signal(signum, lambda number, frame: signals.append(number))
    this_job = None
    try:
        before = _patiently(lambda: read_status(run))
        if before.submitted is None:  # not `another job runs it`: job.sh tries another node
            raise NotRunnable(f"{run.path} is not here: is its file system mounted on this node?", EXIT_FAILED)
        this_job = _patiently(lambda: _this_job(run, scheduler))
        code = _run(run, this_job, scheduler, srun_arguments, signals)
    except NotRunnable as error:
        log.warning("%s: %s", run.name, error)
        code = error.exit_code
    except OSError as error:
        if not may_return(error):
            raise
        # Nothing is journalled; the disk is the same on all nodes, so that the job is not requeued.
        log.warning("%s: %s: the job ends; once the disk takes files, the same command continues it", run.name, error)
        notify.tell_no_room(run, error)
        code = EXIT_NO_ROOM
    if this_job is not None and code != EXIT_NO_ROOM:
        notify.tell(run, this_job.token, before)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)  # at its end Python gives up handlers, and a signal would kill it
    return code


def _patiently(act: Callable[[], T]) -> T:
    return once_there_is_room(act, lambda: time.sleep(DISK_SECONDS))


def _this_job(run: RunDir, scheduler: str) -> ThisJob:
    if scheduler == "slurm":
        from jobkit.supervisor.slurm_allocation import this_job

        return this_job(run)
    return ThisJob(job_id=os.environ["JOBKIT_JOB_ID"], token=os.environ["JOBKIT_TOKEN"])


def _failed_setup(run: RunDir, this_job: ThisJob) -> FailedSetup | None:
    """Return the setup line that failed in this start of the job, by job.sh's words, with its last lines of output:
    the last one alone may be a hint, as that of `module load`."""
    if "JOBKIT_SETUP_FAILED" not in os.environ:
        return None
    begin, end, code, line = os.environ.pop("JOBKIT_SETUP_FAILED").split(" ", 3)
    said = last_words(run.job_log, int(begin), int(end), lines=SAID_LINES)
    said = re.sub(r"(^| / )\S+: line \d+: ", r"\1", said)  # bash names the script
    typed = re.sub(r"\w+=[^\s;]+", lambda match: masked_word(match[0]), line.partition("\n")[0])
    words = ": ".join(filter(None, [typed, said]))
    return FailedSetup(node=this_job.node, words=f"{words} (exit code {code})")


def _run(run: RunDir, this_job: ThisJob, scheduler: str, srun_arguments: Sequence[str], signals: list[int]) -> int:
    # Ranks may live, and train on while there is no room for the lease.
    held_lease = _patiently(lambda: take_over(run, this_job))
    failed_setup = _failed_setup(run, this_job)
    if failed_setup is None:
        _patiently(lambda: after.wait(held_lease, signals))
    if scheduler == "slurm":
        from jobkit.supervisor.slurm_allocation import SlurmAllocation

        allocation: Allocation = SlurmAllocation(run, this_job, held_lease.config, srun_arguments)
    else:
        allocation = Allocation(run, held_lease.config.resources.seconds, held_lease.config.container)
    allocation.failed_setup = failed_setup
    supervisor = Supervisor(held_lease, allocation, signals)
    ending: Exception | None = None
    try:
        code = supervisor.run()
    except (NotRunnable, LostLease, OSError) as error:
        if isinstance(error, OSError) and not may_return(error):
            raise  # as any unexpected one: the next supervisor takes the agents over
        ending = NotRunnable(str(error)) if isinstance(error, LostLease) else error
    if not supervisor.agents.by_node:
        allocation.lost(LOCAL)  # an agent here that has not called cannot be told to leave
    supervisor.agents.close()
    if ending is not None:
        raise ending
    return code
