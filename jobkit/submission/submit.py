"""One submission: refuse what is wrong, find or make the run, start it at most once."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from filelock import FileLock

from jobkit import slurm
from jobkit.checkpoint.store import Store
from jobkit.errors import InputError, InvalidValue, JobkitError, SchedulerError, SchedulerTimeout
from jobkit.log import log
from jobkit.run import code_files, secrets, snapshot
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.identity import Owner, identity, name_in
from jobkit.run.own_outputs import check_outputs
from jobkit.run.rundir import RunDir
from jobkit.run.runs import next_version, versions
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
    outputs: tuple[str, ...] = ()
    """Of the code's changes those that the run has probably written itself."""
    released: bool = False
    """Whether its job was held, and is no more."""


def check(plan: LaunchPlan, source: Path) -> list[Path]:
    """Refuse a config that would fail in the job, and say what may be wrong with it.

    Returns the user's own files that it imports at its start, relative to `source`.
    """
    _check_path(plan)
    config, has_setup = plan.config, bool(plan.parameters.get("setup"))
    plugins = {entry.value for entry in entry_points(group="submitit")}
    if PLUGIN not in plugins:
        raise InputError(f"jobkit is not installed in {sys.executable}: no job of it would start: pip install it")
    for key in secrets.lacking_in(dataclasses.asdict(config)):
        raise InvalidValue(key, f"found {secrets.MASK}, which stands for a value that is not shown; give the value")
    check_outputs(config)
    if config.command:
        checked = check_command(config.command, source, has_setup=has_setup)
    else:
        checked = check_task(config.task, source, has_setup=has_setup)
    for path in config.inputs:
        try:
            problem = "" if Path(path).expanduser().exists() else "no such file or directory"
        except (OSError, ValueError, RuntimeError) as error:  # too long, not to be looked at, or `~` of nobody
            problem = getattr(error, "strerror", None) or str(error)
        if problem:
            raise InvalidValue("inputs", f"{path}: {problem}; the task needs it to start")
    for line in (*plan.notes, *checked.warnings):
        log.warning("%s", line)
    return checked.files


NOT_IN_PATHS = {"local": r"%[jtAa]", "slurm": r"%\d*[A-Za-z%]|\\"}
"""What a run directory's path may not have, by scheduler: Submitit puts numbers of the job for some signs, and Slurm
for more; `%%` does not keep srun from it, and a backslash keeps Slurm from naming logs after jobs at all."""


def _check_path(plan: LaunchPlan) -> None:
    """Refuse a run directory whose path Submitit or Slurm would not take as it is: no job would find it."""
    if found := re.search(NOT_IN_PATHS[plan.scheduler], str(plan.run)):
        where, what = f"runs directory {plan.run.parent}", f"{found[0]} stands for something else in a job's paths"
        raise InputError(f"{where}: {what}; set --runs-dir or JOBKIT_RUNS")


def choose_run(config: Config, runs_dir: Path, fresh: bool) -> RunDir:
    """The run directory of a config: its newest version that is there, or with `fresh` the next one."""
    name = name_in(runs_dir, config)
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
    command: str,
    fresh: bool = False,
    foreground: bool = False,
) -> Outcome:
    """Start the run of `config`, or continue it, unless it is finished or under way already.

    `source` is where the command was typed, `command` what to type there to continue the run.
    Two submissions of one config at the same time start one job: the second waits for the first to have decided.
    Raises InputError or SchedulerError with nothing queued and no run directory left half-made.
    """
    # Whatever is wrong with the input is refused before anything is touched on the disk.
    plan = make_plan(choose_run(config, runs_dir, fresh).path, config, cluster)
    needed = check(plan, source)
    _check_writable(runs_dir)
    _check_spares(plan)
    with RunDir(runs_dir / name_in(runs_dir, config)).submission_lock() as lock:
        run = choose_run(config, runs_dir, fresh)  # again: another --fresh may have taken the number
        plan = plan.at(run.path)
        is_new, is_empty = not run.exists(), not run.path.exists()
        # The journal first has to agree with Slurm: an earlier submission may have been cut off after its sbatch.
        before = Status() if is_new else job.reconcile(run)
        try:
            code = code_files.find(source, run.path.parent, needed)
            is_done = before.state == State.FINISHED or before.state.is_under_way
            starts = is_new or not is_done or before.never_submitted
            for remark in code.remarks if starts else ():  # before the code is read: it may be much
                log.warning("%s", remark)
            files = snapshot.scan(source, code.sizes)
            changed = snapshot.changes(run.code, before.code, files) if before.code else []
            spans = [(one.started, one.ended) for one in before.attempts if one.ended is not None]
            outputs = tuple(snapshot.written_by_run(source, changed, spans))
            if not starts:
                return Outcome(run, before, None, changed, outputs, released=_release(before, plan))
            if problem := Store(run.checkpoints, missing_seconds=0).foreign(Owner(run.name, identity(config))):
                raise InputError(problem)
            slurm_cluster = _slurm_cluster() if plan.scheduler == "slurm" else None
            version = _prepare(run, plan, source, files)
            run.keep_number()
            # Before sbatch: this process may die, or slurmctld not answer; the next submission then looks for a job.
            run.record(
                Event.SUBMITTING,
                cluster=plan.cluster,
                scheduler=plan.scheduler,
                slurm_cluster=slurm_cluster,
                code=version,
                code_changes=changed,
                command=command,
                cwd=str(source),
                **_how_to_resume(run, command),
            )
            return Outcome(run, before, _start(run, plan, lock, foreground), changed, outputs)
        except (JobkitError, OSError, KeyboardInterrupt) as error:
            if is_new and not isinstance(error, SchedulerTimeout):  # after which the job may be in the queue
                if is_empty:
                    shutil.rmtree(run.path, ignore_errors=True)
                run.forget_number()
            if not isinstance(error, OSError):
                raise
            where = error.filename2 or error.filename or run.path
            raise InputError(
                f"{where}: {error.strerror or error}; make room, or set --runs-dir or JOBKIT_RUNS"
            ) from None


def _how_to_resume(run: RunDir, command: str) -> dict[str, str]:
    """What continues the run where the command that is recorded lacks what is secret in it."""
    if secrets.MASK not in command:
        return {}
    words = ["python", "-m", "jobkit", "resume", run.name, "--runs-dir", str(run.path.parent)]
    return {"resume": shlex.join(words)}


def _prepare(run: RunDir, plan: LaunchPlan, source: Path, files: Mapping[str, str]) -> str:
    """Make the run directory with config and code; returns the code's digest."""
    for folder in (run.path, run.submitit, run.checkpoints, run.tensorboard):
        folder.mkdir(parents=True, exist_ok=True)
    run.failed_starts.unlink(missing_ok=True)  # the nodes of an earlier submission say nothing of this one
    version = snapshot.take(source, files, run.code)
    run.write_config(plan.config)
    return version


def _start(run: RunDir, plan: LaunchPlan, lock: FileLock, foreground: bool) -> job.Started:
    try:
        started = job.submit(plan, lock, foreground=foreground)
    except SchedulerTimeout:
        raise  # the job may be in the queue: the next submission looks for it
    except (JobkitError, KeyboardInterrupt) as error:
        run.record(Event.SUBMIT_FAILED, error=str(error) or "interrupted before there was a job")
        raise
    try:
        run.record(Event.SUBMITTED, job_id=started.job_id)
    except OSError as error:  # the job is there: the next submission finds it as one that was cut off
        log.warning("job %s was started, which cannot be journalled: %s", started.job_id, error)
    return started


def _slurm_cluster() -> str:
    """Which Slurm the job goes to: its id means nothing to another one."""
    if not slurm.available():
        raise InputError("sbatch is not on PATH: run this on a login node of a Slurm cluster, or use --local")
    from jobkit.submission.sbatch import patiently

    return patiently(slurm.cluster)


def _release(before: Status, plan: LaunchPlan) -> bool:
    """Let a job start that Slurm holds, as after a prolog that failed; not where the YAML asks for a hold."""
    if "hold" in plan.parameters.get("additional_parameters", {}):
        return False
    return job.release(before)


def _check_spares(plan: LaunchPlan) -> None:
    """Refuse more nodes than the partition has: the job would wait for them for ever."""
    resources, partition = plan.config.resources, plan.parameters.get("partition")
    if plan.scheduler == "slurm" and resources.spares and slurm.available():
        there, wanted = 0, resources.nodes + resources.spares
        with contextlib.suppress(SchedulerError):  # sbatch is tried again where the controller is away
            there = slurm.nodes_of(partition)
        if there and wanted > there:
            where = f"partition {partition}" if partition else "the default partition"
            raise InvalidValue(
                "resources.spares",
                f"found {resources.spares}, but {where} has {there} node(s): with nodes: {resources.nodes} at most "
                f"{max(0, there - resources.nodes)}",
            )


def _check_writable(runs_dir: Path) -> None:
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs_dir):
            pass
    except OSError as error:
        raise InputError(
            f"runs directory {runs_dir}: not writable ({error.strerror}); set --runs-dir or JOBKIT_RUNS"
        ) from None
