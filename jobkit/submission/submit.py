"""One submission: refuse what is wrong, find or make the run, start it at most once."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from jobkit import slurm
from jobkit.errors import InputError, InvalidValue, JobkitError
from jobkit.log import log
from jobkit.run import code_files, secrets, snapshot
from jobkit.run.config import Config
from jobkit.run.identity import name_in
from jobkit.run.left_unfinished import left_unfinished
from jobkit.run.own_outputs import check_outputs
from jobkit.run.records import GivenValues
from jobkit.run.rundir import RunDir
from jobkit.run.runs import next_version, versions
from jobkit.run.status import State, Status
from jobkit.submission import chains, inputs, job, start_from
from jobkit.submission.candidate import Candidate
from jobkit.submission.mirror_check import check_mirrors
from jobkit.submission.observer import observe
from jobkit.submission.own_check import run_check
from jobkit.submission.partition_check import refuse_impossible
from jobkit.submission.plan import LaunchPlan, Turn, make_plan
from jobkit.submission.task_check import check_command, check_task
from jobkit.submission.unapplied import unapplied
from jobkit.supervisor import notifier

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
    unapplied: tuple[str, ...] = ()
    """What was asked for and the run's job, which is under way, does not get."""
    begins: str = ""
    """What to tell of a run that begins with the checkpoint of another, or does not where that might be expected."""
    changed_inputs: tuple[str, ...] = ()
    """Of a finished run the `inputs` that were written since."""


def check(plan: LaunchPlan, source: Path, told: set[str] | None = None) -> list[Path]:
    """Refuse a config that would fail in the job, and say what may be wrong with it, unless that is in `told`.

    Returns the user's own files that it imports at its start, relative to `source`.
    """
    check_values(plan)
    _check_turn(plan)
    if plan.run.parent.resolve() == source.resolve():  # what is in it would be taken for runs, not for code
        raise InputError(f"runs directory {source}: it is the folder of the code; give one of its own: --runs-dir runs")
    config, has_setup = plan.config, bool(plan.parameters.get("setup"))
    if not is_installed():
        raise InputError(f"jobkit is not installed in {sys.executable}: no job of it would start: pip install it")
    if config.command:
        checked = check_command(config.command, source, has_setup=has_setup)
    else:
        checked = check_task(config.task, source, has_setup=has_setup)
    run_check(config, source)
    told = set() if told is None else told
    for line in (*plan.notes, *checked.warnings):
        if line not in told:
            told.add(line)
            log.warning("%s", line)
    return checked.files


def is_installed() -> bool:
    """Whether Submitit, in a job, would find jobkit's environment."""
    try:
        entries = distribution("jobkit").entry_points  # all packages' take 8 ms
    except PackageNotFoundError:
        return False
    return any(entry.group == "submitit" and entry.value == PLUGIN for entry in entries)


def check_values(plan: LaunchPlan) -> None:
    """The part of `check` that looks at values alone: of a sweep's runs these differ, and seldom the code."""
    _check_path(plan)
    config = plan.config
    for key in secrets.lacking_in(dataclasses.asdict(config)):
        raise InvalidValue(key, f"found {secrets.MASK}, which stands for a value that is not shown; give the value")
    check_outputs(config)
    check_mirrors(config.mirror)
    chains.check(plan)
    inputs.check(config, plan.run.parent)


def _check_turn(plan: LaunchPlan) -> None:
    """Refuse a wait for this machine's queue where that is not used, and a priority that is none."""
    turn = plan.turn
    if plan.scheduler != "local":
        if turn.queues or turn.priority:
            given = "--queue" if turn.queues else f"--priority {turn.priority}"
            where = "this is of the queue of this machine; add --local (Slurm's: `nice` under clusters)"
            raise InputError(f"{given}: {where}")
        return
    from jobkit.supervisor.needs import need_of  # here: a submission to Slurm has no use for this machine's queue
    from jobkit.supervisor.tickets import PRIORITIES

    if turn.priority not in PRIORITIES:
        raise InputError(f"--priority: found {turn.priority}, allowed: {PRIORITIES[0]} to {PRIORITIES[-1]}")
    need_of(plan.config, os.environ, queues=turn.queues)  # raises where the number of slots is none


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
    parent: RunDir | None = None,
    given: GivenValues | None = None,
    turn: Turn | None = None,
    notify: str | None = None,
    of_environment: bool = False,
) -> Outcome:
    """Start the run of `config`, or continue it, unless it is finished or under way already.

    `source` is where the command was typed, `command` what to type there to continue the run. `parent` is the run that
    it starts from, where that is not to be found by its name, `given` what it has beside its YAML; `notify` a command
    to be run when it has ended. `of_environment` as of a LoadedConfig.
    Two submissions of one config at the same time start one job: the second waits for the first to have decided.
    Raises InputError or SchedulerError with nothing queued and no run directory left half-made.
    """
    # Whatever is wrong with the input is refused before anything is touched on the disk.
    inputs.check(config, runs_dir)  # first: what is missing there is missing on a machine with more GPUs, too
    plan = make_plan(choose_run(config, runs_dir, fresh).path, config, cluster)
    plan = dataclasses.replace(plan, turn=turn or plan.turn)
    needed = check(plan, source)
    start_from.check(config, RunDir(plan.run), parent)
    check_writable(runs_dir)
    refuse_impossible(plan)
    with RunDir(runs_dir / name_in(runs_dir, config)).submission_lock() as lock:
        run = choose_run(config, runs_dir, fresh)  # again: another --fresh may have taken the number
        candidate = Candidate(
            run,
            plan.at(run.path),
            source,
            command,
            parent=parent,
            given=given or GivenValues(),
            of_environment=of_environment,
        )
        try:
            code = read_code(source, runs_dir, needed, tells=candidate.starts)
            candidate.compare_code(code)
            started, released = None, False
            leaves = "" if fresh else left_unfinished(run, config, observe)
            not_applied: tuple[str, ...] = ()
            changed_inputs: tuple[str, ...] = ()
            if candidate.starts:
                slurm_cluster = slurm_of(plan)
                candidate.prepare(lambda run: snapshot.take(source, code, run.code), slurm_cluster)
            if notify is not None:  # before its supervisor begins; one that trains looks for it when it has ended
                notifier.keep(run, notify)
            if candidate.starts:
                started = job.submit(candidate.plan, lock, foreground=foreground)
                candidate.record_job(started.job_id)
            else:
                released = _release(candidate.before, plan)
                not_applied = unapplied(run, candidate.before, plan)
                if candidate.before.state == State.FINISHED and candidate.before.attempt is not None:
                    changed_inputs = inputs.changed_since(config, candidate.before.attempt.ended)
            return Outcome(
                run,
                candidate.before,
                started,
                candidate.code_changes,
                candidate.outputs,
                released,
                not_applied,
                candidate.begins or leaves,
                changed_inputs,
            )
        except (JobkitError, OSError, KeyboardInterrupt) as error:
            candidate.undo(error)
            if not isinstance(error, OSError):
                raise
            raise candidate.full_disk(error) from None


def read_code(source: Path, runs_dir: Path, needed: Sequence[Path], *, tells: bool = True) -> dict[str, str]:
    """Name -> digest of each of the user's code files below `source`; says what somebody may not expect where `tells`.

    `needed` are those that count even where git ignores them.
    """
    code = code_files.find(source, runs_dir, needed)
    for remark in code.remarks if tells else ():  # before the code is read: it may be much
        log.warning("%s", remark)
    return snapshot.scan(source, code.sizes)


def slurm_of(plan: LaunchPlan) -> str | None:
    """Which Slurm a plan's job goes to, as its id means nothing to another one; None where it goes to none."""
    if plan.scheduler != "slurm":
        return None
    if not slurm.available():
        raise InputError("sbatch is not on PATH: run this on a login node of a Slurm cluster, or use --local")
    from jobkit.submission.sbatch import patiently

    return patiently(slurm.cluster)


def _release(before: Status, plan: LaunchPlan) -> bool:
    """Let a job start that Slurm holds, as after a prolog that failed; not where the YAML asks for a hold."""
    if "hold" in plan.parameters.get("additional_parameters", {}):
        return False
    return job.release(before)


def check_writable(runs_dir: Path) -> None:
    """Make the runs directory; InputError where nothing can be written there."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=runs_dir):
            pass
    except OSError as error:
        raise InputError(
            f"runs directory {runs_dir}: not writable ({error.strerror}); set --runs-dir or JOBKIT_RUNS"
        ) from None
