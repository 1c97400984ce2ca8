"""One submission: refuse what is wrong, find or make the run, start it at most once."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from jobkit import slurm
from jobkit.errors import InputError, InvalidValue, JobkitError, SchedulerTimeout
from jobkit.run import snapshot
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.identity import run_name
from jobkit.run.rundir import RunDir, next_version, versions
from jobkit.run.status import State, Status
from jobkit.submission import job
from jobkit.submission.plan import LaunchPlan, make_plan
from jobkit.submission.task_check import check_command, check_task

PLUGIN = "jobkit.worker.job_environment:JobkitJobEnvironment"
"""The entry point through which Submitit, in the job, finds jobkit's environment."""


@dataclass(frozen=True)
class Outcome:
    """What a submission did: `started` is None where there was nothing to start."""

    run: RunDir
    status: Status
    """The run's status before this submission."""
    started: job.Started | None
    code_changes: list[str]


def check(config: Config, source: Path) -> Path | None:
    """Refuse a config that would fail in the job; returns the task's file relative to `source`, where it is below it.

    Raises InvalidValue for a task that does not import, a command that does not start, and a missing input.
    """
    plugins = {entry.value for entry in entry_points(group="submitit")}
    if PLUGIN not in plugins:
        raise InputError(f"jobkit is not installed in {sys.executable}: no job of it would start: pip install it")
    if config.command:
        module = check_command(config.command, source)
    else:
        module = check_task(config.task, source)
    for path in config.inputs:
        if not Path(path).expanduser().exists():
            raise InvalidValue("inputs", f"{path}: no such file or directory; the task needs it to start")
    return module


def choose_run(config: Config, runs_dir: Path, fresh: bool) -> RunDir:
    """The run directory of a config: its newest version, or with `fresh` the next one."""
    name = run_name(config)
    if fresh:
        return next_version(runs_dir, name)
    existing = list(versions(runs_dir, name))
    return existing[-1] if existing else RunDir(runs_dir / name)


def submit(
    config: Config,
    cluster: str,
    *,
    source: Path,
    runs_dir: Path,
    fresh: bool = False,
    foreground: bool = False,
    command: str = "",
) -> Outcome:
    """Start the run of `config`, or continue it, unless it is finished or under way already.

    `source` is where the command was typed, `command` what to type there to continue the run.
    Two submissions of one config at the same time start one job: the second waits for the first to have decided.
    Raises InputError or SchedulerError with nothing queued and no run directory left half-made.
    """
    # Whatever is wrong with the input is refused before anything is touched on the disk.
    request = Request(source, check(config, source), foreground, command)
    plan = make_plan(choose_run(config, runs_dir, fresh).path, config, cluster)
    _check_writable(runs_dir)
    with RunDir(runs_dir / run_name(config)).submission_lock():
        run = choose_run(config, runs_dir, fresh)  # again: another --fresh may have taken the number
        plan = plan.at(run.path)
        if not run.exists():
            with _removed_on_error(run):
                return _start_or_refuse(run, plan, Status(), request)
        status = job.reconcile(run)
        if status.state in (State.FINISHED, State.QUEUED, State.RUNNING):
            return Outcome(run, status, None, _code_changes(run, status, request))
        return _start_or_refuse(run, plan, status, request)


@dataclass(frozen=True)
class Request:
    """Where and how a submission was asked for."""

    source: Path
    """Where the command was typed."""
    task_file: Path | None
    """The user's own Python file that it starts with, relative to `source`."""
    foreground: bool
    command: str


def _code_changes(run: RunDir, before: Status, request: Request) -> list[str]:
    if not before.code:
        return []
    return snapshot.changes(run.code, before.code, snapshot.scan(request.source, run.path.parent, request.task_file))


def _start_or_refuse(run: RunDir, plan: LaunchPlan, before: Status, request: Request) -> Outcome:
    try:
        return _start(run, plan, before, request)
    except OSError as error:
        raise InputError(
            f"{error.filename or run.path}: {error.strerror or error}; make room, or set --runs-dir or JOBKIT_RUNS"
        ) from None


def _start(run: RunDir, plan: LaunchPlan, before: Status, request: Request) -> Outcome:
    if plan.scheduler == "slurm" and not slurm.available():
        raise InputError("sbatch is not on PATH: run this on a login node of a Slurm cluster, or use --local")
    for folder in (run.path, run.submitit, run.checkpoints, run.tensorboard):
        folder.mkdir(parents=True, exist_ok=True)
    run.failed_starts.unlink(missing_ok=True)
    changed = _code_changes(run, before, request)
    code = snapshot.take(request.source, run.code, skip=run.path.parent, needed=request.task_file)
    run.write_config(plan.config)
    # Before sbatch: this process may die, or slurmctld not answer, and the next submission must look for a job then.
    run.record(
        Event.SUBMITTING,
        cluster=plan.cluster,
        scheduler=plan.scheduler,
        code=code,
        code_changes=changed,
        command=request.command,
        cwd=str(request.source),
    )
    try:
        started = job.submit(plan, foreground=request.foreground)
    except SchedulerTimeout:
        raise  # the job may be in the queue: the next submission looks for it
    except JobkitError as error:
        run.record(Event.SUBMIT_FAILED, error=str(error))
        raise
    run.record(Event.SUBMITTED, job_id=started.job_id)
    return Outcome(run, before, started, changed)


@contextlib.contextmanager
def _removed_on_error(run: RunDir) -> Iterator[None]:
    """A first submission that is refused leaves no run directory behind."""
    try:
        yield
    except SchedulerTimeout:
        raise
    except JobkitError:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def _check_writable(runs_dir: Path) -> None:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs_dir):
            pass
    except OSError as error:
        raise InputError(
            f"runs directory {runs_dir}: not writable ({error.strerror}); set --runs-dir or JOBKIT_RUNS"
        ) from None
