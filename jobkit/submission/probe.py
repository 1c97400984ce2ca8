"""The probe of `jobkit doctor`, from its submission to its result: a run like any other that removes itself."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jobkit.errors import InputError, SchedulerError
from jobkit.run.experiment import LoadedConfig
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission import job
from jobkit.submission.cancel import cancel
from jobkit.submission.observer import Observer
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.signals import signals_of_a_submission
from jobkit.submission.submit import submit

TASK = "jobkit.worker.network_probe:probe"

MEASURING = "measuring the network ..."

ENDING_SECONDS = 60.0
"""How long a job is given to be gone after its run has finished: the batch script ends some seconds after the ranks,
and Slurm shows it as COMPLETING until every node has said that its processes are gone."""


def run_probe(
    loaded: LoadedConfig, plan: LaunchPlan, source: Path, say: Callable[[str], None]
) -> tuple[RunDir, Status]:
    """Run the experiment to its end, saying what is waited for; its directory stays only where it failed.

    Ctrl-C and its like cancel it and raise KeyboardInterrupt; a rank that is alone is an InputError.
    """
    if plan.config.resources.world_size == 1:
        raise InputError("a probe of the network needs two ranks: --tasks-per-node 2, or --no-probe for checks alone")
    with signals_of_a_submission() as asked, loaded.places.locating_errors():
        outcome = submit(
            loaded.config,
            plan.cluster,
            source=source,
            runs_dir=plan.run.parent,
            fresh=True,
            foreground=True,
            command="python -m jobkit doctor",
        )
        status = _wait(outcome.run, asked, say)
    if status.state == State.FINISHED:
        _remove(outcome.run, status)
    return outcome.run, status


def _wait(run: RunDir, asked: list[int], say: Callable[[str], None]) -> Status:
    """The status once the run is over; raises KeyboardInterrupt when it was cancelled instead."""
    told, observer, status = "", Observer(run), run.status()
    while True:
        try:
            status, line = observer.look(), MEASURING
            if status.state in (State.QUEUED, State.HELD) and status.scheduler == "slurm":
                reason = f": {status.waits_for}" if status.waits_for else ""
                line = f"waiting for job {status.job_id}{reason}; Ctrl-C cancels it"
        except SchedulerError as error:  # it may answer again
            line = str(error)
        if asked:
            say("cancelling the probe ...")
            _remove(run, cancel(run, grace=False) or run.status())
            raise KeyboardInterrupt
        if observer.is_over:
            return status
        if line != told:
            told = line
            say(line)
        time.sleep(job.POLL_SECONDS)


def _remove(run: RunDir, status: Status) -> None:
    """Remove the run's directory once its job is gone and writes nothing more."""
    try:
        job.wait_until_gone(run, status, ENDING_SECONDS)
    except SchedulerError as error:
        print(f"{error}; {run.path} stays", file=sys.stderr)
        return
    shutil.rmtree(run.path, ignore_errors=True)
    run.forget_number()
