"""This machine as a job: one agent, which simulates the nodes and holds the devices."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Collection, Sequence

from jobkit import start
from jobkit.run.rundir import RunDir
from jobkit.supervisor.allocation import LaunchFailure, Look
from jobkit.supervisor.attempt import Tenure
from jobkit.supervisor.placement import Placement
from jobkit.supervisor.retry import Decision, Room

NODE = "local"

MOST_TRIES = 3
"""How often an agent is started before one attempt."""


class LocalAllocation:
    """The job of a `job.sh` that a submission started here. `seconds` is `resources.time`, None for no limit."""

    host = "127.0.0.1"
    signals_stop = True

    def __init__(self, run: RunDir, seconds: float | None) -> None:
        self.run = run
        self.attempt_seconds = math.inf if seconds is None else float(seconds)
        self._agent: subprocess.Popen[bytes] | None = None
        self._tries = 0

    def nodes(self) -> list[str]:
        return [NODE]

    def start_agents(self, nodes: Sequence[str], attempt: int) -> None:
        if self._agent is None and self._tries < MOST_TRIES:
            self._tries += 1
            self._agent = subprocess.Popen(
                start.words("jobkit.worker.agent", str(self.run.path)),
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != "JOBKIT_TOKEN"},
                start_new_session=True,  # a signal to the process group of job.sh is for the supervisor alone
            )

    def launch_failure(self, missing: Collection[str], look: Look) -> LaunchFailure | None:
        if self._agent is not None and self._agent.poll() is not None:
            self._agent = None
        if self._agent is not None or self._tries < MOST_TRIES:
            return None  # it may wait for devices for days
        self._tries = 0
        return LaunchFailure(words=f"{MOST_TRIES} agents ended before they were ready; see {self.run.job_log}")

    def launched(self) -> None:
        self._tries = 0

    def lost(self, node: str) -> None:
        if self._agent is not None:
            self._agent.kill()  # it may be stopped
            self._agent.wait()
            self._agent = None

    def dead(self) -> list[str]:
        return [NODE] if self._agent is not None and self._agent.poll() is not None else []

    def look(self) -> Look:
        return Look(asked=time.monotonic())

    def room(self, tenure: Tenure, look: Look, placement: Placement) -> Room:
        return Room(in_place=lambda without: True)

    def again(self, tenure: Tenure, decision: Decision, lost: Collection[str]) -> None:
        raise AssertionError(f"this machine has no queue: {decision}")
