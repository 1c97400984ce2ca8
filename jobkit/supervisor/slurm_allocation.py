"""A Slurm job as an allocation: its nodes, the srun that starts their agents, Slurm's word, and the way back.

start_agents --> one srun for all nodes --(it ends too early)--> one srun a node: its exit code names the bad node
poll         --> scontrol show job, slurmd of lost nodes --> SchedulerReport, with the cause of a stop (slurm/jobs.py)

main.py makes it, loop.py calls it.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.config.machine import past_shells
from jobkit.config.schema import Config
from jobkit.errors import EXIT_FAILED, SchedulerError, SchedulerMissing
from jobkit.log import log
from jobkit.run.files import is_there
from jobkit.run.rundir import RunDir
from jobkit.slurm import commands, jobs, nodes
from jobkit.supervisor import container, requeue
from jobkit.supervisor.allocation import (
    KILLED_SECONDS,
    MOST_TRIES,
    Allocation,
    LaunchFailure,
    SchedulerReport,
    margin_of,
)
from jobkit.supervisor.diagnosis import last_words
from jobkit.supervisor.lease import HeldLease, NotRunnable, ThisJob, way_back
from jobkit.supervisor.placement import Placement
from jobkit.supervisor.retry import Decision, RestartOptions

NO_CODE = -1
"""Stands for srun's exit code where a node fails without one. Alone it is to blame then, also in a job of one node."""

QUICK_SECONDS = 10.0
"""How long a question may take whose answer is useful and not needed."""

STEP_NUMBERS = 4
"""How many starts of a job in a row number their steps differently: no minute has more, and a number costs an srun."""

PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""Variables of a job that srun takes for options: an agent needs the resources of all ranks of its node."""


@dataclass(eq=False)
class SrunStep:
    """An srun, and the nodes that have an agent of it, or will have."""

    srun: subprocess.Popen[bytes]
    nodes: list[str]
    attempt: int
    log: Path
    log_begin: int
    began: float
    is_single: bool
    ended: float = math.inf

    def words(self) -> str:
        """Return the last lines that srun has printed."""
        with self.log.open("rb") as file:
            file.seek(self.log_begin)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-3:]) or "srun said nothing"


class SlurmAllocation(Allocation):
    """The job of a supervisor that job.sh started on the job's first node. `srun_arguments` are the user's own."""

    host = ""
    signals_stop = False

    def __init__(self, run: RunDir, this_job: ThisJob, config: Config, srun_arguments: Sequence[str] = ()) -> None:
        super().__init__(run, container=config.container)
        self.this_job, self.resources = this_job, config.resources
        self.srun_arguments = srun_arguments
        self._names = nodes.expand(os.environ["SLURM_JOB_NODELIST"])
        self._steps: list[SrunStep] = []
        self._tries: dict[str, int] = {}
        """How often agents were started on nodes that are wanted, until all of them are ready."""
        self._failed: dict[str, tuple[int, str]] = {}
        """Nodes on which no agent came: exit code and words."""
        self._suspects: dict[str, str] = {}
        """Nodes whose agent is gone, and why it was not ready, where it was not."""

    def nodes(self) -> list[str]:
        return self._names

    # Agents

    def start_agents(self, nodes: Sequence[str], attempt: int) -> None:
        launched = {node for step in self._steps for node in step.nodes}
        todo = [node for node in nodes if node not in launched and node not in self._failed]
        for node in [node for node in todo if self._tries.get(node, 0) >= MOST_TRIES]:
            todo.remove(node)
            said = self._words_of_agent(attempt, node) or last_words(self.run.srun_log(attempt))
            self._fail(node, container.EXIT_UNFIT, said)
        if todo:
            self._start(todo, attempt, is_single=len(todo) == 1 and bool(self._steps))

    def _start(self, nodes: list[str], attempt: int, *, is_single: bool) -> None:
        if not self._steps:
            self._skip_step_numbers()
        log = self.run.srun_log(attempt)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as said:
            begin = said.tell()
            srun = subprocess.Popen(
                self._command(nodes, self.run.agent_log(attempt)),
                env=past_shells(*PER_TASK),
                stdin=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,  # it outlives this process: its step goes on under the next supervisor
            )
        self._suspects = {name: why for name, why in self._suspects.items() if name not in nodes}
        self._tries.update({node: self._tries.get(node, 0) + 1 for node in nodes})
        self._steps.append(SrunStep(srun, list(nodes), attempt, log, begin, time.monotonic(), is_single))

    def _command(self, nodes: Sequence[str], log: Path) -> list[str]:
        # SIGTERM is ignored until Python takes it: during the imports it would kill. exec keeps that.
        guard = ["sh", "-c", 'trap "" TERM USR2; exec "$@"', "jobkit"]
        return [
            "srun",
            "--unbuffered",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(nodes)}",
            f"--cpus-per-task={self.resources.ranks_per_node * self.resources.cpus_per_task}",
            # An agent, or a node, that is gone leaves the others as they are. The step needs --no-kill as the job does:
            # else Slurm ends healthy agents at SlurmdTimeout.
            *("--kill-on-bad-exit=0", "--wait=0", "--no-kill"),
            "--overlap",  # beside a step that has agents on other nodes, also of a supervisor before this one
            "--export=ALL",  # whatever `export` said to sbatch
            *self.srun_arguments,
            f"--output={log}",  # written on each node: an agent's words outlive srun and the batch node
            "--open-mode=append",
            *guard,
            *container.command(self.container, self.run.path.parent, "agent", str(self.run.path)),
        ]

    def _skip_step_numbers(self) -> None:
        """Let this start of the job number its steps differently from the last one.

        A busy slurmctld may repeat a kill of the last start's step a minute later, and each start counts from 0.
        """
        for _ in range(self.this_job.restart % STEP_NUMBERS):
            empty = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "true"]
            try:
                subprocess.run(empty, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
            except subprocess.TimeoutExpired:
                return  # the attempt is worth more

    def launch_failure(self, missing: Collection[str], report: SchedulerReport) -> LaunchFailure | None:
        now = time.monotonic()
        for step in list(self._steps):
            late = [node for node in step.nodes if node in missing and node not in self._failed]
            if late and step.srun.poll() is None and now - step.began > self.patience:
                step.srun.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.srun.wait(KILLED_SECONDS)
            if not late or step.srun.poll() is None:
                continue
            step.ended = min(step.ended, now)
            if report.asked_at < step.ended:
                continue  # srun cannot start anything without a controller, which is no node's fault
            is_clear = len(step.nodes) == 1 and step.srun.returncode == container.EXIT_UNFIT
            self._forget(late)
            for node in late:
                if step.is_single or is_clear or self._tries.get(node, 0) >= MOST_TRIES:
                    why = f"no agent called in {self.patience:g} s" if now - step.began > self.patience else ""
                    said = self._words_of_agent(step.attempt, node)
                    self._fail(node, step.srun.returncode, " / ".join(filter(None, [why, step.words(), said])))
                else:
                    self._start([node], step.attempt, is_single=True)
        for node in set(missing) & report.down - set(self._failed):
            self.give_up(node, "Slurm calls the node down")
        if not self._failed or not set(missing).issubset(self._failed):
            return None
        failed = {node: self._failed.pop(node) for node in missing}
        self._forget(failed)
        has_others = any(step.nodes for step in self._steps)
        codes = {code for code, _ in failed.values()}
        is_one_node = len(failed) == 1 and codes == {NO_CODE}
        of_words: dict[str, list[str]] = {}
        for node, (_, said) in sorted(failed.items()):
            of_words.setdefault(said, []).append(node)
        words = "; ".join(f"{', '.join(names)}: {said}" for said, names in of_words.items())
        if len(codes) == 1 and not has_others and not is_one_node:
            is_unfit = codes == {container.EXIT_UNFIT}
            return LaunchFailure(words=words, final=is_unfit or self._are_arguments_refused())
        return LaunchFailure(words=words, nodes=frozenset(failed))

    def _fail(self, node: str, code: int, words: str) -> None:
        """Note that no agent came on a node. A container in which no try of several succeeds is not fit."""
        if self._tries.get(node, 0) >= MOST_TRIES:
            del self._tries[node]  # the next attempt tries again
            words = f"{MOST_TRIES} agents ended before they were ready: {words}"
            code = container.EXIT_UNFIT if self.container is not None else code
        self._failed[node] = code, words

    def _are_arguments_refused(self) -> bool:
        """Return whether srun starts a process here without the user's own arguments alone."""

        def starts(*arguments: str) -> bool:
            words = ["srun", "--overlap", "--nodes=1", "--ntasks=1", *arguments, "true"]
            return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0

        try:
            return bool(self.srun_arguments) and starts() and not starts(*self.srun_arguments)
        except subprocess.TimeoutExpired:  # nobody knows
            return False

    def _words_of_agent(self, attempt: int, node: str) -> str:
        """Return an agent's last line; srun names its log after the host, which may have another name than the node."""
        log = self.run.agent_log(attempt, node)
        logs = [log] if is_there(log) else sorted(log.parent.glob("agent_*.log"), key=lambda file: file.stat().st_mtime)
        return " / ".join(filter(None, [self._suspects.get(node), last_words(logs[-1]) if logs else ""]))

    def launched(self) -> None:
        self._tries.clear()
        self._failed.clear()

    def give_up(self, node: str, why: str) -> None:
        self._failed[node] = NO_CODE, why

    def lost(self, node: str, why: str = "") -> None:
        self._suspects[node] = why
        self._forget([node])

    def _forget(self, nodes: Collection[str]) -> None:
        for step in self._steps:
            step.nodes = [name for name in step.nodes if name not in nodes]

    # Slurm

    def poll(self) -> SchedulerReport | None:
        asked_at = time.monotonic()
        try:
            job = jobs.show(self.this_job.job_id, QUICK_SECONDS)
            now, monotonic = jobs.controller_time(), time.monotonic()
            kill_wait = float(commands.config().get("KillWait", "30 sec").split()[0])
            down = {node for node in set(self._suspects) if not nodes.slurmd_answers(node)}
            if self._tries and (dead := nodes.dead_node(",".join(self._names))) is not None:
                down.add(dead)
        except SchedulerError as error:
            log.warning("%s", error)
            return None
        if job is None:
            return SchedulerReport(asked_at=asked_at, kill_wait=kill_wait, down=frozenset(down))
        seconds = jobs.time_left(job, now) if job.runs else None  # its end is past, and processes have KillWait
        limit = math.inf if seconds is None or job.start is None or job.end is None else job.end - job.start
        return SchedulerReport(
            asked_at=asked_at,
            job=job,
            cause=jobs.stop_cause(job, now, restarts=self.this_job.restart),
            runs=job.runs and not job.is_requeued(now, self.this_job.restart),
            ends=math.inf if seconds is None else monotonic + seconds,
            margin=margin_of(limit),
            kill_wait=kill_wait,
            down=frozenset(down),
        )

    def restart_options(self, held_lease: HeldLease, report: SchedulerReport, placement: Placement) -> RestartOptions:
        # With less time it would be stopped before it has done much.
        has_time = report.ends - time.monotonic() > 1.5 * report.margin
        return RestartOptions(
            in_place=lambda without: report.runs and has_time and placement.can_start_again(without),
            requeue=way_back(report.job),
            spares=max(0, len(placement.usable) - self.resources.nodes),
            elsewhere=lambda without: requeue.could_start_without(
                held_lease.journal, held_lease.config, report.job, without
            ),
        )

    def again(self, held_lease: HeldLease, decision: Decision, lost: Collection[str]) -> None:
        requeue.start_again(held_lease.this_job, held_lease.journal, held_lease.config, decision, lost)


def this_job(run: RunDir) -> ThisJob:
    """Return the job that this process is in. Raises NotRunnable where it is no job of a submission of jobkit's."""
    job_id = jobs.current_job(os.environ)
    assert job_id is not None, "not in a Slurm job"
    restart, node = jobs.restart_count(os.environ), os.environ.get("SLURMD_NODENAME")
    while True:
        try:
            job = jobs.show(job_id, QUICK_SECONDS)
            words = job.comment.split() if job is not None else []
            token = next((word for word in words if word.startswith("jobkit:")), None)
            if token is None:
                raise NotRunnable(f"the comment of job {job_id} holds no token of jobkit's: does a plugin change it?")
            return ThisJob(job_id=job_id, token=token, restart=restart, node=node, job=job)
        except SchedulerMissing as error:
            # job.sh starts another supervisor, three in all, and then leaves the node.
            raise NotRunnable(str(error), EXIT_FAILED) from None
        except SchedulerError as error:
            log.warning("%s", error)
            lease = run.lease()
            if lease is not None and (lease.job_id, lease.restart) == (job_id, restart):
                return ThisJob(
                    job_id=job_id, token=lease.token, restart=restart, node=node
                )  # a supervisor was here before
        time.sleep(2.0)
