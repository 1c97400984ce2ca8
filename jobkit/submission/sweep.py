"""Submitting a sweep: what is missing or has failed is started, as few job arrays on Slurm; the rest is counted.

A run of a sweep is a run like any other. What it has from the sweep are a snapshot of the code that all of them share,
and on Slurm the batch script of an array, of which it is one task.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from jobkit import slurm
from jobkit.errors import InputError, InvalidValue, JobkitError
from jobkit.log import log
from jobkit.run import code_files, shared_code, snapshot, sweeps
from jobkit.run.dependencies import runs_before
from jobkit.run.experiment import LoadedConfig
from jobkit.run.identity import name_in
from jobkit.run.records import GivenValues
from jobkit.run.rundir import RunDir
from jobkit.run.runs import newest_versions, run_at
from jobkit.run.status import State
from jobkit.run.sweeps import Sweep, SweepRecord
from jobkit.run.yamlfile import in_a_line
from jobkit.submission import job, local_sweep, own_check, running_limit, start_from
from jobkit.submission.candidate import Candidate
from jobkit.submission.overview import look_at
from jobkit.submission.partition_check import refuse_impossible
from jobkit.submission.plan import LaunchPlan, Turn, make_plan
from jobkit.submission.sbatch import Batch
from jobkit.submission.signals import hand_over, take_back
from jobkit.submission.submit import check, check_values, check_writable, read_code, slurm_of
from jobkit.supervisor import notifier

NEW, CONTINUED = "new", "continued"
"""What a submission has done with the runs that it has started."""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    loaded: LoadedConfig
    command: str
    """What to type to continue it by itself."""
    given: GivenValues = field(default_factory=GivenValues)
    """What it is given beside its YAML."""


@dataclass
class SweepOutcome:
    """What a submission of a sweep did."""

    sweep: str
    """Its name, as `digits/s1`."""
    runs: list[RunDir]
    """All that it wants, in its own order."""
    states: dict[str, str] = field(default_factory=dict)
    """What became of each run, by its name: NEW, CONTINUED, or how it stands."""
    jobs: list[str] = field(default_factory=list)
    """Ids of the job arrays; on this machine of the process that waits for the runs."""
    is_on_slurm: bool = False
    runner: subprocess.Popen[bytes] | None = None
    """The process that waits for the runs on this machine, where this submission has started it."""
    former: list[RunDir] = field(default_factory=list)
    """Those that it wanted once and nobody wants now, and that are neither finished nor at an end."""
    jobs_before: list[str] = field(default_factory=list)
    """Ids of the jobs that were there and have to end before the first of `jobs` starts."""
    limited: list[str] = field(default_factory=list)
    """Ids of the job arrays that were there and have got another limit of runs at once."""
    limit: int | None = None
    """How many runs of the sweep may train at once on Slurm: more than was asked for where it has more arrays."""
    code_changes: list[str] = field(default_factory=list)
    """How the code differs from that of runs that keep it, in lines of snapshot.changes."""
    with_other_code: Counter[str] = field(default_factory=Counter)
    """How many of those there are in each state."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        runs = [{"run": run.name, "path": str(run.path), "state": self.states[run.name]} for run in self.runs]
        return {"sweep": self.sweep, "runs": runs, "jobs": self.jobs, "former": [run.name for run in self.former]}

    @property
    def counts(self) -> dict[str, int]:
        """How many runs are in each state, those that were started first."""
        counted = Counter(self.states[run.name] for run in self.runs)
        return {word: counted.pop(word) for word in (NEW, CONTINUED) if word in counted} | dict(counted)


def plan_sweep(
    points: Sequence[Point], cluster: str, runs_dir: Path, turn: Turn | None = None
) -> dict[str, tuple[Point, LaunchPlan]]:
    """The plans of the points by the names of their runs; of points that are one run the first one counts.

    `turn` is how they wait, as it was typed; on this machine they always do.

    Raises InputError.
    """
    names = [name_in(runs_dir, point.loaded.config) for point in points]
    newest = newest_versions(runs_dir, names)
    planned: dict[str, tuple[Point, LaunchPlan]] = {}
    for point, name in zip(points, names, strict=True):
        run = newest[name]
        if run.name not in planned:
            with point.loaded.places.locating_errors():
                plan = make_plan(run.path, point.loaded.config, cluster)
                plan = replace(plan, turn=turn or plan.turn)
                here = replace(plan.turn, queues=True) if plan.scheduler == "local" else plan.turn
                planned[run.name] = point, replace(plan, turn=here)
    return planned


def first_before_the_rest(planned: Mapping[str, tuple[Point, LaunchPlan]]) -> dict[str, tuple[Point, LaunchPlan]]:
    """The same plans, all but the first of which come after that one's run."""
    first, *rest = planned
    changed = dict(planned)
    for name in rest:
        point, plan = planned[name]
        changed[name] = point, replace(plan, config=replace(plan.config, after=[*plan.config.after, first]))
    return changed


def check_sweep(planned: Mapping[str, tuple[Point, LaunchPlan]], source: Path) -> list[Path]:
    """As `check` of each plan; what they have in common is looked at once."""
    needed: dict[Path, None] = {}
    seen: set[str] = set()
    told: set[str] = set()
    for point, plan in planned.values():
        with point.loaded.places.locating_errors():
            check_values(plan)
            start_from.check(plan.config, RunDir(plan.run), None)
            kind = _kind(plan)
            if kind not in seen:
                seen.add(kind)
                without = replace(plan, config=replace(plan.config, check=""))
                needed |= dict.fromkeys(check(without, source, told))
                refuse_impossible(plan)
    _check_params(list(planned.values()), source)
    return list(needed)


def _check_params(planned: Sequence[tuple[Point, LaunchPlan]], source: Path) -> None:
    """Let the `check` of each point look at its params, which differ. Raises InputError, which names the point."""
    for number, error in own_check.refused([plan.config for _, plan in planned], source):
        point = planned[number][0]
        given = " ".join(f"{key}={in_a_line(value)}" for key, value in point.given.values.items())
        with point.loaded.places.locating_errors():
            raise InvalidValue(error.key, f"{error.problem} (the point {given})" if given else error.problem)


def _kind(plan: LaunchPlan) -> str:
    """What decides which code a plan runs."""
    return json.dumps([plan.config.task, plan.config.command, _array_kind(plan)])


def _array_kind(plan: LaunchPlan) -> str:
    """What decides in which job array a plan's run is: all that is in a batch script, not what a task of it runs."""
    parameters = {key: value for key, value in plan.parameters.items() if key != "job_name"}
    return json.dumps([bool(plan.config.command), plan.config.after, parameters], sort_keys=True, default=str)


def submit_sweep(
    planned: Mapping[str, tuple[Point, LaunchPlan]],
    needed: Sequence[Path],
    *,
    key: str,
    name: str,
    command: str,
    source: Path,
    runs_dir: Path,
    max_running: int | None,
    notify: str | None = None,
    on_prepared: Callable[[int, int], None] = lambda done, total: None,
) -> SweepOutcome:
    """Start the runs of a sweep that are neither finished nor under way; the file of the sweep comes first.

    Args:
        planned: of `plan_sweep`.
        needed: of `check_sweep`.
        key: tells the sweep from others of that `name`.
        command: what to type in `source` to submit the sweep again.
        max_running: how many of its runs may train at once.
        notify: a command to be run when each of its runs has ended.
        on_prepared: is called with (runs that are prepared, runs to start).

    Raises InputError or SchedulerError; what was submitted before that stays, and the same command submits the rest.
    """
    check_writable(runs_dir)
    runs = [RunDir(plan.run) for _, plan in planned.values()]
    with sweeps.submission_lock(runs_dir) as lock:
        sweep = sweeps.open_sweep(runs_dir, name, key)
        names = [run.name for run in runs]
        former = sweep.former(names)
        sweep.write(
            SweepRecord(key=key, runs=names, former=former, max_running=max_running, command=command, cwd=str(source))
        )
        outcome = SweepOutcome(sweep.name, runs)
        codes = _look(outcome, [*runs, *(RunDir(runs_dir / one) for one in former)])
        others = sweeps.wanted_by_others(sweep)
        for run in (RunDir(runs_dir / one) for one in former if outcome.states.get(one) in _UNDER_WAY):
            # Whoever has submitted it since, by itself or with another sweep, wants it.
            if run.name not in others and run.status().sweep == sweep.name:
                outcome.former.append(run)
        starting = [one for one in planned.values() if outcome.states.get(one[1].run.name) not in _STAYS]
        if max_running is not None:
            _limit(sweep, outcome, [RunDir(plan.run) for _, plan in starting], max_running)
        if starting:
            total = len(starting)
            _Submission(sweep, outcome, source, lock, max_running, total, on_prepared, notify).start(starting, needed)
        if codes:
            _compare_code(outcome, codes, read_code(source, runs_dir, needed, tells=False))
        for run in runs if notify is not None else ():
            if outcome.states.get(run.name) in _UNDER_WAY:  # it looks for the command when it has ended
                notifier.keep(run, notify or "")
        return outcome


def _limit(sweep: Sweep, outcome: SweepOutcome, starting: Sequence[RunDir], most: int) -> None:
    """Let at most `most` runs train at once beside those that are to be started. Raises SchedulerError."""
    under_way = [run for run in outcome.runs if outcome.states.get(run.name) in _UNDER_WAY]
    jobs = running_limit.jobs_here(under_way, sweep.name)
    outcome.limit = running_limit.limit(jobs.arrays, most)
    if sweep.before is None or sweep.before.max_running != most:
        outcome.limited = jobs.arrays
    # Those that come after what is started, as with `--first`, cannot end before it.
    beside = [run for run in under_way if not _comes_after(run, {one.name for one in starting})]
    if len(beside) + len(starting) > most:
        outcome.jobs_before = running_limit.jobs_here(beside, sweep.name).ids


def _comes_after(run: RunDir, names: Collection[str]) -> bool:
    return any(one.name in names for one in runs_before(run, run.status().after))


_UNDER_WAY = {State.QUEUED.value, State.HELD.value, State.RUNNING.value}
_STAYS = {*_UNDER_WAY, State.FINISHED.value}


def _look(outcome: SweepOutcome, runs: Sequence[RunDir]) -> dict[str, str]:
    """Write down how the runs stand that there are, with one question to Slurm for all; returns the codes that those
    have that stay as they are, by their names.

    Not those whose submission was cut off: nobody else submits a sweep now, which is how such a one looks from outside.
    """
    found = look_at([one for run in runs if (one := run_at(run.path)) is not None])
    whole = [one for one in found if one.facts["submissions"] and not one.facts["submitting"]]
    outcome.states |= {one.run: str(one.value("state")) for one in whole}
    wanted = {run.name for run in outcome.runs}
    return {one.run: one.facts["code"] for one in whole if one.run in wanted and outcome.states[one.run] in _STAYS}


def _compare_code(outcome: SweepOutcome, codes: Mapping[str, str], files: Mapping[str, str]) -> None:
    """Find which runs, by the names of their snapshots in `codes`, have another code than these files.

    Programs alone count: a sweep's YAML and table change with its values, and outputs are written beside them.
    """
    changed: dict[str, list[str]] = {}
    for run in outcome.runs:
        code = codes.get(run.name)
        if code and code not in changed:
            with suppress(InputError):  # the snapshot is gone: nobody can tell
                lines = snapshot.changes(run.code, code, files)
                changed[code] = [one for one in lines if code_files.is_program(one[2:])]
        if code and changed.get(code):
            outcome.with_other_code[outcome.states[run.name]] += 1
    outcome.code_changes = list(dict.fromkeys(line for lines in changed.values() for line in lines))


@dataclass
class _Submission:
    """The part of a sweep's submission that starts something."""

    sweep: Sweep
    outcome: SweepOutcome
    source: Path
    lock: FileLock
    """Of all sweeps' submissions: it is held."""
    max_running: int | None
    total: int
    on_prepared: Callable[[int, int], None]
    notify: str | None = None
    prepared: int = 0

    def start(self, planned: Sequence[tuple[Point, LaunchPlan]], needed: Sequence[Path]) -> None:
        runs_dir = planned[0][1].run.parent
        code = read_code(self.source, runs_dir, needed)
        version = snapshot.take(self.source, code, shared_code.folder(runs_dir))
        slurm_cluster = slurm_of(planned[0][1])
        self.outcome.is_on_slurm = slurm_cluster is not None
        for chunk in _chunks(planned) if slurm_cluster else [planned]:
            take_back()  # a Ctrl-C that came while the array before was submitted ends it here
            self._start_chunk(chunk, code, version, slurm_cluster)

    def _start_chunk(
        self,
        chunk: Sequence[tuple[Point, LaunchPlan]],
        code: Mapping[str, str],
        version: str,
        slurm_cluster: str | None,
    ) -> None:
        """Start those of the runs that are to be started: by one job array, or by a process that waits for them."""
        candidates: list[Candidate] = []
        try:
            for point, plan in chunk:
                self._prepare(point, plan, candidates, code, version, slurm_cluster)
            if not candidates:
                return
            ids = self._submit_array(candidates) if slurm_cluster else self._start_here(len(candidates))
        except (JobkitError, OSError, KeyboardInterrupt) as error:
            for candidate in candidates:
                candidate.undo(error)
            if self.outcome.jobs:
                log.warning("%s were submitted before; the same command submits the rest", ", ".join(self._submitted))
            if not isinstance(error, OSError):
                raise
            where = error.filename or chunk[0][1].run.parent
            raise InputError(f"{where}: {error.strerror or error}; make room") from None
        self.outcome.jobs.append(ids[0].partition("_")[0])
        for candidate, job_id in zip(candidates, ids, strict=True):
            candidate.record_job(job_id)
            self.outcome.states[candidate.run.name] = CONTINUED if candidate.before.submissions else NEW
        if not slurm_cluster:
            self.sweep.announce()  # now that nothing can be undone any more

    def _submit_array(self, candidates: Sequence[Candidate]) -> list[str]:
        batch = Batch(
            [one.plan for one in candidates],
            array=self.sweep.next_array(),
            name=self.sweep.name.replace("/", "-"),
            max_running=self.max_running,
            # The limit holds for one array: they run one after the other.
            after=(self.outcome.jobs[-1:] or self.outcome.jobs_before) if self.max_running else (),
        )
        return job.submit_batch(batch, [self.lock])

    def _start_here(self, count: int) -> list[str]:
        """The process that waits for the sweep's runs, for each of them; there is one for each sweep."""
        hand_over()
        if not self.sweep.has_runner():
            self.outcome.runner = local_sweep.start(self.sweep)
            return [str(self.outcome.runner.pid)] * count
        return [self.sweep.process_file.read_text(encoding="utf-8")] * count

    @property
    def _submitted(self) -> list[str]:
        return [f"job {one}" for one in self.outcome.jobs]

    def _prepare(
        self,
        point: Point,
        plan: LaunchPlan,
        candidates: list[Candidate],
        code: Mapping[str, str],
        version: str,
        slurm_cluster: str | None,
    ) -> None:
        """Write what a run's job needs, and add it to `candidates`, unless somebody has started it since."""
        run = RunDir(plan.run)
        with run.submission_lock():
            candidate = Candidate(
                run,
                plan,
                self.source,
                point.command,
                sweep=self.sweep.name,
                given=point.given,
                of_environment=point.loaded.of_environment,
            )
            if not candidate.starts:
                self.outcome.states[run.name] = str(candidate.before.state)
                return
            candidates.append(candidate)
            candidate.compare_code(code)
            candidate.prepare(lambda run: shared_code.use(run, version), slurm_cluster)
            if self.notify is not None:
                notifier.keep(run, self.notify)
        self.prepared += 1
        self.on_prepared(self.prepared, self.total)


def _chunks(planned: Sequence[tuple[Point, LaunchPlan]]) -> Iterator[list[tuple[Point, LaunchPlan]]]:
    """The runs of one job array each: with one batch script, and no more than Slurm takes."""
    most = slurm.max_array_size()
    kinds: dict[str, list[tuple[Point, LaunchPlan]]] = {}
    for point, plan in planned:
        kinds.setdefault(_array_kind(plan), []).append((point, plan))
    for same in kinds.values():
        yield from (same[first : first + most] for first in range(0, len(same), most))
