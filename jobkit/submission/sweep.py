"""Submitting a sweep: all points are checked, then what is missing, interrupted, failed or cancelled is started.

    points --plan--> LaunchPlans --> X.sweep (names of runs) --> one snapshot of the code
        Slurm: chunks of equal options --locks of all runs, files, `submitted(token, task)`--> sbatch --array
        here:  submission/local_sweep.py

submit.py calls this with the points of config/points.py. A run of a sweep is a run like any other: it has its own
directory, journal and batch script. The runs of one array share a token, and (token, task) names the job of a run. If
the submission is killed, Slurm knows the token in the journals or does not; the same command asks, and goes on.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.config.identity import run_name
from jobkit.config.load import Loaded
from jobkit.config.points import sweep_name
from jobkit.errors import EXIT_FINISHED, EXIT_RESUMABLE, InputError, SchedulerError, SchedulerTimeout
from jobkit.log import log
from jobkit.run import snapshot
from jobkit.run.files import write_atomic
from jobkit.run.journal import Journal, read_status
from jobkit.run.records import new_token
from jobkit.run.rundir import RunDir
from jobkit.run.runs import SWEEP, identity_of, newest
from jobkit.run.status import UNDER_WAY, State
from jobkit.run.view import View, look, views
from jobkit.slurm import commands
from jobkit.submission import after, checks, transaction
from jobkit.submission.plan import LaunchPlan

SPARE_FILES = 200
"""Open files that a submission needs beside its locks."""

MOST_TASKS = 10_000
"""Of an array. Its script has the paths of all runs, and Slurm takes 4 MiB."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs that are wanted.

    Sweep.of(plans).name        # toy-1a2b3c4d.sweep
    """

    file: Path
    plans: list[LaunchPlan]
    """Of the newest run of each config, in the order of the points."""

    @classmethod
    def of(cls, plans: Sequence[LaunchPlan]) -> Sweep:
        runs_dir, names = plans[0].run.path.parent, [plan.run.name for plan in plans]
        file = runs_dir / f"{sweep_name(plans[0].config.name, names)}{SWEEP}"
        runs = newest(runs_dir, names)
        return cls(file=file, plans=[plan.at(run) for plan, run in zip(plans, runs, strict=True)])

    @property
    def name(self) -> str:
        return self.file.name

    def write(self) -> None:
        """Write the names of the runs, before anything is queued."""
        checks.refuse_unwritable(self.file.parent)
        write_atomic(self.file, "".join(f"{plan.run.name}\n" for plan in self.plans))


@dataclass(kw_only=True)
class SweepOutcome:
    """The outcome of a sweep's submission."""

    sweep: Sweep
    states: dict[str, str] = field(default_factory=dict)
    """How each run stood, by its name; `started` if this submission started it."""
    jobs: list[tuple[str, int]] = field(default_factory=list)
    """Ids of job arrays, and how many tasks each has."""
    unsubmitted: list[str] = field(default_factory=list)
    """Runs that were not submitted: a limit on the number of jobs refused them, or nobody knows if they live."""
    refusal: str = ""
    """Why, for a person."""

    def counts(self) -> str:
        """Return `12 runs: 11 started, 1 finished`."""
        return counted([self.states.get(plan.run.name, "new") for plan in self.sweep.plans])

    def say_left(self) -> int:
        """Say that runs are left; returns the exit code."""
        if self.unsubmitted:
            words = f"{len(self.unsubmitted)} run(s) are left, the same command submits them"
            print(f"{words}: {self.refusal}", file=sys.stderr)
        return EXIT_RESUMABLE if self.unsubmitted else EXIT_FINISHED

    def as_json(self) -> dict[str, Any]:
        """Return the values of `--json`."""
        runs = [
            {"run": plan.run.name, "dir": str(plan.run.path), "state": state, "started": state == "started"}
            for plan in self.sweep.plans
            for state in [self.states.get(plan.run.name, "new")]
        ]
        jobs = [job for job, _ in self.jobs]
        return {
            "sweep": self.sweep.name,
            "file": str(self.sweep.file),
            "runs": runs,
            "jobs": jobs,
            "left": self.unsubmitted,
        }


def counted(states: Sequence[str]) -> str:
    """Return how many runs are in each state, as `12 runs: 11 started, 1 finished`."""
    return f"{len(states)} runs: " + ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def plan(
    points: Iterable[tuple[str, Loaded]], make: Callable[[Loaded], LaunchPlan], start: str = ""
) -> dict[str, LaunchPlan]:
    """Return the checked plans of (name, config) by name, one for each run; points of the same config are one run.

    `make` checks a config, and asks Slurm: it is called for the first of those that differ in nothing that it looks at.
    `start` is the checkpoint that all begin with (--from). Raises InputError.
    """
    made: dict[str, LaunchPlan] = {}
    plans: dict[str, tuple[str, LaunchPlan]] = {}
    for point, loaded in points:
        config = loaded.config
        kind = repr(dataclasses.replace(config, params={}, seed=0, command=config.command[:3]))
        if kind not in made:
            made[kind] = make(loaded)
        config = dataclasses.replace(config, resources=made[kind].config.resources)
        run = RunDir(made[kind].run.path.with_name(run_name(config, start)))
        same = dataclasses.replace(made[kind], loaded=dataclasses.replace(loaded, config=config))
        before, _ = plans.setdefault(run.name, (point, same.at(run)))
        if plans[run.name][1].config != config:
            problem = f"{before} and {point} are the same run: a key of these does not change the result"
            raise InputError(problem, key="sweep", hint="give that key one value for all runs")
    return dict(plans.values())


def starting(outcome: SweepOutcome) -> list[LaunchPlan]:
    """Return the plans of the runs that are neither finished nor under way, by one question to Slurm."""
    plans = outcome.sweep.plans
    for now in views([plan.run for plan in plans]):
        outcome.states[now.run.name] = now.state
        if not (now.is_over or now.answered):
            outcome.unsubmitted, outcome.refusal = [*outcome.unsubmitted, now.run.name], f"{now.run.name}: {now.words}"
    return [plan for plan in plans if outcome.states[plan.run.name] not in (*UNDER_WAY, State.FINISHED)]


def submit(
    sweep: Sweep,
    folder: Path,
    max_running: int | None = None,
    prepare: Callable[[LaunchPlan], None] = lambda plan: None,
) -> SweepOutcome:
    """Queue the runs of a sweep that are neither finished nor under way, as few job arrays.

    A limit on the number of jobs leaves runs out, which the outcome names. Raises InputError or SchedulerError: of the
    array that was refused nothing is left; arrays before it stay, and the same command submits the rest.

    Args:
        folder: the code that goes into the snapshot, the same for all runs
        max_running: how many runs train at once; several arrays share it
        prepare: called with the plan of each run that starts, as in `transaction.submit`
    """
    sweep.write()
    outcome = SweepOutcome(sweep=sweep)
    todo = _depending(starting(outcome))
    if not todo:
        return outcome
    cluster = sbatch().patiently(commands.cluster_name)
    code = snapshot.take(folder, sweep.file.parent, sweep.plans[0].config.code.exclude)
    chunks = list(_chunks(todo, min(_tasks_of_slurm(), _open_files(len(todo)))))
    for number, chunk in enumerate(chunks):
        share = (
            None if max_running is None else max(1, max_running // len(chunks) + (number < max_running % len(chunks)))
        )
        try:
            _Array(outcome, folder, code, cluster, share, prepare).submit(chunk)
        except (InputError, SchedulerError, OSError):
            for job, count in outcome.jobs:
                log.warning("job %s with %d run(s) was submitted before; the same command submits the rest", job, count)
            raise
    under_way = [state for state in outcome.states.values() if state in (*UNDER_WAY, "started")]
    if outcome.unsubmitted and not under_way:
        raise SchedulerError(outcome.refusal)
    return outcome


def _depending(plans: Sequence[LaunchPlan]) -> list[LaunchPlan]:
    """The plans with the jobs that they wait for; Slurm is asked once for all that wait for the same runs."""
    options: dict[str, Any] = {}
    for plan in plans:
        key = repr(plan.config.after)
        if key not in options:
            options[key] = after.depend(plan).parameters.get("dependency")
    return [
        dataclasses.replace(plan, parameters={**plan.parameters, "dependency": dependency}) if dependency else plan
        for plan in plans
        for dependency in [options[repr(plan.config.after)]]
    ]


def sbatch() -> Any:
    """Return the module that needs Submitit: `list` and others import this one without it."""
    from jobkit.submission import sbatch

    return sbatch


def _chunks(plans: Sequence[LaunchPlan], max_tasks: int) -> Iterator[list[LaunchPlan]]:
    """The plans that one batch script can have: of equal options, and no more than an array takes."""
    kinds: dict[str, list[LaunchPlan]] = {}
    for plan in plans:
        kinds.setdefault(repr(({**plan.parameters, "job_name": ""}, plan.options)), []).append(plan)
    for same in kinds.values():
        yield from (same[first : first + max_tasks] for first in range(0, len(same), max_tasks))


def _tasks_of_slurm() -> int:
    return max(1, min(MOST_TASKS, int(commands.config().get("MaxArraySize", MOST_TASKS))))


def _open_files(runs: int) -> int:
    """Return for how many runs the locks may be open at once; the soft limit of this process follows.

    Slurm gives the limit to the jobs too: it is not raised higher than needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2 * min(runs, MOST_TASKS) + SPARE_FILES  # a run of --fresh has two locks
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if limit > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, (limit - SPARE_FILES) // 2)


@contextmanager
def _locked(plans: Sequence[LaunchPlan]) -> Iterator[tuple[list[LaunchPlan], list[int]]]:
    """Hold the locks of runs, in the order of their names; yield the plans of the newest runs, and the open files."""
    runs_dir, by_base = plans[0].run.path.parent, [identity_of(plan.run.name) for plan in plans]
    with ExitStack() as locks:
        files = [locks.enter_context(RunDir(runs_dir / name).submit_lock()) for name in sorted(by_base)]
        now = [plan.at(run) for plan, run in zip(plans, newest(runs_dir, by_base), strict=True)]
        numbered = sorted(plan.run.name for plan in now if plan.run.name not in by_base)
        files += [locks.enter_context(RunDir(runs_dir / name).submit_lock()) for name in numbered]
        yield now, [descriptor for file in files for descriptor in file.inheritable()]


@dataclass
class _Prepared:
    """A run whose files are written."""

    plan: LaunchPlan
    before: View
    is_new: bool
    journal: Journal | None = None
    """Once it says that a job will be there."""


@dataclass
class _Array:
    """The submission of one chunk, under the locks of its runs."""

    outcome: SweepOutcome
    folder: Path
    code: Path
    cluster: str
    max_running: int | None
    prepare: Callable[[LaunchPlan], None]
    rest: list[_Prepared] = field(default_factory=list)
    """Runs that are not in the queue yet."""
    is_asked: bool = False
    """Whether sbatch was called."""

    def submit(self, chunk: Sequence[LaunchPlan]) -> None:
        with _locked(chunk) as (plans, files):
            try:
                read = [(plan.run, read_status(plan.run)) for plan in plans]
                for plan, before in zip(plans, look(read, locked=True), strict=True):
                    self.outcome.states[plan.run.name] = before.state
                    if before.state not in (*UNDER_WAY, State.FINISHED):  # else another command was here since
                        checks.refuse_foreign(plan.run)
                        plan = transaction.keep_seed(plan)
                        self.rest.append(_Prepared(plan, before, is_new=not plan.run.path.exists()))
                        transaction.write_files(plan, self.folder, self.code, self.prepare)
                self._queue(files)
            except SchedulerTimeout:
                raise  # the jobs may be in the queue: the next submission looks for their token
            except KeyboardInterrupt:
                if not self.is_asked:
                    self._undo("")
                raise
            except (InputError, SchedulerError, OSError) as error:
                self._undo(str(error))
                raise

    def _undo(self, error: str) -> None:
        for item in self.rest:
            transaction.undo(item.plan.run, item.journal, item.is_new, error)

    def _queue(self, files: Sequence[int]) -> None:
        """Queue all runs; where a limit refuses, halves of them as long as one is taken."""
        size = len(self.rest)
        while size:
            part = self.rest[:size]
            try:
                job = self._call_sbatch(part, files)
            except SchedulerError as error:
                if not sbatch().is_limit(error):
                    raise
                self.outcome.refusal = str(error)
            else:
                self.outcome.jobs.append((job, len(part)))
                self.outcome.states.update((item.plan.run.name, "started") for item in part)
                self.rest = self.rest[size:]
                if self.max_running is not None:
                    break  # a second array would have a limit of its own
            size = min(size // 2, len(self.rest))
        self._undo(self.outcome.refusal)
        self.outcome.unsubmitted += [item.plan.run.name for item in self.rest]

    def _call_sbatch(self, part: Sequence[_Prepared], files: Sequence[int]) -> str:
        """Journal a new token for each run, then queue the array: a job with a token before it begins nothing."""
        name = self.outcome.sweep.name
        token = new_token(name, len(part))
        tasks = {task: item.plan.run for task, item in enumerate(part)}
        for task, item in enumerate(part):
            sbatch().write_task(item.plan, task)
        for task, item in enumerate(part):
            item.journal = Journal(item.plan.run)
            event = transaction.submitted(item.plan, item.before, self.cluster)
            item.journal.append(dataclasses.replace(event, token=token, task=task))
        plan = part[0].plan
        named = dataclasses.replace(plan, parameters={**plan.parameters, "job_name": name})
        self.is_asked = True
        job: str = sbatch().submit_array(named, tasks, token, files, self.max_running)
        return job
