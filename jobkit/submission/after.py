"""`--after RUN` and `after: [RUN]`: the runs that a submission names, and the jobs that its own job depends on.

    words --resolve--> config.yaml, whole names --depend, under the run's lock--> #SBATCH --dependency=afterany:17

The job looks at those runs again when it starts (supervisor/after.py): a job may end before its run is finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jobkit.config.load import Loaded
from jobkit.errors import InputError, NoSuchRun
from jobkit.run.after import predecessors, waits_on
from jobkit.run.runs import absent_runs, find
from jobkit.run.status import State
from jobkit.run.view import View, views
from jobkit.slurm import jobs
from jobkit.submission.plan import LaunchPlan
from jobkit.usage import program, to_continue


def resolve(loaded: Loaded, words: Sequence[str], runs_dir: Path, *, may_be_gone: bool = False) -> Loaded:
    """Return the config with the whole names of the runs that `after:` and the words of --after mean.

    Raises InputError for a word that means no run; `may_be_gone` leaves such a word out, for a run that has begun.
    """
    names: dict[str, None] = {}
    for key, word in [*(("after", word) for word in loaded.config.after), *(("--after", word) for word in words)]:
        try:
            runs = find([word], runs_dir)
        except InputError as error:
            if may_be_gone and isinstance(error, NoSuchRun):
                continue
            error.key = key
            raise loaded.locate(error) if key == "after" else error from None
        if lacking := absent_runs(word, runs_dir):
            hint = f"first: {program('wait')} {word}"
            raise InputError(f"{len(lacking)} run(s) of the sweep have not begun", key=key, found=word, hint=hint)
        names |= {run.name if run.path.parent == runs_dir else str(run.path): None for run in runs}
    return dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, after=list(names)))


def depend(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan, on Slurm with the jobs that its job waits for. Raises InputError for a run that it cannot await.

    The caller holds the run's submit lock: `plan.run` is the run that starts.
    """
    ids: list[str] = []
    others = predecessors(plan.run, plan.config.after)
    for other in others:
        if other.path == plan.run.path:
            raise InputError("a run cannot wait for itself", key="after", found=other.name)
        if waits_on(other, plan.run):
            raise InputError("that run waits for this one", key="after", found=other.name)
    for now in views(others):
        if now.state == State.FINISHED:
            continue
        _refuse(now, plan)
        if now.job is not None:
            ids.append(now.job.job_id)
    if not ids:
        return plan
    dependency = ",".join(filter(None, [plan.options.of_sbatch("dependency"), jobs.afterany(ids)]))
    return dataclasses.replace(plan, parameters={**plan.parameters, "dependency": dependency})


def _refuse(now: View, plan: LaunchPlan) -> None:
    """Raise InputError for an unfinished run whose end this one would not see."""
    submitted, name = now.status.submitted, now.run.name
    if now.is_over:
        hint = f"continue it first: {to_continue(now.run.path, submitted)}"
        raise InputError(f"that run is {now.state}, and is not under way", key="after", found=name, hint=hint)
    if submitted is not None and submitted.scheduler != plan.target.scheduler:
        places = {"slurm": "on Slurm", "local": "on this machine"}
        theirs, ours = places[submitted.scheduler], places[plan.target.scheduler]
        words = f"that run is under way {theirs}, and this one would wait {ours}"
        raise InputError(words, key="after", found=name, hint="start it once that run is finished")
    if not now.answered:
        raise InputError(f"nobody can say how it is: {now.words}", key="after", found=name)
