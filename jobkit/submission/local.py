"""Submitit's LocalExecutor with jobkit's job script, which outlives the command that started it.

    command --Popen--> bash job.sh (a session of its own) -> supervisor -> agent -> ranks

The terminal's Ctrl-C reaches the command alone. It asks the supervisor to stop (follow.py), and the ranks get one
signal from one place. A SIGHUP that the command ignores (nohup) stays ignored: exec keeps that.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

from submitit.core.utils import DelayedSubmission
from submitit.local import local as submitit_local

from jobkit.config.machine import clean_environment
from jobkit.run.files import FOR_OWNER, write_atomic
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.sbatch import JOB_SCRIPT, definitions
from jobkit.worker.main import Worker


class LocalExecutor(submitit_local.LocalExecutor):  # type: ignore[misc]
    """Starts one LaunchPlan on this machine; its nodes are simulated."""

    def __init__(self, plan: LaunchPlan, token: str, job_exists: Callable[[], None]) -> None:
        self.plan, self.token, self.job_exists = plan, token, job_exists
        super().__init__(plan.run.submitit)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[submitit_local.LocalJob[Any]]:
        run = self.plan.run
        delayed_submissions[0].dump(run.pickle_file)
        write_atomic(run.batch_script, script(self.plan), mode=FOR_OWNER)
        # The lock proves that the job lives. An earlier job may still run its teardown lines: they are waited for.
        with run.alive_lock() as alive, run.job_log.open("ab") as log:
            self.job_exists()  # not before: Ctrl-C ends the wait for the lock
            (descriptor,) = alive.inheritable()
            variables = {"JOBKIT_TOKEN": self.token, "JOBKIT_ALIVE_FD": str(descriptor)}
            process = subprocess.Popen(
                ["bash", str(run.batch_script)],
                env={**clean_environment(), **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[descriptor],
                start_new_session=True,
            )
        return [submitit_local.LocalJob(self.folder, job_id=str(process.pid), process=process)]


def script(plan: LaunchPlan) -> str:
    """The job script, as it is started on this machine."""
    return "\n".join(["#!/bin/bash", *definitions(plan), JOB_SCRIPT.read_text(encoding="utf-8")])


def start(plan: LaunchPlan, token: str, job_exists: Callable[[], None]) -> subprocess.Popen[bytes]:
    """Start a plan's job on this machine; returns the process of its job script.

    `job_exists` is called just before there is one.
    """
    job = LocalExecutor(plan, token, job_exists).submit(Worker(str(plan.run.path)))
    process: subprocess.Popen[bytes] = job._process
    return process
