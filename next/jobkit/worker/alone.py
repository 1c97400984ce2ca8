"""An agent without its supervisor: its ranks train on, and it finds out whether the job goes on by itself.

    on this machine    job.sh lives: call on.  It is dead too: after a minute the ranks save, and the agent ends
    on Slurm           the batch step lives: call on.  It is gone: close the attempt, and put the run into the queue

A batch script starts a killed supervisor again within seconds. Where the script is gone too, with its node or by
itself, only an agent of another node can act. Questions to Slurm are asked by forked helpers: the agent has one thread.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from enum import IntEnum

from jobkit.errors import SchedulerError
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.slurm import nodes
from jobkit.supervisor.protocol import Hello, Start
from jobkit.worker.children import Children
from jobkit.worker.forked import die_with_parent
from jobkit.worker.link import Link
from jobkit.worker.rescue import close_and_requeue

LOCAL_SECONDS = 60.0
"""How long an agent waits where job.sh is dead too: the agent is the last process of its job."""

SILENCE_SECONDS = 15.0
"""After this a batch step that Slurm does not show to be alive counts as dead: job.sh would have acted long ago. Slurm
itself learns of a dead node after SlurmdTimeout, 300 s by default, and then may end the agent's own step."""

ASK_SECONDS = 2.0
"""How often Slurm is asked: slurmctld serves all jobs of a cluster."""

LOCAL_SAVE_SECONDS, SLURM_SAVE_SECONDS = 600.0, 60.0
"""What ranks get to save. On Slurm twice the KillWait that it leaves them by default."""

MARGIN_SECONDS = 90.0
"""How long before the time limit ranks are told to stop where no supervisor does it; a fifth of a shorter time."""


class _Answer(IntEnum):
    """Exit code of a helper."""

    DONE = 0
    """The batch step lives; or the run is in the queue again."""
    GONE = 10
    SILENT = 11


class Alone:
    """What an agent knows, and does, while it has no supervisor."""

    def __init__(self, run: RunDir, hello: Hello) -> None:
        self.run, self.hello = run, hello
        self._stop_at: float | None = None
        """When the ranks have to be told to stop for the time limit, by the monotonic clock."""
        self._kill_at: float | None = None
        """When ranks that were told to stop are killed; None while they train on."""
        self._looked_at = 0.0
        self._alive_at = 0.0
        """When job.sh was last seen alive."""
        self._helper: int | None = None
        self._is_gone = False
        """True once Slurm said that the batch step is gone, or was silent for too long."""
        self._is_over = False
        """True once the run is in the queue again, or is not to be: nothing is left to do but to save."""

    def note_start(self, start: Start) -> None:
        """Remember the time limit of the ranks that are started now."""
        seconds = start.time_left
        self._stop_at = None if seconds is None else time.monotonic() + seconds - min(MARGIN_SECONDS, seconds / 5)

    def end(self, children: Children) -> None:
        """A supervisor is there again."""
        if self._helper is not None and children.others.get(self._helper, 0) is None:
            os.kill(self._helper, signal.SIGKILL)
        self._helper, self._kill_at, self._is_gone = None, None, False

    def go_on(self, link: Link, children: Children) -> bool:
        """Do what is due now; return False when the agent has to end."""
        now = time.monotonic()
        if self._stop_at is not None and now > self._stop_at:
            self._stop(children)
        if self._kill_at is not None and now > self._kill_at:
            children.kill_all()
        if self._is_over and not children.ranks:
            return False
        is_due = now - self._looked_at > ASK_SECONDS
        if is_due:
            self._looked_at = now
            if not self._is_ours(children):
                log.warning("%s: another job or attempt owns the run", self.run.name)
                return False
        if self.hello.step is not None:
            self._ask_slurm(link, children, is_due)
        elif is_due and self.run.alive_lock().is_held():
            self._alive_at = now
        elif min(link.silent_seconds, now - self._alive_at) > LOCAL_SECONDS and not self._is_over:
            log.warning("%s: its job is dead; the ranks save and end", self.run.name)
            self._is_over = True
            self._stop(children)
        return True

    def _is_ours(self, children: Children) -> bool:
        lease = self.run.lease()
        if lease is None:
            return True  # its disk is away, or it is being made
        if (lease.job_id, lease.restart) != (self.hello.job_id, self.hello.restart):
            return False
        return not children.ranks or lease.attempt == children.attempt

    def _stop(self, children: Children) -> None:
        """Let the ranks save and end, once."""
        if self._kill_at is None:
            seconds = LOCAL_SAVE_SECONDS if self.hello.step is None else SLURM_SAVE_SECONDS
            self._kill_at = time.monotonic() + seconds
            children.stop_all()

    # On Slurm

    def _ask_slurm(self, link: Link, children: Children, is_due: bool) -> None:
        if self._helper is not None:
            code = children.others.get(self._helper)
            if code is None:
                return
            del children.others[self._helper]
            self._helper = None
            self._note(code, link)
        if self._is_gone and not self._is_over:
            self._stop(children)
        if is_due and not self._is_over:
            job_id = self.hello.job_id
            if self._is_gone:
                self._fork(children, lambda: close_and_requeue(self.run, self.hello))
            else:
                self._fork(children, lambda: _ask(job_id))

    def _note(self, code: int, link: Link) -> None:
        """Take in how a helper ended."""
        if self._is_gone:
            self._is_over = code == _Answer.DONE  # else it is tried again
        elif code != _Answer.DONE and (code == _Answer.GONE or link.silent_seconds > SILENCE_SECONDS):
            log.warning("%s: the batch script is gone; %s acts for it", self.run.name, self.hello.node)
            self._is_gone = True

    def _fork(self, children: Children, function: Callable[[], int]) -> None:
        agent = os.getpid()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._helper = pid
            children.others[pid] = None
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            die_with_parent(agent)
            code = function()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def _ask(job_id: str) -> int:
    try:
        return _Answer.DONE if nodes.batch_step_alive(job_id) else _Answer.GONE
    except SchedulerError as error:
        log.info("%s", error)
        return _Answer.SILENT
