"""One submission, under the run's lock: look at the run, write the files that its job needs, start the job once.

    lock --> View --finished, queued, running--> Outcome(started=False)
                  --new, interrupted, failed, cancelled, lost--> config.yaml, code, `submitted(token)` --> sbatch, bash

sbatch inherits the lock: a submission that is killed leaves a job with its token, or none, and the next submission sees
which. Nothing is written after the job exists; only a refusal is (`Refused`). submit.py, sweep.py, local_sweep.py and
verify/runs.py call it.
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobkit.config import yamlfile
from jobkit.errors import InputError, SchedulerError, SchedulerTimeout
from jobkit.run import snapshot
from jobkit.run.files import user_name, write_atomic
from jobkit.run.journal import Journal
from jobkit.run.locks import Lock
from jobkit.run.records import Refused, Submitted, new_token
from jobkit.run.rundir import RunDir
from jobkit.run.runs import versions
from jobkit.run.status import UNDER_WAY, State
from jobkit.run.view import View, view
from jobkit.slurm import commands
from jobkit.submission import after, checks
from jobkit.submission.plan import LaunchPlan
from jobkit.submission.sbatch import patiently
from jobkit.usage import to_type

Which = Literal["newest", "new", "this"]
"""Which run of a config is meant: --fresh makes a new one."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a submission."""

    run: RunDir
    before: View
    """How the run was under the lock."""
    started: bool
    """False where the run is finished or under way: there was nothing to start."""
    job_id: str | None = None
    """On Slurm, of the new job; else of the run's job, if it is known."""
    process: subprocess.Popen[bytes] | None = None
    """The new job's script on this machine."""


def submit(
    plan: LaunchPlan,
    folder: Path | None,
    *,
    which: Which = "newest",
    code: Path | None = None,
    job_exists: Callable[[], None] = lambda: None,
    prepare: Callable[[LaunchPlan], None] = lambda plan: None,
) -> Outcome:
    """Start the run of a plan, or continue it, unless it is finished or under way.

    Two submissions of one config at the same time make one job: the second waits until the first has decided.
    Raises InputError or SchedulerError with nothing queued and no run directory left half-made.

    Args:
        folder: the code that goes into the snapshot; None keeps the run's code
        code: a snapshot that was taken already, in the place of one of `folder`
        which: the newest run of the config, a new one with the next number, or exactly `plan.run`
        job_exists: called just before there is a job on this machine
        prepare: called with the run's plan once its directory exists, before there is a config.yaml in it
    """
    with _chosen(plan.run, which) as (run, lock):
        is_new = not run.path.exists()
        if is_new and folder is None:
            raise InputError("the run was removed meanwhile", key=run.name)
        before = view(run, locked=True)
        checks.refuse_older(run, before.status)
        if before.state == State.FINISHED:
            return Outcome(run=run, before=before, started=False, job_id=before.job_id)
        if before.state in UNDER_WAY:
            if not before.answered:
                gone = f"type it there; where that is gone for good, first: {to_type('cancel', run.path, '--no-grace')}"
                raise SchedulerError(f"{run.name}: {before.words}; a second job could train beside it; {gone}")
            return Outcome(run=run, before=before, started=False, job_id=before.job_id)
        checks.refuse_foreign(run)
        plan = keep_seed(after.depend(plan.at(run)))
        journal = None
        try:
            journal = _prepare(plan.at(run), folder, code, before, prepare)
            token = str(journal.status.token)
            if plan.target.scheduler == "local":
                from jobkit.submission import local

                process = local.start(plan.at(run), token, job_exists)
                return Outcome(run=run, before=before, started=True, process=process)
            from jobkit.submission import sbatch

            job_id = sbatch.submit(plan.at(run), token, lock.inheritable())
            return Outcome(run=run, before=before, started=True, job_id=job_id)
        except SchedulerTimeout:
            raise  # the job may be in the queue: the next submission looks for its token
        except KeyboardInterrupt:
            if journal is None:
                undo(run, None, is_new, "")
            raise
        except (InputError, SchedulerError, OSError) as error:
            undo(run, journal, is_new, str(error))
            raise


@contextmanager
def _chosen(base: RunDir, which: Which) -> Iterator[tuple[RunDir, Lock]]:
    """The run, and its lock."""
    folder = base.path.parent
    checks.refuse_unwritable(folder)
    with base.submit_lock() as lock:  # also for a new number: two submissions shall not take the same one
        existing = versions(folder, base.name) if which != "this" else []
        run = _next(existing, base) if which == "new" else existing[-1] if existing else base
        if run.path == base.path:
            yield run, lock
        else:
            with run.submit_lock() as numbered:
                yield run, numbered


def _next(existing: list[RunDir], base: RunDir) -> RunDir:
    if not existing:
        return base
    number = int(existing[-1].name.removeprefix(base.name).removeprefix("-") or 1)
    return RunDir(base.path.with_name(f"{base.name}-{number + 1}"))


def _prepare(
    plan: LaunchPlan, folder: Path | None, code: Path | None, before: View, prepare: Callable[[LaunchPlan], None]
) -> Journal:
    """Write everything that the job needs, and last that there will be one."""
    run = plan.run
    cluster = patiently(commands.cluster_name) if plan.target.scheduler == "slurm" else None
    write_files(plan, folder, code, prepare)
    journal = Journal(run)
    journal.append(submitted(plan, before, cluster))
    return journal


def keep_seed(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan with the seed that the run has begun with, if it has."""
    return dataclasses.replace(plan, loaded=plan.run.with_kept_seed(plan.loaded))


def write_files(
    plan: LaunchPlan, folder: Path | None, code: Path | None, prepare: Callable[[LaunchPlan], None]
) -> None:
    """Write the files of a run that its job reads, except for those of Submitit. See `submit` for the arguments."""
    run = plan.run
    for path in (run.path, run.submitit, run.checkpoints, run.tensorboard, run.path / "requests"):
        path.mkdir(parents=True, exist_ok=True)
    run.failed_starts.unlink(missing_ok=True)  # the nodes of an earlier submission say nothing about this one
    if folder is not None:
        snapshot.link(run.code, folder, run.path.parent, code, plan.config.code.exclude)
    prepare(plan)  # before there is a run: `resume` of one without what it begins with would begin anew
    write_atomic(run.config_file, yamlfile.dump(plan.loaded.written))


def submitted(plan: LaunchPlan, before: View, cluster: str | None) -> Submitted:
    """Return the event of a submission that is about to be made, with a token of its own."""
    run, written = plan.run, plan.loaded.written
    number = before.status.submitted.number + 1 if before.status.submitted is not None else 1
    return Submitted(
        token=new_token(run.name, number),
        number=number,
        scheduler=plan.target.scheduler,
        cluster=cluster,
        entry=plan.target.name,
        user=user_name(),
        host=socket.gethostname(),
        folder=str(Path.cwd()),
        code=run.code.resolve().name,
        config={key: written[key] for key in ("name", "seed", "params")},
        after=plan.config.after,
    )


def undo(run: RunDir, journal: Journal | None, is_new: bool, error: str) -> None:
    """Leave the run as it was before a submission that made no job."""
    if is_new:
        shutil.rmtree(run.path, ignore_errors=True)
    elif journal is not None:
        journal.append(Refused(token=str(journal.status.token), error=error))
