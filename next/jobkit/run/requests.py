"""What a person asks a run's supervisor for: a file in the run directory, which the supervisor looks for once a second.

ask(run, status, "cancel", grace=0.0)
"""

from __future__ import annotations

from jobkit.run import records
from jobkit.run.locks import make_folder
from jobkit.run.records import Request, RequestKind
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.run.view import user_name


def ask(run: RunDir, status: Status, kind: RequestKind, grace: float | None = None) -> None:
    """Leave a request. It is about the newest attempt: the open one, or the one after which none shall begin (0: none
    has begun yet). A request about an earlier attempt, or another submission, is stale.
    """
    attempt = status.attempt.number if status.attempt is not None else 0
    request = Request(kind=kind, token=str(status.token), attempt=attempt, grace=grace, user=user_name())
    file = run.request_file(kind)
    make_folder(file.parent)
    records.write(file, request, durable=False)
