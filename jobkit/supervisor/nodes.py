"""The nodes of a run, each with the parent that forks its ranks: simulated on this machine, or a Slurm job's."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from jobkit import slurm, start
from jobkit.errors import EXIT_RESUMABLE, SchedulerError
from jobkit.log import log
from jobkit.run.config import Resources
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import Begun
from jobkit.supervisor.channel import Welcome
from jobkit.supervisor.device_leases import LEASES, Leases
from jobkit.supervisor.diagnosis import FirstFailure, end_on_node, failed_launch, last_words, srun_said, srun_starts
from jobkit.supervisor.listener import ADDRESS, Listener, make_secret
from jobkit.supervisor.parents import TASK_MODULES, Parent, ParentError, send
from jobkit.supervisor.placement import Placement, nodes_to_use

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

PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""Variables of a job that srun takes for options: a parent needs what all of its ranks need."""

PARENTS_SECONDS = 300.0
"""How long the parents of all nodes may take to be ready: imports from a cold shared disk take minutes."""

ASKING_SECONDS = 1.0
"""How long srun gets to say that a parent was killed; where it says nothing, nobody is left on the node to tell it."""


class LaunchError(ParentError):
    """srun could not start a parent, and it was the node's fault, or nobody's: not that of what is run."""

    def __init__(self, message: str, first: FirstFailure) -> None:
        super().__init__(message)
        self.first = first


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    rank: int
    local_rank: int
    node: int
    resources: Resources

    @property
    def local_world_size(self) -> int:
        return self.resources.ranks_per_node

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
    per_node = resources.ranks_per_node
    return [Place(rank, rank % per_node, rank // per_node, resources) for rank in range(resources.world_size)]


class Nodes(Protocol):
    """The nodes of one run, from attempt to attempt."""

    codes_of_a_stop: tuple[int, ...]
    """Exit codes of ranks that somebody else may have told to stop."""

    @property
    def is_asking(self) -> bool:
        """Whether it is not known yet what has become of a parent that is gone."""

    @property
    def parents(self) -> list[Parent]:
        """All that there are, those of spare nodes included."""

    def can_start_again(self, without: Sequence[str] = ()) -> bool:
        """Whether enough nodes are left to start the ranks on, beside some that are not to be used."""

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

    def slots_of(self, place: Place) -> str:
        """The name of the rank's memory, among all that its parent keeps."""

    def failure_of_lost(self, parent: Parent) -> FirstFailure | None:
        """What has become of the node of a parent that is gone; None where it is no failure, or not known yet."""

    def lose(self, parent: Parent) -> None:
        """Do not use the node of a parent again that was given up."""

    def shut_down(self) -> None:
        """End all parents."""


class LocalNodes:
    """Nodes that are simulated on this machine by one parent, whose ranks have logs and devices of their own."""

    codes_of_a_stop: tuple[int, ...] = ()
    is_asking = False

    def __init__(self, run: RunDir, job_id: str, leases: Leases) -> None:
        self.run = run
        self.job_id = job_id
        self.leases = leases
        self._parent: Parent | None = None
        own = (FOREGROUND_PIPE, LEASES)
        self._outside = {name: value for name, value in os.environ.items() if name not in own} | leases.visible

    @property
    def parents(self) -> list[Parent]:
        return [] if self._parent is None else [self._parent]

    def can_start_again(self, without: Sequence[str] = ()) -> bool:
        return True

    def prepare(self, begun: Begun) -> None:
        if self._parent is not None:
            self._parent.update()
        if self._parent is None or self._parent.is_gone:
            # What a library reads when it is imported, as OMP_NUM_THREADS, is to be that of the ranks.
            self._parent = Parent.start({**self._outside, **begun.environment}, preload(self.run))
        self._parent.begin_attempt(begun.number)

    def are_prepared(self) -> bool:
        assert self._parent is not None
        return self._parent.is_ready()

    def stop_preparing(self) -> None:
        if self._parent is not None and not self._parent.has_imported:
            self._parent.kill()  # it may never be done with its imports

    def places(self) -> list[Place]:
        return places(self.run.config().resources)

    def parent_of(self, place: Place) -> Parent:
        assert self._parent is not None
        return self._parent

    def environment_of(self, place: Place) -> tuple[dict[str, str], Sequence[int]]:
        # A rank that outlives the supervisor, for its checkpoint, still uses its device: it gets the lock's file.
        resources = place.resources
        visible, leases = self.leases.of_rank(place.rank, resources.ranks_per_node, resources.devices_per_rank)
        return {**place.environment, **visible, "JOBKIT_JOB_ID": self.job_id}, leases

    def slots_of(self, place: Place) -> str:
        return str(place.rank)  # of all nodes, which one parent has

    def failure_of_lost(self, parent: Parent) -> FirstFailure | None:
        return None  # its ranks have SIGTERM, and save

    def lose(self, parent: Parent) -> None:
        pass  # the next one is on the same machine

    def shut_down(self) -> None:
        for parent in self.parents:
            parent.close()


def preload(run: RunDir) -> Sequence[str]:
    """What the parents of a run import."""
    return COMMAND_MODULES if run.config().command else TASK_MODULES


@dataclass
class Step:
    """An srun that has started parents on some nodes; its messages are in the folder of an attempt."""

    srun: subprocess.Popen[bytes]
    nodes: Sequence[str]
    """Those on which its parents have not been found gone."""
    attempt: int
    has_lost_node: bool = False
    """Then it does not end until Slurm knows of that."""


class SlurmNodes:
    """The nodes of a Slurm job, each with a parent that srun has started. `srun_args` are the user's own.

    The first ones have the ranks, the others are spares. A node that is lost is not used again in this job.
    """

    codes_of_a_stop: tuple[int, ...] = (EXIT_RESUMABLE,)  # Slurm sends its signals to the ranks, too

    def __init__(self, run: RunDir, job_id: str, srun_args: Sequence[str] = ()) -> None:
        self.run = run
        self.job_id = job_id
        self.srun_args = srun_args
        self._listener: Listener | None = None
        self._steps: list[Step] = []
        self._connected: dict[str, Parent] = {}
        """The parent of each node that has one."""
        self._names: list[str] = []
        """The job's nodes, in Slurm's order."""
        self._attempt = 0
        self._lost: set[str] = set()
        self._excluded: set[str] = set()
        """Nodes that the run is not to use as long as others are left."""
        self._used: list[str] = []
        """The nodes that have the ranks, in the order of the ranks."""
        self._prepared_by = math.inf
        self._asking: dict[Parent, float] = {}
        """Since when it is not known what has become of a parent."""

    @property
    def parents(self) -> list[Parent]:
        return list(self._connected.values())

    # Which nodes

    def can_start_again(self, without: Sequence[str] = ()) -> bool:
        """Whether enough nodes are left to start the ranks on, beside some that are not to be used."""
        return self._placement().can_start_again(without)

    def _placement(self) -> Placement:
        return Placement(self._names, self._lost, self._excluded, partial(nodes_to_use, self.run.config()))

    def _choose(self) -> list[str]:
        """The nodes for an attempt: those of the last one, with spares in the places of those that are lost."""
        placement = self._placement()
        usable = placement.usable
        if self._excluded.intersection(usable):
            log.warning("%s: too few other nodes: an excluded one is used", self.run.name)
        # Spares that need not start a parent first come first.
        used = placement.choose(self._used, self.run.config().resources.nodes, self._connected)
        if not used:
            raise ParentError(f"too few nodes are left: {', '.join(usable) or 'none'}")
        return used

    # The parents

    def prepare(self, begun: Begun) -> None:
        self._attempt = begun.number
        for parent in self.parents:
            parent.begin_attempt(begun.number)
        self._names = self._names or slurm.expand(os.environ["SLURM_JOB_NODELIST"])
        self._excluded = set(self.run.status().excluded_nodes)
        self._forget_gone()
        if self._listener is None:
            self._listener = Listener(make_secret(self.run.secret_file), Welcome(preload=list(preload(self.run))))
            skip_step_numbers()  # before srun, whose step gets the next number
        used = self._choose()
        if used != self._used:
            self._used = used
            self.run.record(Event.PLACED, attempt=begun.number, nodes=used, wanted=self.run.config().resources.nodes)
        starting = {name for step in self._steps if step.srun.poll() is None for name in step.nodes}
        self._prepared_by = time.monotonic() + PARENTS_SECONDS
        missing = [
            name
            for name in self._names
            if (name in used or name not in self._lost | self._excluded)
            and name not in self._connected
            and name not in starting
        ]
        if missing:
            self._start(missing, begun)

    def _forget_gone(self) -> None:
        """Take parents that are gone out, and their nodes out of the steps that had started them."""
        for parent in self.parents:
            parent.update()
        gone = {name: parent for name, parent in self._connected.items() if parent.is_gone}
        for name, parent in gone.items():
            while self.failure_of_lost(parent) is None:  # one that ended when its ranks had ended
                time.sleep(0.05)
            del self._connected[name]
        for step in self._steps:
            step.nodes = [name for name in step.nodes if name not in gone]
        self._asking = {}

    def _start(self, names: Sequence[str], begun: Begun) -> None:
        assert self._listener is not None
        environment = {**os.environ, **begun.environment, ADDRESS: self._listener.address}
        for name in PER_TASK:
            environment.pop(name, None)
        with self.run.srun_log(begun.number).open("ab") as said:
            said.write(srun_starts(names).encode())
            said.flush()
            srun = subprocess.Popen(
                self.command(names, self.run.logs(begun.number)),
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # to end it with its helper
            )
        self._steps.append(Step(srun, names, begun.number))

    def command(self, names: Sequence[str], logs: Path) -> list[str]:
        """srun with a parent for each of some nodes."""
        resources = self.run.config().resources
        # Signals are ignored from the first instruction on, and exec keeps it so until Python can take notice of them.
        guard = ["sh", "-c", 'trap "" TERM USR2; exec "$@"', "jobkit"]
        return [
            "srun",
            "--unbuffered",
            f"--nodes={len(names)}",
            f"--ntasks={len(names)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(names)}",
            f"--cpus-per-task={resources.ranks_per_node * resources.cpus_per_task}",
            # A parent, or a node, that is gone leaves the others as they are, ready for the next attempt.
            *("--kill-on-bad-exit=0", "--wait=0", "--no-kill"),
            *(["--overlap"] if self._steps else []),  # beside a step that has parents on other nodes
            "--export=ALL",  # of this environment, whatever `export` said to sbatch
            *self.srun_args,
            f"--output={logs}/node_%N.out",
            f"--error={logs}/node_%N.err",
            *guard,
            *start.words("jobkit.worker.parent", str(self.run.path)),
        ]

    def are_prepared(self) -> bool:
        assert self._listener is not None
        for hello, channel in self._listener.arrived():
            self._connected[hello.node] = Parent(channel, node=hello.node)
            self._connected[hello.node].begin_attempt(self._attempt)
        late = [name for name in self._used if name not in self._connected]
        for step in self._steps:
            if step.srun.poll() is not None and set(late).intersection(step.nodes):
                raise self._not_started(f"srun ended with exit code {step.srun.returncode}", late)
        try:
            late += [name for name in self._used if name not in late and not self._connected[name].is_ready()]
        except ParentError as error:  # it has ended: by itself, or because srun could not start another one
            raise self._not_started(str(error), self._used) from None
        if late and time.monotonic() > self._prepared_by:
            problem = f"no ranks could be started on {', '.join(late)} within {PARENTS_SECONDS:g} s"
            raise self._not_started(problem, late)
        return not late

    def _not_started(self, problem: str, nodes: Sequence[str]) -> ParentError:
        """What to raise where parents are missing on some nodes, with what the sruns that were to start them say of it.

        Nodes of which they say so are lost.
        """
        steps = [step for step in self._steps if set(nodes).intersection(step.nodes)]
        until = time.monotonic() + ASKING_SECONDS
        while True:
            has_ended = all(step.srun.poll() is not None for step in steps)
            said = "".join(srun_said(self.run, number) for number in sorted({step.attempt for step in steps}))
            first = failed_launch(said, self._unusable)
            if first is not None or has_ended or time.monotonic() > until:
                break
            time.sleep(0.05)  # it may say so in a moment
        words = last_words(said)
        message = f"{problem}; srun: {words}" if words else problem
        if first is None:
            return ParentError(message)
        if first.node is not None:
            self._lose(first.node)
        return LaunchError(message, first)

    def _unusable(self) -> list[str]:
        """Nodes of this start of the job, beside those that are lost, which Slurm has taken from it or calls down."""
        names = [name for name in self._names if name not in self._lost]
        with contextlib.suppress(SchedulerError):
            job = slurm.show_job(self.job_id)
            kept = slurm.expand(job.nodes) if job is not None and job.nodes else names
            dead = slurm.dead_node(",".join(names))
            return [name for name in names if name not in kept] or ([dead] if dead else [])
        return []

    def stop_preparing(self) -> None:
        if not all(name in self._connected and self._connected[name].has_imported for name in self._used):
            self._end_steps()

    def places(self) -> list[Place]:
        return places(replace(self.run.config().resources, nodes=len(self._used)))

    def parent_of(self, place: Place) -> Parent:
        return self._connected[self._used[place.node]]

    def environment_of(self, place: Place) -> tuple[dict[str, str], Sequence[int]]:
        """As srun would have told it to a task for each rank."""
        resources = place.resources
        world, per_node, nodes = str(resources.world_size), resources.ranks_per_node, resources.nodes
        each = f"{per_node}(x{nodes})" if nodes > 1 else str(per_node)
        first = place.node * per_node
        return {
            **place.environment,
            "JOBKIT_JOB_ID": self.job_id,
            "SLURM_PROCID": str(place.rank),
            "SLURM_LOCALID": str(place.local_rank),
            "SLURM_NODEID": str(place.node),
            "SLURM_NTASKS": world,
            "SLURM_NPROCS": world,
            "SLURM_NNODES": str(nodes),
            "SLURM_STEP_NUM_TASKS": world,
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NODELIST": ",".join(self._used),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_TASKS_PER_NODE": each,
            "SLURM_STEP_TASKS_PER_NODE": each,
            "SLURM_CPUS_PER_TASK": str(resources.cpus_per_task),
            "SLURM_GTIDS": ",".join(map(str, range(first, first + per_node))),
        }, ()

    def slots_of(self, place: Place) -> str:
        return str(place.local_rank)

    @property
    def is_asking(self) -> bool:
        return bool(self._asking)

    def failure_of_lost(self, parent: Parent) -> FirstFailure | None:
        lost = str(parent.node)
        since = self._asking.pop(parent, time.monotonic())
        step = next(one for one in reversed(self._steps) if lost in one.nodes)
        if (code := step.srun.poll()) is not None and code < 0:
            return FirstFailure(signal=-code)  # srun was killed, and Slurm has ended its step
        if (said := end_on_node(srun_said(self.run, step.attempt), lost)) is not None:
            return said
        if lost in self._lost or time.monotonic() - since > ASKING_SECONDS:
            self.lose(parent)
            return FirstFailure(node=lost, node_lost=True)
        self._asking[parent] = since
        return None

    def lose(self, parent: Parent) -> None:
        self._lose(str(parent.node))

    def _lose(self, lost: str) -> None:
        if lost not in self._lost:
            self._lost.add(lost)
            with contextlib.suppress(OSError):  # it only tells a requeue which nodes cannot be had
                self.run.record(Event.NODE_LOST, attempt=self._attempt, node=lost)
        for step in self._steps:
            step.has_lost_node = step.has_lost_node or lost in step.nodes

    def _end_steps(self) -> None:
        """End all parents and what has started them."""
        for parent in self.parents:
            parent.close()
        until = time.monotonic() + SHUT_DOWN_SECONDS
        whole = [step for step in self._steps if not step.has_lost_node]
        for step in whole:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.srun.wait(max(0.0, until - time.monotonic()))
        if any(step.srun.poll() != 0 for step in whole):
            end_steps(self.job_id)
        for step in self._steps:
            send(step.srun.pid, signal.SIGKILL)
            step.srun.wait()
        self._connected, self._steps = {}, []

    def shut_down(self) -> None:
        self._end_steps()


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
