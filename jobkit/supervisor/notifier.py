"""Tells a run's user what happens to it, by the command of `notify:`: nothing but the run's own supervisor is there.

Nothing here may harm the run: what goes wrong is logged.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator

from jobkit.errors import JobkitError
from jobkit.log import log
from jobkit.run import notify, user_command
from jobkit.run.files import FOR_OWNER, read_json, write_atomic, write_json
from jobkit.run.notify import Notify
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.run.user_config import read_user_config

LEAVING_SECONDS = 5.0
"""How long commands are waited for where the scheduler is ending the job."""


class Notifier:
    """One run's, for as long as its supervisor lives."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._notify: list[Notify] = []
        with _harmless():
            self._notify = self._read()
        self._threads: list[threading.Thread] = []
        self._step: tuple[int, int | None] | None = None
        """(attempt, step) of the newest progress that was seen."""
        self._since = time.monotonic()
        self._has_told = False
        """Whether it was told that no step was done since."""

    def _read(self) -> list[Notify]:
        """What the submission was given, and what the user's own file says."""
        found = []
        given = read_json(self.run.notify_file)
        with contextlib.suppress(JobkitError, TypeError):
            found += [notify.of_value(given)] if given else []
        try:
            own = read_user_config()[0].notification
            found += [own] if own.command else []
        except (JobkitError, OSError) as error:
            log.warning("nobody is notified: %s", error)
        return found

    def attempt_begins(self) -> None:
        """Tell of too many preemptions, once: not when they come, for a job that is preempted has no time to lose."""
        with _harmless():
            status = self.run.status() if any(one.preempted != notify.NEVER for one in self._notify) else Status()
            count = _preemptions(status)
            for number, one in enumerate(self._notify):
                if isinstance(one.preempted, int) and count > one.preempted:
                    self._tell(number, one, "preempted", status, f"preempted {count} time(s), goes on")

    def attempt_ended(self, *, goes_on: bool = False) -> None:
        """Tell of the run's end, once; `goes_on` where the ranks start again in place."""
        with _harmless():
            self._notify = self._read()  # again: a submission of the run while it trains may have changed it
            status = self.run.status() if self._notify and not goes_on else Status()
            end = notify.end_of(status)
            for number, one in enumerate(self._notify):
                if end in one.when:
                    self._tell(number, one, str(end), status)

    def look(self) -> None:
        """Tell once when no step was done for as long as somebody wants to know; called again and again."""
        if all(one.patience is None for one in self._notify):
            return
        with _harmless():
            self._look(time.monotonic(), self.run.progress())

    def _look(self, now: float, progress: Progress | None) -> None:
        step = None if progress is None else (progress.attempt, progress.step)
        if step != self._step:
            self._step, self._since, self._has_told = step, now, False
        for number, one in enumerate(self._notify if not self._has_told else ()):
            if one.patience is not None and now - self._since > one.patience:
                self._has_told = True
                what = f"no progress for {one.no_progress}"
                self._tell(number, one, "no_progress", self.run.status(), what, again=True)

    def _tell(self, number: int, one: Notify, event: str, status: Status, words: str = "", again: bool = False) -> None:
        key = f"{number} {event} {status.submissions}"
        told = read_json(self.run.notified_file) or []
        if key in told and not again:
            return
        found = notify.variables(self.run.name, self.run.path, event, status)
        if words:
            found["JOBKIT_TEXT"] = f"{self.run.name}: {words}{status.at_steps}"
        write_json(self.run.notified_file, [*told, *({key} - set(told))])  # first: rather not told than again and again
        self._threads.append(user_command.start(one.command, found, self.run.notify_log, status.cwd))

    def close(self, *, at_once: bool = False) -> None:
        """Wait for commands that run, for not longer than they may."""
        until = time.monotonic() + (LEAVING_SECONDS if at_once else user_command.COMMAND_SECONDS + 1)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def keep(run: RunDir, command: str) -> None:
    """Let a run's supervisors notify by a command, for its owner's eyes; an empty one is forgotten. Raises OSError."""
    if command:
        write_atomic(run.notify_file, json.dumps(command), mode=FOR_OWNER)
    else:
        run.notify_file.unlink(missing_ok=True)


def _preemptions(status: Status) -> int:
    return sum(one.cause == "preempted" and one.submission == status.submissions for one in status.attempts)


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log.warning("nobody is notified: %s", error)
