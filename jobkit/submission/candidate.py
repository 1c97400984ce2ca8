"""A run that a command is about to start, under its submission lock: how it stood, and what is written before its job.

Whatever fails before there is a job leaves no run directory half made, and none that says it is being submitted.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobkit.checkpoint.store import Store
from jobkit.errors import InputError, SchedulerTimeout
from jobkit.log import log
from jobkit.run import records, secrets, snapshot
from jobkit.run.events import Event
from jobkit.run.identity import Owner, identity
from jobkit.run.records import GivenValues
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission import chains, job, start_from
from jobkit.submission.plan import LaunchPlan
from jobkit.supervisor.dependents import tell_dependents


@dataclass
class Candidate:
    """A run, as it stands once its journal agrees with the scheduler; the caller holds its submission lock."""

    run: RunDir
    plan: LaunchPlan
    source: Path
    """Where the command was typed."""
    command: str
    """What to type there to continue the run."""
    sweep: str = ""
    """The sweep that it is submitted with, if any."""
    parent: RunDir | None = None
    """The run that it starts from, where that is not to be found by its name."""
    given: GivenValues = field(default_factory=GivenValues)
    """What it is given beside its YAML."""
    of_environment: bool = False
    """As of a LoadedConfig."""
    before: Status = field(init=False)
    """The status before this submission."""
    code_changes: list[str] = field(default_factory=list)
    """How the code differs from that of the submission before, in lines of snapshot.changes."""
    begins: str = ""
    """What to tell of a run that begins with the checkpoint of another."""

    def __post_init__(self) -> None:
        self._is_new, self._is_empty = not self.run.exists(), not self.run.path.exists()
        self._is_recorded = False
        # The journal first has to agree with Slurm: an earlier submission may have been cut off after its sbatch.
        self.before = Status() if self._is_new else job.reconcile(self.run, in_sweep=bool(self.sweep))

    @property
    def starts(self) -> bool:
        """Whether there is something to start: the run is neither finished nor under way."""
        before = self.before
        is_done = before.state == State.FINISHED or before.state.is_under_way
        return self._is_new or not is_done or before.never_submitted

    def compare_code(self, files: Mapping[str, str]) -> None:
        """Find what has changed in the user's code, whose files have these digests, since it was last submitted."""
        try:
            self.code_changes = snapshot.changes(self.run.code, self.before.code, files) if self.before.code else []
        except InputError as error:
            what = "the code is taken as it is now" if self.starts else "what has changed in it cannot be told"
            log.warning("%s: %s; %s", self.run.name, error, what)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Of the changes those that the run has probably written itself."""
        spans = [(one.started, one.ended) for one in self.before.attempts if one.ended is not None]
        return tuple(snapshot.written_by_run(self.source, self.code_changes, spans))

    def prepare(self, take_code: Callable[[RunDir], str], slurm_cluster: str | None) -> None:
        """Write all that the job needs, and then that there will be one: this process may be killed at any line.

        `take_code` puts a snapshot of the code into the run directory and returns its name.
        """
        run, plan = self.run, self.plan
        if problem := Store(run.checkpoints, missing_seconds=0).foreign(Owner(run.name, identity(plan.config))):
            raise InputError(problem)
        for folder in (run.path, run.submitit, run.checkpoints, run.tensorboard):
            folder.mkdir(parents=True, exist_ok=True)
        run.failed_starts.unlink(missing_ok=True)  # the nodes of an earlier submission say nothing of this one
        version = take_code(run)
        self.begins = start_from.bring(plan.config, run, self.parent, self.given, version)
        run.write_config(plan.config)
        run.keep_number()
        self.plan = chains.prepared(plan)
        run.record(
            Event.SUBMITTING,
            cluster=plan.cluster,
            scheduler=plan.scheduler,
            slurm_cluster=slurm_cluster,
            code=version,
            code_changes=self.code_changes,
            command=self.command,
            cwd=str(self.source),
            **({"sweep": self.sweep} if self.sweep else {}),
            **start_from.entry(plan.config),
            given=records.known(self.given),
            **plan.config.told(),
            **_turn(plan),
            **({"after": plan.config.after} if plan.config.after else {}),
            **({"held_for_others": True} if self.plan.is_held else {}),
            **_how_to_resume(run, self.command, self.of_environment),
        )
        self._is_recorded = True

    def record_job(self, job_id: str) -> None:
        """Write down which job the run has got."""
        try:
            self.run.record(Event.SUBMITTED, job_id=job_id)
        except OSError as error:  # the job is there: the next submission finds it as one that was cut off
            log.warning("job %s was started, which cannot be journalled: %s", job_id, error)
        tell_dependents(self.run)

    def undo(self, error: BaseException) -> None:
        """Leave the run as it was, after an error before there was a job; after a SchedulerTimeout there may be one,
        for which the next submission looks."""
        if isinstance(error, SchedulerTimeout):
            return
        if self._is_recorded:
            with contextlib.suppress(OSError):  # else the next submission finds it as one that was cut off
                self.run.record(Event.SUBMIT_FAILED, error=str(error) or "interrupted before there was a job")
        if self._is_new:
            if self._is_empty:
                shutil.rmtree(self.run.path, ignore_errors=True)
            self.run.forget_number()

    def full_disk(self, error: OSError) -> InputError:
        """What to say of an error of the disk."""
        where = error.filename2 or error.filename or self.run.path
        return InputError(f"{where}: {error.strerror or error}; make room, or set --runs-dir or JOBKIT_RUNS")


def _turn(plan: LaunchPlan) -> dict[str, Any]:
    """How a local run waits, for its supervisor: it finds that in the journal."""
    return {"priority": plan.turn.priority, "queues": plan.turn.queues} if plan.scheduler == "local" else {}


def _how_to_resume(run: RunDir, command: str, of_environment: bool) -> dict[str, str]:
    """What continues the run where the command that is recorded lacks what is secret in it, or the variables that it
    was typed with."""
    if secrets.MASK not in command and not of_environment:
        return {}
    words = ["python", "-m", "jobkit", "resume", run.name, "--runs-dir", str(run.path.parent)]
    return {"resume": shlex.join(words)}
