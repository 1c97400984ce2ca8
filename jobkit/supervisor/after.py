"""A job whose run comes after others waits here, before it takes devices or starts agents.

    on this machine   a look each second, until they are finished, one of them ends otherwise, or a person stops it
    on Slurm          one look: the nodes go back, and the job into the queue, to start after the jobs of those runs

No attempt begins meanwhile, and none is counted. main.py calls `wait` between take_over and the supervisor's loop.
"""

from __future__ import annotations

import time
from typing import NoReturn

from jobkit.log import log
from jobkit.run.after import awaited, decide
from jobkit.run.records import Cancelled, Event, Refused
from jobkit.run.status import State
from jobkit.run.view import views
from jobkit.supervisor.closing import cancel_of
from jobkit.supervisor.lease import HeldLease, NotRunnable, way_back
from jobkit.supervisor.retry import Decision

LOOK_SECONDS = 1.0

ASK_SECONDS = 10.0
"""Between two looks of a run here that waits for one on Slurm, where somebody has continued it."""


def wait(held_lease: HeldLease, signals: list[int]) -> None:
    """Return once the runs that this one comes after are finished. Raises NotRunnable where it does not start now."""
    run, this_job, journal, shown = held_lease.run, held_lease.this_job, held_lease.journal, ""
    if held_lease.decision is not None:
        return
    while others := awaited(run, journal.status):
        existing = views([other for other in others if other.exists()])
        states: dict[str, State | None] = {other.name: None for other in others}
        turn = decide(states | {now.run.name: now.state for now in existing})
        if turn.action == "start":
            return
        if turn.action == "end":
            _end(held_lease, Refused(token=this_job.token, error=turn.words))
        run.failed_starts.unlink(missing_ok=True)  # this start of the job did all that it could
        if (request := cancel_of(journal.status, run)) is not None:
            _end(held_lease, Cancelled(user=request.user))
        if journal.status.submitted is not None and journal.status.submitted.scheduler == "slurm":
            from jobkit.supervisor.requeue import start_again

            ids = [now.job.job_id for now in existing if now.job is not None and not now.is_over]
            decision = Decision(action=way_back(this_job.job), reason=f"it waits for {turn.words}")
            start_again(this_job, journal, held_lease.config, decision, after=ids)
            raise NotRunnable(decision.reason)
        if signals:
            _end(held_lease, Refused(token=this_job.token, error=f"stopped while it waited for {turn.words}"))
        if turn.words != shown:
            shown = turn.words
            log.info("waiting for %s", shown)
        time.sleep(ASK_SECONDS if any(now.job is not None for now in existing) else LOOK_SECONDS)


def _end(held_lease: HeldLease, event: Event) -> NoReturn:
    """Journal the end of a run that has not begun."""
    with held_lease.run.begin_lock():
        held_lease.journal.append(event)
    status = held_lease.journal.status
    raise NotRunnable(f"{status.state}: {status.reason}")
