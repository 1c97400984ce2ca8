"""`jobkit/start.py jobkit.supervisor.main local RUN`, `... slurm RUN [SRUN_ARGUMENT ...]`, `... end RUN [ATTEMPT]`.

`local` is started by a submission, `slurm` and `end` by the batch script (submission/job.sh); `end` finishes what a
supervisor of the job has left: the end of its attempt, where it was killed, and the requeue.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from filelock import Timeout

from jobkit import slurm
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.log import configure, log
from jobkit.run.events import Event
from jobkit.run.locks import NoLocks
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.supervisor import queue
from jobkit.supervisor.attempt import NotRunnable
from jobkit.supervisor.batch_script import EXIT_DECIDED, EXIT_START_AGAIN
from jobkit.supervisor.dependents import tell_dependents
from jobkit.supervisor.device_leases import Leases
from jobkit.supervisor.local_job import LocalJob
from jobkit.supervisor.needs import need_of
from jobkit.supervisor.nodes import LocalNodes, SlurmNodes
from jobkit.supervisor.queue import Place
from jobkit.supervisor.ranks import ForkedRanks
from jobkit.supervisor.slurm_job import SlurmJob
from jobkit.supervisor.supervisor import Supervisor
from jobkit.supervisor.waiting import is_after_others, may_start_in_job, wait_for_runs, wait_in_line


def supervise_local(run: RunDir) -> int:
    """Run the attempts of a local run, as the only supervisor it has."""
    status = run.status()
    need = need_of(run.config(), os.environ, queues=status.queues)
    job = LocalJob(run, is_wanted=lambda: queue.is_wanted(need))
    job.listen()
    leases = Leases.inherited(os.environ)
    # Before the lock: who has started this process goes on when the lock is held, and may start the next run.
    try:
        place = Place(need, run.path, status.priority) if leases is None and not is_after_others(run) else None
    except OSError as error:
        run.record(Event.REQUEUE_FAILED, error=f"{need.folder}: {error.strerror or error}: it cannot wait for its turn")
        return EXIT_RESUMABLE
    lock = run.alive_lock()
    try:
        lock.acquire(timeout=10)  # not at once: whoever asks whether we live takes the lock for an instant
    except Timeout:
        log.warning("%s is already being run by another supervisor", run.name)
        return EXIT_FAILED
    try:
        if not wait_for_runs(run, job):
            return _code_of(run)
        while True:
            if leases is None:
                leases = wait_in_line(run, job, place or Place(need, run.path, status.priority))
                if leases is None:
                    return _code_of(run)
                leases.sign(run.path, os.getpid())
            code = Supervisor(run, ForkedRanks(run, LocalNodes(run, job.id, leases)), job).supervise()
            if not job.makes_room:
                return code
            leases.close()
            leases = place = None
    except NotRunnable as error:
        log.warning("%s", error)
        return EXIT_FAILED
    finally:
        if place is not None:
            place.leave()
        lock.release()
        tell_dependents(run)


def _code_of(run: RunDir) -> int:
    """The exit code of a run that was not started after all."""
    return EXIT_FAILED if run.status().state == State.FAILED else EXIT_RESUMABLE


def supervise_in_job(run: RunDir, verb: str, arguments: Sequence[str]) -> int:
    """Run the attempt of this start of a Slurm job, or end one whose supervisor is gone."""
    job = SlurmJob(run, slurm.current_job() or "")
    if verb == "end":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's own, at the time limit or after a requeue
        code = job.finish(int(arguments[0]) if arguments else None)
        tell_dependents(run)
        return code
    job.listen()
    starts_again = False
    try:
        if not may_start_in_job(run, job):
            return EXIT_FINISHED
        code = Supervisor(run, ForkedRanks(run, SlurmNodes(run, job.id, arguments)), job).supervise()
        starts_again = code == EXIT_START_AGAIN
        return code
    except NotRunnable as error:
        log.warning("%s: %s", run.name, error)
        return EXIT_FINISHED
    finally:
        if not starts_again:  # that comes first: to tell a thousand takes longer than Slurm may leave a job
            tell_dependents(run)


def main(arguments: Sequence[str]) -> int:
    """Run one of the verbs; returns the exit code."""
    configure("stderr")
    verb, path, *rest = arguments
    run = RunDir(Path(path))
    try:
        if verb == "local":
            return supervise_local(run)
        code = supervise_in_job(run, verb, rest)
    except NoLocks as error:
        log.warning("%s", error)
        return EXIT_FAILED  # to a batch script as an error of Python's: another node may have locks
    return EXIT_DECIDED if code == EXIT_FAILED else code
