"""The processes of an attempt's ranks: of this machine, or of a step of the Slurm job. Both look alike from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from jobkit import slurm
from jobkit.errors import EXIT_RESUMABLE, SchedulerError
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import Begun
from jobkit.supervisor.device_leases import LEASES, Leases
from jobkit.supervisor.diagnosis import FirstFailure, first_failure, first_failure_of_job, srun_said
from jobkit.supervisor.fork_client import TASK_MODULES, ForkClient, ForkServerError, lives

FOREGROUND_PIPE = "JOBKIT_FOREGROUND_PIPE"
"""Environment variable with a pipe's read end: its end of file means that the command in the foreground is gone."""

COMMAND_MODULES = ("submitit.core.submission", "jobkit.worker.main")
"""What a rank imports before it becomes the YAML's `command`, which may never need torch."""

STEP_NUMBERS = 4
"""How many starts of a job in a row give their steps different numbers: a kill is repeated a minute later at most."""

END_STEPS_SECONDS = 30.0
"""How long ranks that have outlived their srun are killed again and again: a node may answer as late as KillWait."""


class Ranks(Protocol):
    """The ranks of one attempt at a time."""

    poll_seconds: float
    """How often to ask whether they run."""

    def prepare(self, begun: Begun) -> None:
        """Begin with what takes time before the ranks of an attempt can start."""

    def are_prepared(self) -> bool:
        """Whether that is done. Raises ForkServerError where it cannot be."""

    def start(self, begun: Begun) -> None:
        """Start all ranks of an attempt."""

    def are_running(self) -> bool:
        """Whether any rank has not ended."""

    def signal(self, name: str) -> None:
        """Send a signal, by its name without SIG, to every rank; raises SchedulerError where that did not work."""

    def first_failure(self) -> FirstFailure | None:
        """The first rank that ended as it should not, while the others may run."""

    def cause_of_death(self, job: slurm.JobInfo | None) -> FirstFailure | None:
        """The first rank that ended as it should not, when all have ended; `job` is Slurm's record."""

    def all_returned(self) -> bool:
        """Whether every rank has ended with exit code 0."""

    def close(self) -> None:
        """End what is left of them."""


class LocalRanks:
    """Processes of this machine, each with its logs and its devices; nodes are simulated.

    The process that forks them lives as long as the supervisor: the ranks of a next attempt need not import torch.
    """

    poll_seconds = 0.05  # a read of our own memory and of one socket

    def __init__(self, run: RunDir, job_id: str) -> None:
        self.run = run
        self.job_id = job_id
        self.leases = Leases.inherited(os.environ)
        self._outside = {name: value for name, value in os.environ.items() if name not in (FOREGROUND_PIPE, LEASES)}
        self._server: ForkClient | None = None
        self._pids: list[int] = []
        self._told = False
        """Whether they have been signalled to stop."""
        self._first: FirstFailure | None = None
        self._oom_kills = 0

    def prepare(self, begun: Begun) -> None:
        self._pids, self._told, self._first = [], False, None
        if self._server is None or self._server.is_gone:
            self._start_server(begun)

    def are_prepared(self) -> bool:
        assert self._server is not None
        return self._server.is_ready()

    def _start_server(self, begun: Begun) -> None:
        # What a library reads when it is imported, as OMP_NUM_THREADS, is to be that of the ranks.
        preload = COMMAND_MODULES if self.run.config().command else TASK_MODULES
        self._server = ForkClient.start({**self._outside, **begun.environment}, preload)

    def start(self, begun: Begun) -> None:
        self._pids, self._told, self._first, self._oom_kills = [], False, None, kernel_oom_kills()
        try:
            self._fork_all(begun)
        except ForkServerError as error:  # it was killed, for its memory or by somebody, since the last attempt
            log.warning("%s; starting another one", error)
            self._end_forked()
            self._server, self._pids = None, []
            self._fork_all(begun)

    def _fork_all(self, begun: Begun) -> None:
        resources = self.run.config().resources
        if self._server is None:
            self._start_server(begun)
        assert self._server is not None
        shared = {
            **self._outside,
            **begun.environment,
            "SUBMITIT_EXECUTOR": "jobkit",
            "JOBKIT_JOB_ID": self.job_id,
            "JOBKIT_NTASKS": str(resources.world_size),
            "JOBKIT_NNODES": str(resources.nodes),
        }
        for rank in range(resources.world_size):
            node, local_rank = divmod(rank, resources.tasks_per_node)
            own = {"JOBKIT_PROCID": str(rank), "JOBKIT_LOCALID": str(local_rank), "JOBKIT_NODEID": str(node)}
            visible, leases = self.leases.of_rank(rank, resources.gpus_per_task)
            out_file, err_file = (self.run.rank_log(begun.number, rank, stream) for stream in ("out", "err"))
            with out_file.open("ab") as out, err_file.open("ab") as err:
                pid = self._server.fork(
                    ("submitit.core.submission:process_job", [str(self.run.submitit)]),
                    environment=shared | own | visible,
                    cwd=Path.cwd(),
                    stdout=out.fileno(),
                    stderr=err.fileno(),
                    files=leases,  # a rank that outlives the supervisor, for its checkpoint, still uses its device
                )
            self._pids.append(pid)

    def _end_forked(self) -> None:
        """Kill the ranks that the last server has forked: two processes of one rank would both join the attempt."""
        assert self._server is not None
        for pid in self._pids:
            while lives(pid):
                for kill in (os.killpg, os.kill):  # it may not have a group of its own yet
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
                time.sleep(self.poll_seconds)

    def _codes(self) -> list[int | None]:
        """The exit code of each rank, or the negative of the signal that killed it; None where it runs."""
        return [self._server.poll(pid) for pid in self._pids] if self._server is not None else []

    def are_running(self) -> bool:
        return None in self._codes()

    def signal(self, name: str) -> None:
        """Send a signal to every rank; all but TERM reach what the rank has started, too."""
        number = signal.Signals[f"SIG{name}"]
        self._told = self._told or name in ("TERM", "KILL")
        for pid, code in zip(self._pids, self._codes(), strict=True):
            with contextlib.suppress(ProcessLookupError):
                if name == "TERM" or not _has_group(pid):  # one that was forked just now has no group of its own yet
                    if code is None:
                        os.kill(pid, number)
                else:
                    os.killpg(pid, number)

    def first_failure(self) -> FirstFailure | None:
        """The first rank that was found dead; one that was killed before one that exited and may have missed it."""
        if self._first is None:
            codes = self._codes()
            # Without their server they have SIGTERM and save, and nobody knows their exit codes.
            # Exit code 75 and SIGKILL are what was asked for once they have been told to stop.
            told = self._told or (self._server is not None and self._server.is_gone)
            asked_for = (EXIT_RESUMABLE, -signal.SIGKILL) if told else ()
            dead = [(code, rank) for rank, code in enumerate(codes) if code and code not in asked_for]
            if dead:
                code, rank = min(dead, key=lambda one: one[0] > 0)
                by = -code if code < 0 else None
                oom = by == signal.SIGKILL and kernel_oom_kills() > self._oom_kills
                self._first = FirstFailure(rank=rank, signal=by, code=None if by else code, out_of_memory=oom)
        return self._first

    def cause_of_death(self, job: slurm.JobInfo | None) -> FirstFailure | None:
        return self.first_failure()

    def all_returned(self) -> bool:
        codes = self._codes()  # none where no rank was started
        return bool(codes) and all(code == 0 for code in codes)

    def close(self) -> None:
        """Kill the ranks that are left, and what they have started; their server stays, until the supervisor ends."""
        if self._server is not None and not self._server.has_imported:
            self._server.kill()  # it may never be done with its imports
            self._server = None
        self.first_failure()  # before they are killed: SIGKILL would look like the cause
        self.signal("KILL")
        while self.are_running():
            time.sleep(self.poll_seconds)


def _has_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kernel_oom_kills() -> int:
    """How many processes the kernel, or this control group, has killed for lack of memory so far."""
    count = 0
    for file in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError):
            count += sum(int(number) for number in re.findall(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE))
    return count


class SlurmRanks:
    """The tasks of one srun. `srun_args` are the user's own."""

    poll_seconds = 0.25  # each poll reads a file of the file server

    def __init__(self, run: RunDir, job_id: str, srun_args: Sequence[str] = ()) -> None:
        self.run = run
        self.job_id = job_id
        self.srun_args = srun_args
        self.attempt = 0
        self._srun: subprocess.Popen[bytes] | None = None

    def prepare(self, begun: Begun) -> None:
        """Nothing: srun's tasks do their imports themselves."""

    def are_prepared(self) -> bool:
        return True

    def start(self, begun: Begun) -> None:
        """Start srun, whose messages go to a file: they say which rank failed first."""
        self.attempt = begun.number
        skip_step_numbers()  # before srun, whose step gets the next number
        # Submitit exports SUBMITIT_EXECUTOR=slurm; ours is the environment that leaves signals to jobkit.
        environment = {**os.environ, **begun.environment, "SUBMITIT_EXECUTOR": "jobkit"}
        with self.run.srun_log(begun.number).open("ab") as said:
            self._srun = subprocess.Popen(self.command(), env=environment, stdin=subprocess.DEVNULL, stderr=said)

    def command(self) -> list[str]:
        """srun with what every rank executes; Submitit's pickle in that folder names the run directory."""
        logs = self.run.logs(self.attempt)
        # Signals are ignored from the first instruction on, and exec keeps it so until the worker can take notice of
        # them: one that comes during the imports would otherwise kill the task.
        guard = ["sh", "-c", 'trap "" TERM USR2; exec "$@"', "jobkit"]
        return [
            "srun",
            "--unbuffered",
            "--kill-on-bad-exit=1",  # without it the other ranks of a dead one hang until the time limit
            f"--cpus-per-task={self.run.config().resources.cpus_per_task}",  # not sbatch's own since Slurm 22.05
            *self.srun_args,
            f"--output={logs}/rank_%t.out",
            f"--error={logs}/rank_%t.err",
            *guard,
            *(sys.executable, "-u", "-m", "submitit.core._submit", str(self.run.submitit)),
        ]

    def are_running(self) -> bool:
        """Whether srun runs: it may wait for a lost node long after the other ranks have ended."""
        return self._srun is not None and self._srun.poll() is None

    def signal(self, name: str) -> None:
        slurm.signal_steps(self.job_id, name)

    def first_failure(self) -> FirstFailure | None:
        """The first rank that srun names; one that exits with 75 has stopped as it was asked by Slurm."""
        first = first_failure(srun_said(self.run, self.attempt))
        return None if first is not None and first.code == EXIT_RESUMABLE else first

    def cause_of_death(self, job: slurm.JobInfo | None) -> FirstFailure | None:
        """The node that died, or the first rank that srun names."""
        if self.all_returned():
            return None
        said = srun_said(self.run, self.attempt)
        sys.stderr.write(said)  # where Slurm would have put it
        code = (self._srun and self._srun.returncode) or 0
        by = -code if code < 0 else code - 128  # srun was killed, or says that a rank was
        return first_failure_of_job(said, job) or (FirstFailure(signal=by) if by > 0 else None)

    def all_returned(self) -> bool:
        """Whether srun has ended with 0: then every rank has."""
        return self._srun is not None and self._srun.returncode == 0

    def close(self) -> None:
        """Kill ranks that have outlived their srun."""
        if self._srun is not None and self._srun.returncode:
            end_steps(self.job_id)


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
