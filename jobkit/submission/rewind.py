"""Going back within a run: what came after a step is kept as a branch, and the run continues from that step."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobkit.checkpoint.store import Store
from jobkit.errors import InputError
from jobkit.run.events import Event
from jobkit.run.files import fsync_dir
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.submission import job


@dataclass(frozen=True)
class Rewound:
    """What was done."""

    branch: Path
    """Where what came after the step is."""
    moved: list[int]
    """Steps of the checkpoints that are there now."""
    status: Status


def rewind(run: RunDir, step: int, skip_samples: Sequence[int] | None = None) -> Rewound:
    """Let a run that is not under way continue from its checkpoint of `step`; what came after it is kept beside.

    From there on its loader leaves out `skip_samples`, in place of those of an earlier rewind; None leaves that as it
    is. Raises InputError, with nothing moved, for a run that is under way and for a step without a good checkpoint.
    """
    with run.submission_lock():
        status = job.reconcile(run)
        if status.state.is_under_way:
            raise InputError(f"{run.name} is {status.state}: cancel it first, then go back")
        store = Store(run.checkpoints, missing_seconds=0)
        store.clean()  # else the next attempt would bring back a later one that a killed save has left replaced
        later = [one for one in store.steps() if one > step]
        _check(run, store, step)
        number = 1 + sum(one["event"] == Event.REWOUND for one in run.journal.read())
        branch = run.checkpoints / "branches" / str(number)
        if not later and skip_samples is None and not branch.exists():  # else one that was killed is completed
            raise InputError(f"{run.name}: step {step} is its newest checkpoint: there is nothing to go back from")
        branch.mkdir(parents=True, exist_ok=True)
        if run.tensorboard.exists():  # the next attempt cuts the curves back to the step
            shutil.copytree(run.tensorboard, branch / run.tensorboard.name, dirs_exist_ok=True)
        for beside in (run.final, run.evaluation_file):
            if beside.exists():
                beside.rename(branch / beside.name)
        for one in later:  # the newest first: a crash in between leaves a run that stands at a step in between
            store.move_away(one, branch)
        fsync_dir(branch)
        skipped = {} if skip_samples is None else {"skip_samples": list(skip_samples)}
        moved = Store(branch).steps()
        run.record(Event.REWOUND, step=step, branch=str(branch.relative_to(run.path)), moved=moved, **skipped)
        return Rewound(branch, moved, run.status())


def _check(run: RunDir, store: Store, step: int) -> None:
    start, steps = run.config().start_from, store.steps()
    if step not in steps:
        if start.run and start.step == step and not start.weights_only:
            return  # it begins there
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise InputError(f"{run.name} has no checkpoint of step {step} (it has: {there}); --fresh begins at step 0")
    if problems := store.verify(step):
        raise InputError(f"{run.name}: the checkpoint of step {step} is damaged: {problems[0]}")
