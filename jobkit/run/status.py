"""The status of a run: a pure function of its journal, and of the progress its current attempt reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jobkit.run.journal import Event

QUEUED, RUNNING, INTERRUPTED, FINISHED, FAILED, CANCELLED = (
    "queued",
    "running",
    "interrupted",
    "finished",
    "failed",
    "cancelled",
)


@dataclass
class Attempt:
    """One start of the run's processes, from the batch script to its end."""

    id: int
    cluster: str
    job_id: str
    started: float
    ended: float | None = None
    cause: str | None = None
    """Why it ended: finished, preempted, timeout, cancelled, user, signal, crashed, lost; None while it runs."""
    first_step: int | None = None
    """Steps done before this attempt, from the checkpoint it resumed."""
    last_step: int | None = None
    """Steps done when it ended."""
    host: str = ""
    code: str = ""


@dataclass
class Status:
    """What `jobkit status --json` prints and status.json holds."""

    state: str = QUEUED
    step: int = 0
    """Steps done and not lost, or under way."""
    total_steps: int | None = None
    attempts: list[Attempt] = field(default_factory=list)
    result: Any = None
    error: str | None = None
    cluster: str | None = None
    """Where the run was last submitted to."""
    scheduler: str | None = None
    """`slurm` or `local`: who knows the job of that id."""
    job_id: str | None = None
    checkpoint: int | None = None
    """Step of the newest durable checkpoint."""
    cancel_requested: bool = False
    submitting: bool = False
    """A submission began and neither its success nor its failure was recorded."""
    before_submission: tuple[str, str | None] = (INTERRUPTED, None)
    """The state and error to fall back to when it failed."""
    code: str = ""
    """The code snapshot of the newest submission."""
    command: str = ""
    """What to type to continue the run: the command of the newest submission."""
    cwd: str = ""
    """Where it was typed."""

    @property
    def how_to_continue(self) -> str:
        """What to type, and where, in words."""
        return f"{self.command}   (in {self.cwd})" if self.command else "the same command"

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt."""
        return self.attempts[-1] if self.attempts else None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def derive(events: Sequence[Event], progress: Mapping[str, Any] | None = None) -> Status:
    """The status after `events`; `progress` is the running attempt's own report {attempt, step, total_steps}."""
    status = Status()
    for event in events:
        _apply(status, event)
    attempt = status.attempt
    if progress and attempt and progress.get("attempt") == attempt.id:
        status.total_steps = progress.get("total_steps", status.total_steps)
        if status.state == RUNNING:
            status.step = max(status.step, int(progress.get("step") or 0))
        elif attempt.last_step is None:
            attempt.last_step = progress.get("step")
    return status


def _apply(status: Status, event: Event) -> None:
    handler = _HANDLERS.get(event["event"])
    ghost = status.attempt and event["event"] != "started" and event.get("attempt") not in (None, status.attempt.id)
    if handler and not ghost:  # an old attempt's last words say nothing about the one that runs now
        handler(status, event)


def _submitting(status: Status, event: Event) -> None:
    if status.attempts or status.state != QUEUED:
        status.before_submission = (status.state, status.error)
    status.submitting = True
    status.state, status.error, status.cancel_requested = QUEUED, None, False
    status.cluster, status.scheduler, status.job_id = event.get("cluster"), event.get("scheduler"), None
    status.code = str(event.get("code", ""))
    status.command, status.cwd = str(event.get("command", "")), str(event.get("cwd", ""))


def _submitted(status: Status, event: Event) -> None:
    status.submitting = False  # the job may have started, and even ended, before the submitter could write this
    status.job_id = event.get("job_id")


def _submit_failed(status: Status, event: Event) -> None:
    status.submitting = False
    status.state, status.error = status.before_submission


def _started(status: Status, event: Event) -> None:
    status.submitting = False
    status.state, status.job_id = RUNNING, event.get("job_id")
    status.attempts.append(
        Attempt(
            id=int(event["attempt"]),
            cluster=str(status.cluster),
            job_id=str(event.get("job_id")),
            started=float(event["time"]),
            host=str(event.get("host", "")),
            code=status.code,
        )
    )


def _resumed(status: Status, event: Event) -> None:
    status.step = int(event["step"])
    status.total_steps = event.get("total_steps", status.total_steps)
    status.checkpoint = status.step if event.get("checkpoint") else None
    if status.attempt:
        status.attempt.first_step = status.step


def _checkpoint(status: Status, event: Event) -> None:
    status.step = status.checkpoint = int(event["step"])


def _end(status: Status, event: Event, state: str, cause: str) -> None:
    status.state = state
    attempt = status.attempt
    if attempt and attempt.ended is None:
        attempt.ended, attempt.cause = float(event["time"]), cause
        if event.get("step") is not None:
            attempt.last_step = status.step = int(event["step"])


def _interrupted(status: Status, event: Event) -> None:
    cause = str(event.get("cause"))
    _end(status, event, CANCELLED if cause == "cancelled" else INTERRUPTED, cause)


def _requeued(status: Status, event: Event) -> None:
    status.state = QUEUED
    status.job_id = event.get("job_id", status.job_id)


def _requeue_failed(status: Status, event: Event) -> None:
    status.state, status.error = INTERRUPTED, event.get("error")


def _finished(status: Status, event: Event) -> None:
    _end(status, event, FINISHED, "finished")
    status.result = event.get("result")


def _failed(status: Status, event: Event) -> None:
    _end(status, event, FAILED, str(event.get("cause", "crashed")))
    status.error = event.get("error")


def _cancel_requested(status: Status, event: Event) -> None:
    status.cancel_requested = True


def _cancelled(status: Status, event: Event) -> None:
    attempt = status.attempt
    if status.state == RUNNING and attempt and attempt.ended is None:
        attempt.ended, attempt.cause = float(event["time"]), "cancelled"
    status.state = CANCELLED


_HANDLERS = {
    "submitting": _submitting,
    "submitted": _submitted,
    "submit_failed": _submit_failed,
    "started": _started,
    "resumed": _resumed,
    "checkpoint": _checkpoint,
    "interrupted": _interrupted,
    "requeued": _requeued,
    "requeue_failed": _requeue_failed,
    "finished": _finished,
    "failed": _failed,
    "cancel_requested": _cancel_requested,
    "cancelled": _cancelled,
}
