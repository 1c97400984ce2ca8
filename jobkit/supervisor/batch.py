"""What the batch script runs around srun: `python -m jobkit.supervisor.batch begin RUN`, and `... end RUN ATTEMPT RC`.

Carries out what supervisor/attempt.py decides: the journal and Slurm may be away for minutes, and this script may be
killed at any line.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jobkit import slurm
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE, SchedulerError
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.submission.plan import BLIND_RESTARTS, EXIT_DECIDED
from jobkit.supervisor.attempt import Begun, NotRunnable, ask, begin, end
from jobkit.supervisor.diagnosis import FirstFailure, dead_node_of, first_failure, srun_said
from jobkit.supervisor.retry import Decision

T = TypeVar("T")

EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h

PATIENCE_SECONDS = 300.0
"""How long the beginning and the end of an attempt wait for a run directory whose file server is away."""


def _say(run: RunDir, text: str) -> None:
    print(f"jobkit: {run.name}: {text}", file=sys.stderr, flush=True)


def retry_until_mounted(run: RunDir, action: Callable[[], T], seconds: float = PATIENCE_SECONDS) -> T:
    """What `action` returns, tried until the run directory is there; raises the last OSError after `seconds`.

    In a thread, since a file server that is gone does not answer at all; the main thread keeps the time.
    """
    outcome: list[T] = []
    problem: list[BaseException] = [OSError(f"{run.path} does not answer")]

    def attempt_it() -> None:
        while not outcome:
            try:
                if not run.exists():
                    raise FileNotFoundError(f"{run.config_file}: not there")
                outcome.append(action())
            except OSError as error:
                problem[:] = [error]
                time.sleep(1.0)
            except BaseException as error:
                problem[:] = [error]
                return

    thread = threading.Thread(target=attempt_it, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome:
        return outcome[0]
    raise problem[0]


def end_on_slurm(run: RunDir, number: int, returncode: int | None, job_id: str) -> int:
    """`end`, and what follows from it, in the job itself; returns the exit code of the batch script.

    `returncode` is srun's, None while it has not returned.
    Harmless to call twice: a job that is in the queue again already is left there.
    """
    if returncode:
        _end_steps(job_id)
    job = ask(job_id)

    def decide_now() -> Decision:
        first = _first_to_die(run, number, returncode, job)
        return end(run, number, job_id, first=first, job=job, all_returned=returncode == 0)

    try:
        decision = retry_until_mounted(run, decide_now)
    except OSError as error:
        _say(run, f"the run directory is away ({error}); starting again to look for it")
        return _start_again_blindly(job_id)
    if decision.action == "stop":
        state = run.status().state
        _say(run, f"{decision.reason}: not started again")
        if state == State.INTERRUPTED:
            return EXIT_RESUMABLE
        return EXIT_FAILED if state == State.FAILED else EXIT_FINISHED
    return _start_again(run, decision, job_id)


def _end_steps(job_id: str) -> None:
    """End ranks that have outlived their srun: it was killed, and they go on without it."""
    try:
        for _ in range(60):
            if not slurm.steps(job_id):
                return
            slurm.signal_steps(job_id, "KILL")
            time.sleep(0.5)
    except SchedulerError as error:
        print(f"jobkit: {error}", file=sys.stderr)


def _first_to_die(run: RunDir, number: int, returncode: int | None, job: slurm.JobInfo | None) -> FirstFailure | None:
    if returncode == 0:
        return None
    said = srun_said(run, number)
    sys.stderr.write(said)  # where Slurm would have put it
    if node := dead_node_of(job):
        return FirstFailure(node=node, node_lost=True)
    return first_failure(said) or (FirstFailure(signal=returncode - 128) if returncode and returncode > 128 else None)


def _start_again(run: RunDir, decision: Decision, job_id: str) -> int:
    """Requeue the job, or where Slurm refuses let a new one follow it."""
    refused = decision.action == "resubmit"
    # Journalled first: from the moment Slurm agrees, this script may be killed at any line.
    _try_record(run, Event.REQUEUED, job_id=job_id, cause=decision.reason)
    problem = None
    for pause in (0, 2, 10, 30, 60, 60):  # a controller that restarts is away for a minute or two
        time.sleep(pause)
        try:
            job = slurm.show_job(job_id)
            if job is None or not job.requeued_by_slurm:
                cancelled = job is not None and slurm.stop_cause(job) == "cancelled"  # since the decision
                if refused and not cancelled:
                    _resubmit(run, job_id)
                    return EXIT_FINISHED
                if cancelled or not slurm.requeue(job_id):
                    _try_record(run, Event.CANCELLED)
                    _say(run, "cancelled: not started again")
                    return EXIT_FINISHED
            _exclude(run, job_id, job)
            return EXIT_FINISHED
        except slurm.Refused as error:
            _say(run, f"{error}; a new job will follow this one")
            refused = True
        except (SchedulerError, OSError) as error:
            problem = str(error)
            _say(run, problem)
    _try_record(run, Event.REQUEUE_FAILED, job_id=job_id, error=problem)
    _say(run, "not started again; the same command continues it")
    return EXIT_RESUMABLE


def _try_record(run: RunDir, event: Event, **fields: object) -> None:
    """Journal an event, unless the run directory is away just now: what is being recorded matters more."""
    try:
        run.record(event, **fields)
    except OSError as error:
        _say(run, f"the journal does not take {event.value!r}: {error}")


def _exclude(run: RunDir, job_id: str, job: slurm.JobInfo | None) -> None:
    """Keep the job, which is in the queue by now, off the nodes that failed under it too often."""
    if nodes := run.status().excluded_nodes:
        listed = slurm.expand(",".join([*([job.excluded] if job and job.excluded else []), *nodes]))
        if job and job.partition and slurm.nodes_left(job.partition, listed) < job.node_count:
            _say(run, f"not excluded, or too few nodes of {job.partition} would be left: {', '.join(nodes)}")
            return
        slurm.exclude(job_id, ",".join(listed))
        _say(run, f"excluded from here on: {', '.join(nodes)}")


def _resubmit(run: RunDir, job_id: str) -> None:
    from jobkit.submission.sbatch import resubmit

    # One may be there already: its sbatch gave no answer, or this is the second try to end the attempt.
    others = [one for one in slurm.jobs_named(run.name) if one != job_id]
    successor = others[0] if others else resubmit(run, job_id, run.status().excluded_nodes)
    _try_record(run, Event.REQUEUED, job_id=successor, cause="resubmitted", predecessor=job_id)
    _say(run, f"job {successor} continues it")


def _start_again_blindly(job_id: str) -> int:
    """The run directory cannot be read, so nothing can be decided or written: let the next start look again."""
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) >= BLIND_RESTARTS:
        return EXIT_RESUMABLE
    try:
        slurm.requeue(job_id)
    except SchedulerError as error:
        print(f"jobkit: {error}", file=sys.stderr)
        return EXIT_RESUMABLE
    return EXIT_FINISHED


def _begin_alone(run: RunDir, job_id: str) -> Begun:
    from jobkit.submission.sbatch import complete_submission

    begun = begin(run, job_id=job_id, scheduler="slurm")
    complete_submission(run, job_id)
    return begun


def _begin_on_slurm(run: RunDir, job_id: str) -> int:
    """Prints nothing where there is nothing to run; another exit code than 0 makes the script try another node."""
    try:
        begun = retry_until_mounted(run, lambda: _begin_alone(run, job_id))
    except NotRunnable as error:
        _say(run, str(error))
        return EXIT_FINISHED
    except OSError as error:
        _say(run, f"cannot begin: {error}")
        return EXIT_RESUMABLE
    for name, value in begun.environment.items():
        print(f"export {name}={shlex.quote(value)}")
    return EXIT_FINISHED


def main(arguments: list[str]) -> int:
    """`begin RUN` prints the exports for the batch script; `end RUN ATTEMPT RC` starts the job again where right."""
    verb, path, *rest = arguments
    run, job_id = RunDir(Path(path)), slurm.current_job() or ""
    if verb == "begin":
        return _begin_on_slurm(run, job_id)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm's own, at the time limit or after a requeue
    try:
        code = end_on_slurm(run, int(rest[0]), int(rest[1]) if rest[1:] else None, job_id)
        return EXIT_DECIDED if code == EXIT_FAILED else code  # Python itself ends with 1 where it finds no jobkit
    except Exception:  # a bug of ours: the script tries again, and at last starts the job again without us
        traceback.print_exc()
        return EXIT_BUG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
