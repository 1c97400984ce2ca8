"""An agent without its supervisor: its ranks train on, and it finds out whether the job goes on by itself.

    on this machine    job.sh lives: call on.  It is dead too: soon the ranks save, and the agent ends
    on Slurm           the batch step lives: call on.  It is gone: close the attempt, and put the run into the queue

A batch script starts a killed supervisor again within seconds. Where the script is gone too, with its node or by
itself, only an agent can act. A forked helper asks Slurm and acts: the agent has one thread, and goes on reaping.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from jobkit.agent.children import Children, send
from jobkit.agent.link import Link
from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.slurm import commands, jobs, nodes
from jobkit.supervisor import notify
from jobkit.supervisor.allocation import margin_of
from jobkit.supervisor.attempt import rescue
from jobkit.supervisor.lease import ThisJob
from jobkit.supervisor.requeue import start_again
from jobkit.wire.messages import Hello, StartRanks
from jobkit.worker.forked import die_with_parent

LOCAL_SECONDS = 10.0
"""How long an agent waits where job.sh is dead too, as its lock proves: nobody starts the supervisor again."""

SILENCE_SECONDS = 15.0
"""After this a batch step that Slurm does not show to be alive counts as dead: job.sh would have acted long ago. Slurm
itself learns of a dead node after SlurmdTimeout, 300 s by default, and then may end the agent's own step."""

ASK_SECONDS = 2.0
"""How often Slurm is asked: slurmctld serves all jobs of a cluster."""

LOCAL_SAVE_SECONDS, SLURM_SAVE_SECONDS = 600.0, 60.0
"""The time that ranks get to save. On Slurm twice the KillWait that it leaves them by default."""


class Unsupervised:
    """The knowledge and the acts of an agent while it has no supervisor."""

    def __init__(self, run: RunDir, hello: Hello) -> None:
        self.run, self.hello = run, hello
        self._is_local = hello.step is None
        self._stop_at: float | None = None
        """When the ranks have to be told to stop for the time limit, by the monotonic clock."""
        self._kill_at: float | None = None
        """When ranks that were told to stop are killed; None while they train on."""
        self._looked_at = 0.0
        self._alive_at = 0.0
        """When job.sh was last seen alive."""
        self._helper: int | None = None
        self._is_over = False
        """True once the ranks may only save: the run is in the queue again, or its job on this machine is dead."""

    def note_start(self, start: StartRanks) -> None:
        """Remember the time limit of the ranks that are started now."""
        seconds = start.time_left
        self._stop_at = None if seconds is None else time.monotonic() + seconds - margin_of(seconds)

    def end(self, children: Children) -> None:
        """A supervisor is there again."""
        if self._helper is not None and children.others.pop(self._helper) is None:
            send(self._helper, signal.SIGKILL)
        self._helper, self._kill_at, self._is_over = None, None, False

    def go_on(self, link: Link, children: Children) -> bool:
        """Do the action that is due; return False when the agent has to end."""
        now = time.monotonic()
        if self._is_over or (self._stop_at is not None and now > self._stop_at):
            self._stop(children)
        if self._kill_at is not None and now > self._kill_at:
            children.kill_all()
        if self._is_over and not children.ranks:
            return False
        if now - self._looked_at < ASK_SECONDS or self._is_over:
            return True
        self._looked_at = now
        if not self._is_ours(children):
            log.warning("%s: another job or attempt owns the run", self.run.name)
            return False
        if not self._is_local:
            # A container may hide Slurm's commands: its ranks train until Slurm ends them.
            if commands.is_available("scontrol", "squeue"):
                self._look_after_helper(children)
        elif self.run.alive_lock().is_held():
            self._alive_at = now
        elif min(link.silent_seconds, now - self._alive_at) > LOCAL_SECONDS:
            log.warning("%s: its job is dead; the ranks save and end", self.run.name)
            self._is_over = True
        return True

    def _is_ours(self, children: Children) -> bool:
        try:
            lease = self.run.lease()
        except OSError:  # its disk is away
            return True
        if lease is None:
            return True
        if (lease.job_id, lease.restart) != (self.hello.job_id, self.hello.restart):
            return False
        return not children.ranks or lease.attempt == children.attempt

    def _stop(self, children: Children) -> None:
        """Let the ranks save and end, once."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + (LOCAL_SAVE_SECONDS if self._is_local else SLURM_SAVE_SECONDS)
            children.stop_all()

    # On Slurm

    def _look_after_helper(self, children: Children) -> None:
        """See how the helper ended, and start one if none runs: one that failed is followed by another."""
        if self._helper is not None and (code := children.others[self._helper]) is not None:
            del children.others[self._helper]
            self._helper, self._is_over = None, code == 0
        if self._helper is None and not self._is_over:
            self._helper = self._fork_helper()
            children.others[self._helper] = None

    def _fork_helper(self) -> int:
        """Return the process id of a helper that acts once the batch script is gone."""
        agent = os.getpid()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            die_with_parent(agent)
            _wait_for_end_of_script(self.hello.job_id)
            log.warning("%s: the batch script is gone; %s acts for it", self.run.name, self.hello.node)
            os.kill(agent, signal.SIGTERM)  # the ranks save meanwhile
            close_and_requeue(self.run, self.hello)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def _wait_for_end_of_script(job_id: str) -> None:
    """Return when the batch step is gone by Slurm's word, or has shown no sign of life for SILENCE_SECONDS."""
    alive_at = time.monotonic()
    while time.monotonic() - alive_at < SILENCE_SECONDS:
        try:
            job = jobs.show(job_id)
            # While a job whose script was killed is COMPLETING, its batch step is still listed.
            if job is None or job.ended or job.script_died or not nodes.batch_step_alive(job_id):
                return
            alive_at = time.monotonic()
        except SchedulerError as error:
            log.info("%s", error)
        time.sleep(ASK_SECONDS)


def close_and_requeue(run: RunDir, hello: Hello) -> None:
    """Close the attempt, and put the run into the queue: the begin lock and the lease let one agent of the job act.

    Raises what stands against it: then it is to be tried again.
    """
    lease, contact = run.lease(), run.contact()
    if lease is None or contact is None:
        raise OSError(f"{run.lease_file} or {run.contact_file}: cannot be read")
    job, dead_node = None, None
    try:
        job = jobs.show(hello.job_id)
        if lease.node is not None and not nodes.slurmd_answers(lease.node):
            dead_node = lease.node
    except SchedulerError as error:  # the requeue waits for Slurm, the decision does not
        log.warning("%s", error)
    before = read_status(run)
    this_job = ThisJob(job_id=hello.job_id, token=lease.token, restart=hello.restart, node=lease.node, job=job)
    held_lease = rescue(run, this_job, contact.writer, dead_node)
    if held_lease is not None and held_lease.decision is not None:
        start_again(
            this_job,
            held_lease.journal,
            held_lease.config,
            held_lease.decision,
            [] if dead_node is None else [dead_node],
        )
    notify.tell(run, this_job.token, before)
