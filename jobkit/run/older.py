"""Runs that an older jobkit made: what their status.json says, as a Status, for `list` and `status`.

    status.json --read--> Status with is_older     (journal.py asks, where a journal has no submission of ours)

Their journals and checkpoints have other forms. Such a run is shown and may be removed; it is never continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from jobkit.run.files import read_json
from jobkit.run.records import AttemptBegan, AttemptEnded, Cause, Submitted
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt, State, Status

HINT = "its final weights can be read: jobkit.open_run(path).weights()"

OVER = ("finished", "failed", "cancelled")
"""Its other states are shown as interrupted: whether a job of an older jobkit lives, this one cannot ask."""


def is_older(value: Any) -> bool:
    """Return whether the content of a status.json is an older jobkit's."""
    return isinstance(value, dict) and "before_submission" in value


def read(run: RunDir) -> Status | None:
    """Return the Status of a run that an older jobkit made; None for any other."""
    value = read_json(run.status_file)
    if not is_older(value):
        return None
    config = {key: value.get(key) for key in ("name", "seed", "params")}
    state = value["state"] if value["state"] in OVER else "interrupted"
    result, note = value.get("result"), f"an older jobkit made this run, and left it {value['state']}"
    return Status(
        name=run.name,
        state=State(state),
        submitted=Submitted(token="", number=1, scheduler=value.get("scheduler") or "local", config=config),
        attempts=[_attempt(attempt, value) for attempt in value["attempts"]],
        result=result if isinstance(result, dict) or result is None else {"result": result},
        reason=f"{note}: {value['error']}" if value.get("error") else note,
        since=max((attempt["ended"] or attempt["started"] for attempt in value["attempts"]), default=0.0),
    )


def _attempt(attempt: Mapping[str, Any], status: Mapping[str, Any]) -> Attempt:
    number, failure = attempt["id"], attempt.get("failure") or {}
    cause = attempt["cause"] if attempt["cause"] in get_args(Cause) else "unknown"
    began = AttemptBegan(
        attempt=number, token="", job_id=attempt["job_id"], time=attempt["started"], host=attempt["host"]
    )
    ended = AttemptEnded(
        attempt=number,
        time=attempt["ended"] or attempt["started"],
        cause=cast(Cause, cause),
        next="stop",
        error=failure.get("error"),
        traceback=failure.get("traceback"),
        first_step=attempt["first_step"],
        last_step=attempt["last_step"],
        durable_step=status.get("checkpoint"),
        loop_began=attempt["resumed"],
        last_seen=attempt["last_seen"],
    )
    return Attempt(number=number, submission=1, began=began, ended=ended)
