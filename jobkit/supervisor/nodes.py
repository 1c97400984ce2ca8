"""The nodes of a run, each with the parent that forks its ranks: simulated on this machine, or a Slurm job's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE, SchedulerError
from jobkit.log import log
from jobkit.run.config import Resources
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import Begun
from jobkit.supervisor.channel import Welcome
from jobkit.supervisor.device_leases import LEASES, Leases
from jobkit.supervisor.diagnosis import FirstFailure, first_failure, srun_said
from jobkit.supervisor.listener import ADDRESS, Listener, make_secret
from jobkit.supervisor.parents import TASK_MODULES, Parent, ParentError, send

FOREGROUND_PIPE = "JOBKIT_FOREGROUND_PIPE"
"""Environment variable with a pipe's read end: its end of file means that the command in the foreground is gone."""

COMMAND_MODULES = ("submitit.core.submission", "jobkit.worker.main")
"""What a rank imports before it becomes the YAML's `command`, which may never need torch."""

STEP_NUMBERS = 4
"""How many starts of a job in a row give their steps different numbers: a kill is repeated a minute later at most."""

END_STEPS_SECONDS = 30.0
"""How long steps that are to end are killed again and again: a node may answer as late as KillWait."""

SHUT_DOWN_SECONDS = 5.0
"""How long srun gets to end when its tasks, the parents, have been told to."""

ASKING_SECONDS = 2.0
"""How long srun gets to say that a parent was killed; where it says nothing, nobody is left on the node to tell it."""


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    local_rank: int
    node: int
    resources: Resources

    @property
    def local_world_size(self) -> int:
        return self.resources.tasks_per_node

    @property
    def environment(self) -> dict[str, str]:
        """What Submitit's view of a rank (worker/job_environment.py) is made of."""
        return {
            "JOBKIT_PROCID": str(self.rank),
            "JOBKIT_LOCALID": str(self.local_rank),
            "JOBKIT_NODEID": str(self.node),
            "JOBKIT_NTASKS": str(self.resources.world_size),
            "JOBKIT_NNODES": str(self.resources.nodes),
        }


def places(resources: Resources) -> list[Place]:
    """The place of every rank: the nodes are filled one after the other."""
    per_node = resources.tasks_per_node
    return [Place(rank, rank % per_node, rank // per_node, resources) for rank in range(resources.world_size)]


class Nodes(Protocol):
    """The nodes of one run, from attempt to attempt."""

    parents: list[Parent]
    codes_of_a_stop: tuple[int, ...]
    """Exit codes of ranks that somebody else may have told to stop."""
    is_asking: bool
    """Whether it is not yet known what has become of a parent that is gone."""

    def prepare(self, begun: Begun) -> None:
        """Start the parents that are missing."""

    def are_prepared(self) -> bool:
        """Whether all parents can fork. Raises ParentError where one cannot be had."""

    def stop_preparing(self) -> None:
        """Give up parents that are not ready yet."""

    def places(self) -> list[Place]:
        """Of the ranks of an attempt that begins now."""

    def parent_of(self, place: Place) -> Parent:
        """The parent that is to fork the rank of a place."""

    def environment_of(self, place: Place) -> tuple[dict[str, str], Sequence[int]]:
        """What the rank of a place finds in its environment, and open files that it gets."""

    def failure_of_lost(self) -> FirstFailure | None:
        """What has become of a node whose parent is gone; None where it is not a failure, or not known yet."""

    def shut_down(self) -> None:
        """End all parents."""


class LocalNodes:
    """Nodes that are simulated on this machine by one parent, whose ranks have logs and devices of their own."""

    codes_of_a_stop: tuple[int, ...] = ()
    is_asking = False

    def __init__(self, run: RunDir, job_id: str) -> None:
        self.run = run
        self.job_id = job_id
        self.parents: list[Parent] = []
        self.leases = Leases.inherited(os.environ)
        self._outside = {name: value for name, value in os.environ.items() if name not in (FOREGROUND_PIPE, LEASES)}

    def prepare(self, begun: Begun) -> None:
        for parent in self.parents:
            parent.update()
        if not self.parents or self.parents[0].is_gone:
            # What a library reads when it is imported, as OMP_NUM_THREADS, is to be that of the ranks.
            self.parents = [Parent.start({**self._outside, **begun.environment}, preload(self.run))]

    def are_prepared(self) -> bool:
        return self.parents[0].is_ready()

    def stop_preparing(self) -> None:
        if self.parents and not self.parents[0].has_imported:
            self.parents[0].kill()  # it may never be done with its imports

    def places(self) -> list[Place]:
        return places(self.run.config().resources)

    def parent_of(self, place: Place) -> Parent:
        return self.parents[0]

    def environment_of(self, place: Place) -> tuple[dict[str, str], Sequence[int]]:
        # A rank that outlives the supervisor, for its checkpoint, still uses its device: it gets the lock's file.
        visible, leases = self.leases.of_rank(place.rank, place.resources.gpus_per_task)
        return {**place.environment, **visible, "JOBKIT_JOB_ID": self.job_id}, leases

    def failure_of_lost(self) -> FirstFailure | None:
        return None  # its ranks have SIGTERM, and save

    def shut_down(self) -> None:
        for parent in self.parents:
            parent.close()


def preload(run: RunDir) -> Sequence[str]:
    """What the parents of a run import."""
    return COMMAND_MODULES if run.config().command else TASK_MODULES


class SlurmNodes:
    """The nodes of a Slurm job, each with a parent that srun has started. `srun_args` are the user's own."""

    codes_of_a_stop: tuple[int, ...] = (EXIT_RESUMABLE,)  # Slurm sends its signals to the ranks, too

    def __init__(self, run: RunDir, job_id: str, srun_args: Sequence[str] = ()) -> None:
        self.run = run
        self.job_id = job_id
        self.srun_args = srun_args
        self.parents: list[Parent] = []
        self.is_asking = False
        self._listener: Listener | None = None
        self._srun: subprocess.Popen[bytes] | None = None
        self._attempt = 0
        """In whose folder srun's messages are."""
        self._lost_at: float | None = None

    def prepare(self, begun: Begun) -> None:
        for parent in self.parents:
            parent.update()
        self._lost_at, self.is_asking = None, False
        if self._srun is not None and not any(parent.is_gone for parent in self.parents):
            return
        self._end_step()
        if self._listener is None:
            self._listener = Listener(make_secret(self.run.secret_file), Welcome(preload=list(preload(self.run))))
            skip_step_numbers()  # before srun, whose step gets the next number
        self._attempt = begun.number
        environment = {**os.environ, **begun.environment, ADDRESS: self._listener.address}
        environment.pop("SLURM_GPUS_PER_TASK", None)  # a parent needs those of all of its ranks
        with self.run.srun_log(begun.number).open("ab") as said:
            self._srun = subprocess.Popen(
                self.command(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # to end it with its helper
            )

    def command(self) -> list[str]:
        """srun with a parent for each node."""
        resources = self.run.config().resources
        logs = self.run.logs(self._attempt)
        # Signals are ignored from the first instruction on, and exec keeps it so until Python can take notice of them.
        guard = ["sh", "-c", 'trap "" TERM USR2; exec "$@"', "jobkit"]
        return [
            "srun",
            "--unbuffered",
            f"--nodes={resources.nodes}",
            f"--ntasks={resources.nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={resources.tasks_per_node * resources.cpus_per_task}",
            # A parent that is gone leaves the others as they are, ready for the next attempt.
            "--kill-on-bad-exit=0",
            "--wait=0",
            *self.srun_args,
            f"--output={logs}/node_%n.out",
            f"--error={logs}/node_%n.err",
            *guard,
            *(sys.executable, "-u", "-m", "jobkit.worker.parent", str(self.run.path)),
        ]

    def are_prepared(self) -> bool:
        assert self._listener is not None and self._srun is not None
        self.parents += [Parent(channel, node=hello.node) for hello, channel in self._listener.arrived()]
        self.parents.sort(key=lambda parent: self._order(parent.node))
        ready = [parent.is_ready() for parent in self.parents]
        if len(ready) < self.run.config().resources.nodes and self._srun.poll() is not None:
            said = srun_said(self.run, self._attempt).strip().splitlines()
            raise ParentError(f"srun ended with exit code {self._srun.returncode}: {' / '.join(said[-3:])}")
        return len(ready) == self.run.config().resources.nodes and all(ready)

    def _order(self, node: str | None) -> int:
        """The position of a node among those of the job, which is that of its ranks."""
        if not hasattr(self, "_names"):
            self._names = slurm.expand(os.environ["SLURM_JOB_NODELIST"])
        return self._names.index(str(node)) if node in self._names else len(self._names)

    def stop_preparing(self) -> None:
        if self._srun is not None and not self.are_complete():
            self._end_step()

    def are_complete(self) -> bool:
        return len(self.parents) == self.run.config().resources.nodes and all(one.has_imported for one in self.parents)

    def places(self) -> list[Place]:
        return places(self.run.config().resources)

    def parent_of(self, place: Place) -> Parent:
        return self.parents[place.node]

    def environment_of(self, place: Place) -> tuple[dict[str, str], Sequence[int]]:
        """As srun would have told it to a task for each rank."""
        resources = place.resources
        world, per_node, nodes = str(resources.world_size), resources.tasks_per_node, resources.nodes
        first = place.node * per_node
        return {
            **place.environment,
            "JOBKIT_JOB_ID": self.job_id,
            "SLURM_PROCID": str(place.rank),
            "SLURM_LOCALID": str(place.local_rank),
            "SLURM_NODEID": str(place.node),
            "SLURM_NTASKS": world,
            "SLURM_NPROCS": world,
            "SLURM_STEP_NUM_TASKS": world,
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})" if nodes > 1 else str(per_node),
            "SLURM_CPUS_PER_TASK": str(resources.cpus_per_task),
            "SLURM_GTIDS": ",".join(map(str, range(first, first + per_node))),
        }, ()

    def failure_of_lost(self) -> FirstFailure | None:
        lost = next(parent for parent in self.parents if parent.is_gone)
        assert self._srun is not None
        if self._lost_at is None:
            self._lost_at = time.monotonic()
        code = self._srun.poll()
        self.is_asking = False
        if code is not None and code < 0:
            return FirstFailure(signal=-code)  # srun was killed, and Slurm has ended its step
        said = first_failure(srun_said(self.run, self._attempt))
        if said is not None and said.node == lost.node:
            return FirstFailure(node=lost.node, signal=said.signal, code=said.code, node_lost=said.node_lost)
        if time.monotonic() - self._lost_at > ASKING_SECONDS:
            return FirstFailure(node=lost.node, node_lost=True)
        self.is_asking = True
        return None

    def _end_step(self) -> None:
        """End the parents and their srun, as when one of them is lost."""
        for parent in self.parents:
            parent.close()
        self.parents = []
        if self._srun is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._srun.wait(SHUT_DOWN_SECONDS)
        if self._srun.poll() != 0:
            end_steps(self.job_id)
        send(self._srun.pid, signal.SIGKILL)  # it may wait for a lost node until Slurm knows of it
        self._srun.wait()
        self._srun = None

    def shut_down(self) -> None:
        self._end_step()


def skip_step_numbers() -> None:
    """Let this start of the job number its steps differently from the last one.

    A busy Slurm may repeat a kill of the last attempt's step a minute later. Each start of a job counts its steps from
    0, so that the kill would hit this attempt's.
    """
    for _ in range(int(os.environ.get("SLURM_RESTART_COUNT") or 0) % STEP_NUMBERS):
        with contextlib.suppress(subprocess.TimeoutExpired):  # of a busy slurmctld: the attempt is worth more
            # --overlap: the step takes nothing of the nodes, so that it need not wait for a step that still ends.
            empty = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "true"]
            subprocess.run(empty, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=False)


def end_steps(job_id: str) -> None:
    """Kill all steps of a job, and wait until they are gone: the ranks of two attempts must not overlap."""
    until = time.monotonic() + END_STEPS_SECONDS
    try:
        while slurm.steps(job_id) and time.monotonic() < until:
            slurm.signal_steps(job_id, "KILL")
            time.sleep(0.5)  # slurmctld serves one request at a time
    except SchedulerError as error:
        log.warning("%s", error)
