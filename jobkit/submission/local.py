"""Submitit's LocalExecutor with jobkit's own controller: several simulated nodes, fail-fast, requeueing, no orphans.

The controller is a process of its own session: the terminal's Ctrl-C reaches the command that follows it, which asks
the controller to stop, and the ranks get one signal from one place.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from filelock import Timeout
from submitit.local import local as submitit_local

from jobkit import slurm
from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.run.config import Resources
from jobkit.run.events import Event
from jobkit.run.files import read_json, write_json
from jobkit.run.rundir import RunDir
from jobkit.run.status import State
from jobkit.submission.plan import LaunchPlan
from jobkit.supervisor import attempt as attempts
from jobkit.supervisor.device_leases import LEASES, Leases, take
from jobkit.supervisor.diagnosis import FirstFailure
from jobkit.supervisor.watchdog import KILL_AFTER_FAILURE_SECONDS, Watch, end_hung
from jobkit.worker.main import Worker

LIFELINE = "JOBKIT_LIFELINE"
"""Environment variable with a pipe's read end: its end of file means that the command in the foreground is gone."""


LOOK_SECONDS = 0.25
"""How often the controller looks for a notice, at the time limit and at the ranks' signs of life."""


class LocalExecutor(submitit_local.LocalExecutor):  # type: ignore[misc]
    """Starts one LaunchPlan on this machine; `nodes` are simulated."""

    def __init__(self, plan: LaunchPlan, lifeline: int | None, leases: Leases) -> None:
        super().__init__(RunDir(plan.run).submitit)
        self.plan = plan
        self.lifeline = lifeline
        self.leases = leases

    @classmethod
    def affinity(cls) -> int:
        return 0

    def _num_tasks(self) -> int:
        return self.plan.config.resources.world_size

    def _submit_command(self, command: str) -> submitit_local.LocalJob[Any]:
        environment = {**os.environ, **self.leases.environment}
        kept = self.leases.files if self.lifeline is None else (self.lifeline, *self.leases.files)
        if self.lifeline is not None:
            environment[LIFELINE] = str(self.lifeline)
        with (self.folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobkit.submission.local", str(self.plan.run)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=kept,
                start_new_session=True,
            )
        return submitit_local.LocalJob(
            folder=self.folder, job_id=str(process.pid), process=process, tasks=list(range(self._num_tasks()))
        )


def start(plan: LaunchPlan, *, foreground: bool) -> subprocess.Popen[bytes]:
    """Start the controller of a plan; in the foreground it stops, with a checkpoint, when this process is gone."""
    resources = plan.config.resources
    leases = take(plan.config.device, resources.world_size * resources.gpus_per_task, plan.run, os.environ)
    read_end, _write_end = os.pipe() if foreground else (None, None)  # the write end stays open as long as we live
    try:
        job = LocalExecutor(plan, read_end, leases).submit(Worker(str(plan.run)))
        process: subprocess.Popen[bytes] = job._process
        leases.sign(plan.run, process.pid)
    finally:
        leases.close()
    if read_end is not None:
        os.close(read_end)
    lock = RunDir(plan.run).alive_lock()
    while process.poll() is None:  # until it holds its lock, others would take it for dead
        try:
            lock.acquire(blocking=False)
        except Timeout:
            break
        lock.release()
        time.sleep(0.01)
    return process


class Controller:
    """Runs the attempts of one run on this machine until it ends. SIGTERM stops it gracefully, SIGINT kills."""

    def __init__(self, run: RunDir) -> None:
        self.run_dir = run
        self.config = run.config()
        self.attempt = 0
        self.ending = False
        """Whether the ranks of this attempt have been told to stop."""
        self.tasks: list[subprocess.Popen[bytes]] = []
        self.stop_signals = 0
        self.lifeline = int(os.environ[LIFELINE]) if LIFELINE in os.environ else None
        self.leases = Leases.inherited(os.environ)

    def listen(self) -> None:
        """Take signals from here on; before the lock is held, by which others know that there is someone to signal."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """All attempts; returns the exit code of the whole: 0 finished, 1 failed, 75 interrupted but resumable."""
        job_id = str(os.getpid())
        self._wait_for_pickle(job_id)
        while True:
            if self.stop_signals:  # before there was a rank to tell
                self.run_dir.record(Event.INTERRUPTED, cause="user")
                break
            begun = attempts.begin(self.run_dir, job_id=job_id, scheduler="local")
            self.attempt, self.ending = begun.number, False
            first = self._run_tasks(begun, job_id)
            decision = attempts.end(self.run_dir, begun.number, job_id, first=first, all_returned=self._all_returned)
            if decision.action == "stop" or self.stop_signals:
                break
            self.run_dir.record(Event.REQUEUED, job_id=job_id, cause=decision.reason)
        state = self.run_dir.status().state
        return {State.FINISHED: EXIT_FINISHED, State.FAILED: EXIT_FAILED}.get(state, EXIT_RESUMABLE)

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop_signals += 2 if number == signal.SIGINT else 1  # what follows from it happens in the loop, not here

    def _wait_for_pickle(self, job_id: str) -> None:
        # Submitit names the pickle after our pid, so it is moved into place only after we were started.
        pickle = self.run_dir.submitit / f"{job_id}_submitted.pkl"
        for _ in range(6000):
            if pickle.exists() or self.stop_signals:
                return
            time.sleep(0.01)

    def _run_tasks(self, begun: attempts.Begun, job_id: str) -> FirstFailure | None:
        """Start the ranks and wait for their end; the first that ended badly, by itself."""
        kills_before = kernel_oom_kills()
        self._start(begun, job_id)
        limit = TimeLimit(self.config.resources)
        watch = Watch.of(self.run_dir, self.attempt)
        told, looked = 0, 0.0
        first: FirstFailure | None = None
        failed_at = 0.0
        try:
            while None in [task.poll() for task in self.tasks]:  # all of them: a dead one is known by its poll alone
                self._watch_lifeline()
                if self.stop_signals > told:
                    told = self.stop_signals
                    self._stop_tasks("user")
                    if told > 1:
                        self._signal("KILL")
                if first is None and (first := self._first_failure(kills_before)) is not None:
                    failed_at = time.monotonic()
                if first is not None and time.monotonic() - failed_at > KILL_AFTER_FAILURE_SECONDS:
                    self._signal("KILL")  # a rank is dead: the others would wait for it for ever
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = time.monotonic()
                    self._look_around(limit, watch)
                time.sleep(0.05)
        finally:
            first = first or self._first_failure(kills_before)
            self._signal("KILL")
            for task in self.tasks:
                task.wait()
        return first

    @property
    def _all_returned(self) -> bool:
        """Whether every rank has ended with exit code 0."""
        return all(task.returncode == 0 for task in self.tasks)

    def _look_around(self, limit: TimeLimit, watch: Watch) -> None:
        """What Slurm would do here: obey `jobkit preempt`, keep the time limit, end what hangs."""
        notice = read_json(self.run_dir.stop_request_file(self.attempt))
        if isinstance(notice, dict) and not self.ending:
            self.ending = True
            self._signal("KILL" if notice.get("grace") == 0 else "TERM")
        if limit.is_over:
            self._stop_tasks("timeout")
            self._signal("KILL")
        elif limit.is_near:
            self._stop_tasks("timeout")
        if error := watch.look():
            end_hung(self.run_dir, self.attempt, error, self._signal)

    def _first_failure(self, kills_before: int) -> FirstFailure | None:
        asked_for = (EXIT_RESUMABLE, -signal.SIGKILL) if self.ending else ()
        codes = {rank: task.returncode for rank, task in enumerate(self.tasks)}
        dead = [(code, rank) for rank, code in codes.items() if code and code not in asked_for]
        if not dead:
            return None
        code, rank = min(dead, key=lambda one: one[0] > 0)  # one that was killed: the others may have missed it
        by = -code if code < 0 else None
        oom = by == signal.SIGKILL and kernel_oom_kills() > kills_before
        return FirstFailure(rank=rank, signal=by, code=None if by else code, out_of_memory=oom)

    def _start(self, begun: attempts.Begun, job_id: str) -> None:
        resources = self.config.resources
        command = LaunchPlan(run=self.run_dir.path, config=self.config, cluster="local", scheduler="local").task_command
        shared = {
            **{name: value for name, value in os.environ.items() if name not in (LIFELINE, LEASES)},
            **begun.environment,
            "SUBMITIT_EXECUTOR": "jobkit",
            "JOBKIT_JOB_ID": job_id,
            "JOBKIT_NTASKS": str(resources.world_size),
            "JOBKIT_NNODES": str(resources.nodes),
        }
        self.tasks = []
        for rank in range(resources.world_size):
            node, local_rank = divmod(rank, resources.tasks_per_node)
            own = {"JOBKIT_PROCID": str(rank), "JOBKIT_LOCALID": str(local_rank), "JOBKIT_NODEID": str(node)}
            visible, leases = self.leases.of_rank(rank, resources.gpus_per_task)
            with self._log(rank, "out") as out, self._log(rank, "err") as err:
                self.tasks.append(
                    subprocess.Popen(
                        command,
                        env=shared | own | visible,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        pass_fds=leases,  # a rank that outlives us, for its checkpoint, still uses its device
                        start_new_session=True,  # a group of its own: what it starts ends with it
                    )
                )

    def _log(self, rank: int, stream: str) -> IO[bytes]:
        return self.run_dir.rank_log(self.attempt, rank, stream).open("ab")

    def _watch_lifeline(self) -> None:
        """The foreground command died (a closed terminal, a kill -9): stop as if it had asked to."""
        if self.lifeline is None:
            return
        readable = select.select([self.lifeline], [], [], 0)[0]
        if readable:
            os.close(self.lifeline)
            self.lifeline = None
            self.stop_signals += 1

    def _stop_tasks(self, cause: str) -> None:
        """Ask the ranks to stop, once, and say why."""
        if self.ending:
            return
        self.ending = True
        if read_json(self.run_dir.stop_request_file(self.attempt)) is None:
            with contextlib.suppress(OSError):  # a full disk must not keep the ranks from saving what they can
                write_json(self.run_dir.stop_request_file(self.attempt), {"cause": cause})
        self._signal("TERM")

    def _signal(self, name: str) -> None:
        """Send a signal to every rank; one that is not polite reaches what the rank has started, too."""
        number = signal.Signals[f"SIG{name}"]
        for task in self.tasks:
            with contextlib.suppress(ProcessLookupError):
                if name != "TERM":
                    os.killpg(task.pid, number)
                elif task.poll() is None:
                    task.send_signal(number)


class TimeLimit:
    """`resources.time` as Slurm would keep it, margin included; none where the YAML says nothing."""

    def __init__(self, resources: Resources) -> None:
        self.seconds = None if resources.time == "auto" else float(resources.seconds)
        self._started = time.monotonic()

    @property
    def is_near(self) -> bool:
        """Whether it is time to write the last checkpoint."""
        return self._left(slurm.stop_margin(self.seconds or 0.0)) <= 0

    @property
    def is_over(self) -> bool:
        """Whether the attempt has had its time."""
        return self._left(0.0) <= 0

    def _left(self, margin: float) -> float:
        if self.seconds is None:
            return math.inf
        return self._started + self.seconds - margin - time.monotonic()


def kernel_oom_kills() -> int:
    """How many processes the kernel, or this control group, has killed for lack of memory so far."""
    count = 0
    for file in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError):
            count += sum(int(number) for number in re.findall(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE))
    return count


def main(arguments: list[str]) -> int:
    """`python -m jobkit.submission.local RUN`: control one run until it ends."""
    run = RunDir(Path(arguments[0]))
    controller = Controller(run)
    controller.listen()
    lock = run.alive_lock()
    try:
        # Whoever asks whether we live takes the lock for an instant.
        lock.acquire(timeout=10)
    except Timeout:
        print(f"jobkit: {run.name} is already being run by another controller", file=sys.stderr)
        return EXIT_FAILED
    try:
        return controller.run()
    except attempts.NotRunnable as error:
        print(f"jobkit: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"jobkit: {run.name} cannot go on: {error}; the same command continues it", file=sys.stderr)
        return EXIT_RESUMABLE
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
