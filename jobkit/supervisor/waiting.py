"""A local run's wait for its turn, in its own supervisor: light, and not bound to the terminal that it was typed in."""

from __future__ import annotations

import socket
import time

from jobkit.log import log
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.supervisor.device_leases import Leases
from jobkit.supervisor.local_job import LocalJob
from jobkit.supervisor.queue import LOOK_SECONDS, Place


def wait_in_line(run: RunDir, job: LocalJob, place: Place) -> Leases | None:
    """What the run needs, as soon as it is its turn; None where it was cancelled, told to stop or removed meanwhile.

    That and the wait itself are journalled.
    """
    is_told, problem, journal_bytes = False, "", -1
    with place:
        while True:
            if job.stops_waiting():
                run.record(Event.INTERRUPTED, cause="user")
                return None
            if (now := _journal_bytes(run)) != journal_bytes:
                if now is None:
                    log.warning("%s is gone: it waits no more", run.path)
                    return None
                journal_bytes = now
                if run.status().cancel_requested:
                    run.record(Event.CANCELLED)
                    return None
            try:
                if (leases := place.take()) is not None:
                    return leases
            except OSError as error:  # a full disk, or a folder that somebody has removed: it may be back
                if str(error) != problem:
                    problem = str(error)
                    log.warning("%s cannot look whether it is its turn: %s", run.name, problem)
            if not is_told:
                run.record(Event.WAITING, **{"for": place.need.text, "host": socket.gethostname()})
                is_told = True
            time.sleep(LOOK_SECONDS)


def _journal_bytes(run: RunDir) -> int | None:
    """The length of the journal, which grows when somebody cancels the run; None where it is gone."""
    try:
        return run.journal.path.stat().st_size
    except OSError:
        return None
