"""The needs of the supervisor's loop: nodes, agents on them, the scheduler's word, a way back to the queue.

loop.py --> Allocation (this machine: one agent, which simulates the nodes and holds the devices)
                ^-- SlurmAllocation
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jobkit.config.machine import past_shells
from jobkit.config.schema import ContainerConfig
from jobkit.run.rundir import RunDir
from jobkit.supervisor import container
from jobkit.supervisor.diagnosis import FailedSetup, last_words
from jobkit.supervisor.lease import HeldLease
from jobkit.supervisor.placement import Placement
from jobkit.supervisor.retry import Decision, RestartOptions
from jobkit.wire.messages import LOCAL

if TYPE_CHECKING:
    from jobkit.slurm.jobs import Job, StopCause

MOST_TRIES = 3
"""How often an agent is started on a node before one attempt."""

AGENT_SECONDS, IMAGE_SECONDS = 120.0, 1800.0
"""How long an agent may take until it calls, without and with a container. With a busy controller srun waits for its
step. The first start on a node may fetch and unpack an image of tens of gigabytes."""

KILLED_SECONDS = 5.0
"""How long a killed process is waited for: a call of the kernel that waits for a disk may never return."""

MARGIN_SECONDS = 90.0
"""How long before the time limit ranks are told to stop: a fifth of the limit, but at most this."""


def margin_of(limit: float) -> float:
    """Return how many seconds before the end of a time limit of `limit` seconds the ranks are told to stop."""
    return min(MARGIN_SECONDS, 0.2 * limit)


@dataclass(frozen=True, kw_only=True)
class SchedulerReport:
    """The scheduler's answer to one question; on this machine there is none to ask, and everything is well."""

    asked_at: float
    """When it was asked, by the monotonic clock: a later event may not be in it."""
    job: Job | None = None
    cause: StopCause | None = None
    """Why Slurm stops the job."""
    runs: bool = True
    """False once the job is no longer RUNNING: Slurm is ending its processes."""
    ends: float = math.inf
    """When its time is over, by the monotonic clock."""
    margin: float = MARGIN_SECONDS
    """Seconds before that at which the ranks are told to stop."""
    kill_wait: float = 30.0
    """Seconds between a signal of Slurm's to a step and its SIGKILL."""
    down: frozenset[str] = frozenset()
    """Nodes of the job that Slurm calls down."""


@dataclass(frozen=True, kw_only=True)
class LaunchFailure:
    """Agents that will not come."""

    words: str
    nodes: frozenset[str] = frozenset()
    """The nodes that are to blame; empty where all failed alike, which is no node's fault."""
    final: bool = False
    """True where another try would end the same way, if no agent has ever been ready."""


class Allocation:
    """The job of a supervisor: here a `job.sh` that a submission started on this machine.

    The loop calls all but `poll` in its main thread.
    """

    host = "127.0.0.1"
    """The address that agents are to call; empty is every interface."""
    signals_stop = True
    """True if a signal to the supervisor is a person's wish; else it is Slurm's, and Slurm is asked why."""

    def __init__(
        self, run: RunDir, attempt_seconds: float | None = None, container: ContainerConfig | None = None
    ) -> None:
        self.run = run
        self.failed_setup: FailedSetup | None = None
        self.container = None if container is None or container.is_none else container
        self.attempt_seconds = math.inf if attempt_seconds is None else attempt_seconds
        """The time limit of each attempt, where no scheduler keeps one for the job."""
        self.patience = AGENT_SECONDS if self.container is None else IMAGE_SECONDS
        self._agent: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        """When it was started."""
        self._how = ""
        """How the last agent ended, before it was ready."""
        self._silence = ""
        """Why an agent that lives is given up."""
        self._log = run.job_log
        """The agent's words."""
        self._agents_started = 0

    def nodes(self) -> list[str]:
        """Return the names of the job's nodes, in Slurm's order."""
        return [LOCAL]

    def start_agents(self, nodes: Sequence[str], attempt: int) -> None:
        """Start agents on those nodes for which no start is under way. srun's words are logged with the attempt."""
        if self._agent is None and not self._silence and self._agents_started < MOST_TRIES:
            self._agents_started += 1
            self._began = time.monotonic()
            self._log = self.run.agent_log(attempt, LOCAL)
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._agent = subprocess.Popen(
                    container.command(self.container, self.run.path.parent, "agent", str(self.run.path)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=past_shells("JOBKIT_TOKEN"),
                    start_new_session=True,  # a signal to the process group of job.sh is for the supervisor alone
                )

    def launch_failure(self, missing: Collection[str], report: SchedulerReport) -> LaunchFailure | None:
        """Return why agents that did not say Hello yet will not come; None while they may."""
        code = self._agent.poll() if self._agent is not None else None
        if code is not None:
            self._agent, self._how = None, _end_of(code)
        elif self._agent is not None and time.monotonic() - self._began > self.patience:
            said = last_words(self._log)
            self.give_up(LOCAL, f"the agent did not call in {self.patience:g} s{f': {said}' if said else ''}")
            self.lost(LOCAL)
        if code == container.EXIT_UNFIT:
            return LaunchFailure(words=last_words(self._log) or "the container is not fit", final=True)
        if self._silence:
            words, self._silence, self._agents_started = self._silence, "", 0
            return LaunchFailure(words=words)
        if self._agent is not None or self._agents_started < MOST_TRIES:
            return None
        self._agents_started = 0
        said = " / ".join(filter(None, [self._how, last_words(self._log)]))
        return LaunchFailure(words=f"{MOST_TRIES} agents ended before they were ready: {said}", final=True)

    def launched(self) -> None:
        """All agents that were wanted are ready: the next start of agents is the first try again."""
        self._agents_started = 0

    def give_up(self, node: str, why: str) -> None:
        """Wait no longer for the agent of a node; `lost` follows. Each is an attempt that could not begin."""
        self._silence = why

    def lost(self, node: str, why: str = "") -> None:
        """The agent of a node is gone; `why` is the reason why it was not ready, where it was not."""
        if self._agent is not None:
            # The agent may be stopped. A container's runtime is its parent, in the same process group.
            os.killpg(self._agent.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(KILLED_SECONDS)
            self._how = ": ".join(filter(None, [why, _end_of(self._agent.returncode)]))
            self._agent = None

    def poll(self) -> SchedulerReport | None:
        """Ask the scheduler, in a thread; None if it does not answer."""
        return SchedulerReport(asked_at=time.monotonic())

    def restart_options(self, held_lease: HeldLease, report: SchedulerReport, placement: Placement) -> RestartOptions:
        """Return how the run can go on after an attempt."""
        return RestartOptions(in_place=lambda without: True)

    def again(self, held_lease: HeldLease, decision: Decision, lost: Collection[str]) -> None:
        """Put the run into the queue again, as the decision says. `lost`: nodes that this start of the job has lost."""
        raise AssertionError(f"this machine has no queue: {decision}")


def _end_of(code: int | None) -> str:
    """Return how a process ended, in words; None is one that does not."""
    return "it does not end" if code is None else f"exit code {code}" if code >= 0 else f"signal {-code}"
