"""Submitit's LocalExecutor with jobkit's own controller: several simulated nodes, fail-fast, requeueing, no orphans.

The controller is a process of its own session: the terminal's Ctrl-C reaches the command that follows it, which asks
the controller to stop, and the ranks get one signal from one place.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from filelock import Timeout
from submitit.local import local as submitit_local

from jobkit.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_RESUMABLE
from jobkit.launch import attempt as attempts
from jobkit.launch.plan import LaunchPlan
from jobkit.run import status as states
from jobkit.run.files import read_json, write_json
from jobkit.run.rundir import RunDir
from jobkit.runtime.worker import Worker

LIFELINE = "JOBKIT_LIFELINE"
"""Environment variable with a pipe's read end: its end of file means that the command in the foreground is gone."""

KILL_AFTER_FAILURE_SECONDS = 5.0
"""What the ranks beside a failed one get to write down their own error before they are killed."""


class LocalExecutor(submitit_local.LocalExecutor):  # type: ignore[misc]
    """Starts one LaunchPlan on this machine; `nodes` are simulated."""

    def __init__(self, plan: LaunchPlan, lifeline: int | None) -> None:
        super().__init__(RunDir(plan.run).submitit)
        self.plan = plan
        self.lifeline = lifeline

    @classmethod
    def affinity(cls) -> int:
        return 0

    def _num_tasks(self) -> int:
        return self.plan.config.resources.world_size

    def _submit_command(self, command: str) -> submitit_local.LocalJob[Any]:
        environment = dict(os.environ)  # CUDA_VISIBLE_DEVICES included, as the user set it
        kept = () if self.lifeline is None else (self.lifeline,)
        if self.lifeline is not None:
            environment[LIFELINE] = str(self.lifeline)
        with (self.folder / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobkit.launch.local", str(self.plan.run)],
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
    read_end, _write_end = os.pipe() if foreground else (None, None)  # the write end stays open as long as we live
    job = LocalExecutor(plan, read_end).submit(Worker(str(plan.run)))
    if read_end is not None:
        os.close(read_end)
    process: subprocess.Popen[bytes] = job._process
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
        self.tasks: list[subprocess.Popen[bytes]] = []
        self.stop_signals = 0
        self.lifeline = int(os.environ[LIFELINE]) if LIFELINE in os.environ else None

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
                self.run_dir.record("interrupted", cause="user")
                break
            begun = attempts.begin(self.run_dir, job_id, "local")
            self.attempt = begun.number
            returncode = self._run_tasks(begun, job_id)
            decision = attempts.end(self.run_dir, returncode, "local", job_id)
            if not decision.requeue or self.stop_signals:
                break
            self.run_dir.record("requeued", job_id=job_id, cause=decision.reason)
        state = self.run_dir.status().state
        return {states.FINISHED: EXIT_FINISHED, states.FAILED: EXIT_FAILED}.get(state, EXIT_RESUMABLE)

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop_signals += 2 if number == signal.SIGINT else 1  # what follows from it happens in the loop, not here

    def _wait_for_pickle(self, job_id: str) -> None:
        # Submitit names the pickle after our pid, so it is moved into place only after we were started.
        pickle = self.run_dir.submitit / f"{job_id}_submitted.pkl"
        for _ in range(6000):
            if pickle.exists() or self.stop_signals:
                return
            time.sleep(0.01)

    def _run_tasks(self, begun: attempts.Begun, job_id: str) -> int:
        """Start the ranks and wait for their end; the first bad exit code, or 0."""
        self._start(begun, job_id)
        told, failed_at = 0, None
        try:
            while any(code is None for code in (task.poll() for task in self.tasks)):
                self._watch_lifeline()
                if self.stop_signals > told:
                    told = self.stop_signals
                    self._stop_tasks(hard=told > 1)
                if failed_at is None and any(task.returncode for task in self.tasks):
                    failed_at = time.monotonic()
                if failed_at is not None and time.monotonic() - failed_at > KILL_AFTER_FAILURE_SECONDS:
                    self._stop_tasks(hard=True)  # a rank is dead: the others would wait for it for ever
                time.sleep(0.05)
        finally:
            self._stop_tasks(hard=True)
        return next((task.returncode for task in self.tasks if task.returncode), 0)

    def _start(self, begun: attempts.Begun, job_id: str) -> None:
        resources = self.config.resources
        command = LaunchPlan(run=self.run_dir.path, config=self.config, cluster="local", scheduler="local").task_command
        shared = {
            **{name: value for name, value in os.environ.items() if name != LIFELINE},
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
            with self._log(rank, "out") as out, self._log(rank, "err") as err:
                self.tasks.append(
                    subprocess.Popen(command, env=shared | own, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
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

    def _stop_tasks(self, *, hard: bool) -> None:
        if not hard and read_json(self.run_dir.notice_file(self.attempt)) is None:
            write_json(self.run_dir.notice_file(self.attempt), {"cause": "user"})
        for task in self.tasks:
            if task.poll() is None:
                task.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
        if hard:
            for task in self.tasks:
                task.wait()


def main(arguments: list[str]) -> int:
    """`python -m jobkit.launch.local RUN`: control one run until it ends."""
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
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
