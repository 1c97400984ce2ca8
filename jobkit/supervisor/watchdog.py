"""The watchdog: whether the ranks of an attempt hang, as seen by the supervisor, and what is done about it.

From outside, because a stopped process, or a loop in C that holds the interpreter, cannot notice itself. What is
watched is rank 0's count of heartbeats (worker/heartbeat.py): the ranks wait for each other in every step, so the count
stops wherever one of them does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence

from jobkit.run.duration import format_seconds, parse_seconds
from jobkit.run.records import Progress, StopRequest
from jobkit.run.rundir import RunDir
from jobkit.run.status import Attempt
from jobkit.supervisor.attempt import request_stop

LEAST_SECONDS = 300.0
"""`watchdog: auto` waits at least this long: in a step there may be an evaluation, or a checkpoint to a slow disk."""

MAX_FACTOR = 8.0
"""How many times longer it waits after false alarms, at most: a run that really hangs is to end some day."""

GAP_SECONDS = 30.0
"""A watch that has not looked for so long was stopped itself, as the ranks may have been: a laptop's lid, scontrol
suspend, a disk that did not answer. They get the whole time again."""

TIMES_SLOWEST = 20.0
"""`watchdog: auto` waits this many times as long as the slowest step so far took."""

TIMES_BEFORE = 2.0
"""And this many times as long as a step, or the start, took in attempts before: an evaluation in the user's code, of
which no heartbeat tells, comes again."""

OUTSIDE_LOOP_SECONDS = 1800.0
"""How long imports, the building of a model, the first step and what follows the loop may take, at the least."""

STACKS_SECONDS = 2.0
"""What the ranks get to write down their stacks, which faulthandler does in milliseconds where a disk takes them."""


def false_alarms(attempts: Sequence[Attempt]) -> int:
    """How many of some attempts in a row ended as hung though they may have been at work.

    Those that no later attempt has come further than: a step that takes long is not done sooner by starting again, and
    what a real hang stood at is.
    """
    furthest, alarms = 0, 0
    for attempt in reversed(attempts):
        reached = attempt.last_step or 0
        alarms += attempt.cause == "hang" and reached >= furthest
        furthest = max(furthest, reached)
    return alarms


class Watch:
    """Finds from the progress reports of one attempt whether its ranks hang; `setting` is the YAML's `watchdog`.

    `alarms`: how many attempts ended as hung before, by `false_alarms`: `auto`, and what is outside the loop, gets
    twice the time for each, up to MAX_FACTOR, so that a step which really takes that long is done in the end.
    `may_be_silent`: ranks that never report, as those of a command without jobkit.init, are left alone. `start` is the
    longest that an attempt before took to its first step, in seconds.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        setting: str | int | bool,
        alarms: int = 0,
        may_be_silent: bool = False,
        start: float = 0.0,
    ) -> None:
        self.run = run
        self.attempt = attempt
        self.setting = setting
        self.factor = min(2.0**alarms, MAX_FACTOR)
        self.may_be_silent = may_be_silent
        self.start = start
        self._beats: object = None
        self._since = self._looked = time.monotonic()

    @classmethod
    def of(cls, run: RunDir, attempt: int) -> Watch:
        now = run.status()
        own = [one for one in now.attempts if one.submission == now.submissions]
        config = run.config()
        starts = [one.stepped - one.started for one in now.attempts if one.stepped is not None]
        silent, start = bool(config.command), max(starts, default=0.0)
        return cls(run, attempt, config.watchdog, false_alarms(own), may_be_silent=silent, start=start)

    def limit(self, training: bool, slowest: float, before: float = 0.0) -> float:
        """Seconds without a beat that count as hung; `slowest` is 0 before the first step is done, `before` is that of
        the attempts before."""
        if self.setting == "auto":
            limit = max(LEAST_SECONDS, TIMES_SLOWEST * slowest, TIMES_BEFORE * before) * self.factor
            known = training and slowest > 0
        else:
            limit, known = float(parse_seconds(self.setting)), training
        return limit if known else max(limit, OUTSIDE_LOOP_SECONDS * self.factor, TIMES_BEFORE * self.start)

    def look(self) -> str | None:
        """What to tell about a hang, or None where there is none."""
        if self.setting == "off" or self.setting is False:
            return None
        now, looked = time.monotonic(), self._looked
        self._looked = now
        report = self.run.progress()
        if report is None or report.attempt != self.attempt:
            if self.may_be_silent:
                return None
            report = Progress(attempt=self.attempt, time=0.0)
        beats = (report.beats, report.training)
        if beats != self._beats or now - looked > GAP_SECONDS:
            self._beats, self._since = beats, now
            return None
        limit = self.limit(report.training, report.slowest, report.slowest_before)
        if now - self._since < limit:
            return None
        if not self._can_be_written():
            self._since = now  # the ranks could not report if they wanted to: the disk is full or away
            return None
        where = f"in step {report.step}" if report.training else "outside its loop"
        return f"no progress for {format_seconds(limit)} {where} (watchdog: {self.setting})"

    def _can_be_written(self) -> bool:
        try:
            with tempfile.TemporaryFile(dir=self.run.logs(self.attempt)) as file:
                file.write(b"x" * 4096)
        except OSError:
            return False
        return True


def end_hung(run: RunDir, attempt: int, error: str, send: Callable[[str], None]) -> None:
    """Have all ranks write down their stacks, then kill them; `send` sends the signal of a name to every rank."""
    # Before the signals: ranks that end of them are diagnosed by it. It replaces a request that they could not follow.
    request_stop(run, attempt, StopRequest(cause="hang", error=error), replace=True)
    send("USR1")  # STACKS_SIGNAL of worker/failure.py
    send("CONT")  # a stopped one writes its own down when it goes on
    time.sleep(STACKS_SECONDS)
    send("KILL")
