"""Submitit's LocalExecutor with jobkit's supervisor, which survives the command that started it.

The supervisor is a process of its own session: the terminal's Ctrl-C reaches the command that follows it, which asks
the supervisor to stop, and the ranks get one signal from one place.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission
from submitit.local import local as submitit_local

from jobkit.errors import InputError
from jobkit.log import log
from jobkit.run.rundir import RunDir
from jobkit.start import words
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.signals import hand_over
from jobkit.supervisor.device_leases import Leases
from jobkit.supervisor.lock_files import FOLDER
from jobkit.supervisor.needs import Need, need_of
from jobkit.supervisor.nodes import FOREGROUND_PIPE
from jobkit.supervisor.queue import take_at_once
from jobkit.supervisor.waiting import is_after_others
from jobkit.worker.main import Worker


class LocalExecutor(submitit_local.LocalExecutor):  # type: ignore[misc]
    """Starts one LaunchPlan on this machine; `nodes` are simulated."""

    def __init__(self, plan: LaunchPlan, foreground_pipe: int | None, leases: Leases | None) -> None:
        self.run = RunDir(plan.run)
        super().__init__(self.run.submitit)
        self.tasks = list(range(plan.config.resources.world_size))
        self.foreground_pipe = foreground_pipe
        self.leases = leases

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit_local.LocalJob[Any]]:
        # Submitit would name the pickle after the supervisor's process, which may look for it before that.
        (delayed,) = delayed_submissions
        delayed.dump(self.run.submitted_pickle)
        hand_over()
        foreground_pipe = {} if self.foreground_pipe is None else {FOREGROUND_PIPE: str(self.foreground_pipe)}
        with self.run.supervisor_log.open("ab") as log:
            process = subprocess.Popen(
                words("jobkit.supervisor.main", "local", str(self.run.path)),
                env={**os.environ, **(self.leases.environment if self.leases else {}), **foreground_pipe},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[*map(int, foreground_pipe.values()), *(self.leases.all_files if self.leases else ())],
                start_new_session=True,
            )
        return [submitit_local.LocalJob(self.folder, job_id=str(process.pid), process=process, tasks=self.tasks)]


def start(plan: LaunchPlan, *, foreground: bool) -> subprocess.Popen[bytes]:
    """Start the supervisor of a plan; in the foreground it stops, with a checkpoint, when this process is gone.

    It waits in line for what it needs, unless that is free now, or somebody has waited on its behalf.
    """
    run, need = RunDir(plan.run), need_of(plan.config, os.environ, queues=plan.turn.queues)
    leases = plan.turn.leases
    if is_after_others(run):
        if leases is not None:
            leases.close()  # it would not use them for as long as it waits
        leases = None
    elif leases is None:
        leases = _take(need)
    read_end, _write_end = os.pipe() if foreground else (None, None)  # the write end stays open as long as we live
    try:
        job = LocalExecutor(plan, read_end, leases).submit(Worker(str(plan.run)))
        process: subprocess.Popen[bytes] = job._process
        try:
            if leases is not None:
                leases.sign(plan.run, process.pid)
        except OSError as error:  # the supervisor is there: the signature only tells others who has its devices
            log.warning("who has the devices of %s cannot be written down: %s", plan.run.name, error)
    finally:
        if leases is not None:
            leases.close()
    if read_end is not None:
        os.close(read_end)
    while process.poll() is None and not run.has_local_supervisor():
        time.sleep(0.01)  # until it holds its lock, others would take it for dead
    return process


def _take(need: Need) -> Leases | None:
    with usable(need.folder):
        return take_at_once(need)


@contextlib.contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Say what to do where the folder of this machine's lock files cannot be used."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; set {FOLDER} to a folder for all") from None
