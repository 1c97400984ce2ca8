"""Removing runs, or their checkpoints: never of one to which more may happen, and never so that a half is left."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from jobkit import slurm
from jobkit.errors import InputError, SchedulerError
from jobkit.run import references, shared_code
from jobkit.run.command_line import to_type
from jobkit.run.dependencies import dependents
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission.job import settle
from jobkit.submission.observer import FindJob, can_be_asked, has_supervisor, is_active, jobs_now, observe

ASIDE = ".removed"
"""A folder in the runs directory: what is being removed is moved there first, so that nobody takes a half for a run."""

LEFT_SECONDS = 86400.0
"""After so long nobody is taken to be deleting still what another host has moved aside."""

BLOCK = 512
"""Bytes that `st_blocks` counts in."""


def refuse_live(runs: Sequence[RunDir]) -> None:
    """Raise InputError where a job or a process of one of some runs lives, or may begin; SchedulerError where Slurm has
    to be asked and does not answer. What is recorded as over is, where this shell has no Slurm to ask."""
    try:
        live = _live(runs, _jobs_of(runs))
    except SchedulerError as error:
        if slurm.is_away(error):  # it may answer later
            raise
        _refuse_unknown(runs, error)
        live = [(run, "its process has not ended") for run in runs if _is_local_and_lives(run)]
    if live:
        shown = ", ".join(f"{run.name} ({why})" for run, why in live[:5]) + (" ..." if len(live) > 5 else "")
        names = [run.name for run, _ in live[:5]]
        raise InputError(f"nothing was removed: {shown}; `{to_type('cancel', *names)}` first, or leave them out")


def _live(runs: Sequence[RunDir], find_job: FindJob) -> list[tuple[RunDir, str]]:
    """The runs that live, each with what keeps it from being removed."""
    return [(run, why) for run in runs if (why := _why_live(run, observe(run, find_job), find_job)) is not None]


def _refuse_unknown(runs: Sequence[RunDir], error: SchedulerError) -> None:
    """Raise SchedulerError where a job of one of some runs may be in a queue that cannot be asked."""
    for run in runs:
        status = run.status()
        is_over = status.never_submitted or status.state in (State.FINISHED, State.FAILED, State.CANCELLED)
        if status.scheduler == "slurm" and not is_over:
            what = (
                f"{run.name} is recorded as {status.state}, and whether its job {status.job_id} has ended is not known"
            )
            then = f"where its Slurm can be asked (SLURM_CONF) the same command works; sure of it: rm -r {run.path}"
            raise SchedulerError(f"nothing was removed: {what} ({str(error).partition(' (')[0]}); {then}") from None


def _is_local_and_lives(run: RunDir) -> bool:
    status = run.status()
    return status.scheduler != "slurm" and not status.never_submitted and has_supervisor(run, status)


def refuse_needed(runs: Sequence[RunDir]) -> list[str]:
    """Raise InputError where another run that is under way needs one of some runs, which is not among them.

    Returns lines about others that could not be continued without it.
    """
    own, told = {run.path.resolve() for run in runs}, []
    needed: dict[str, RunDir] = {}
    for run in runs:
        for other in (one for one in dependents(run) if one.path.resolve() not in own):
            status = other.status()
            if status.state == State.FINISHED or not _needs(other, status, run):
                continue
            if status.state.is_under_way:
                needed[f"{run.name} ({other.name}, which is {status.state}, needs it)"] = other
            else:
                told.append(f"{other.name} ({status.state}) needs {run.name}: without it, it cannot be continued")
    if needed:
        shown = ", ".join(list(needed)[:5]) + (" ..." if len(needed) > 5 else "")
        names = list(dict.fromkeys(other.name for other in needed.values()))[:5]
        raise InputError(f"nothing was removed: {shown}; `{to_type('cancel', *names)}` first, or leave them out")
    return told


def _needs(other: RunDir, status: Status, run: RunDir) -> bool:
    """Whether a run that comes after another one waits for it, or has a path in it; what it needed of its result is
    kept since it has begun."""
    return not status.attempts or run.name in references.directories_in(other.config())


def _jobs_of(runs: Sequence[RunDir]) -> FindJob:
    on_slurm = [run for run in runs if run.status().scheduler == "slurm"] if slurm.available() else []
    return jobs_now(on_slurm, ("PENDING", "RUNNING", *slurm.ENDED))


def _why_live(run: RunDir, status: Status, find_job: FindJob) -> str | None:
    """What keeps a run from being removed; None where nothing does."""
    if status.never_submitted:
        return None
    if status.state.is_under_way:
        return str(status.state)
    if status.scheduler != "slurm":
        return "its process has not ended" if has_supervisor(run, status) else None
    job = find_job(status.job_id) if status.job_id is not None and can_be_asked(status) else None
    if job is not None and not job.ended and job.runs(run.batch_script):
        return f"its job {status.job_id} has not ended"
    return None


def size(folder: Path) -> int:
    """Bytes on the disk that go with a folder: not those of files that have another name elsewhere, too."""
    found: dict[tuple[int, int], list[int]] = {}
    for file in _files(folder):
        one = found.setdefault((file.st_dev, file.st_ino), [file.st_nlink, 0, file.st_blocks * BLOCK])
        one[1] += 1
    return sum(occupied for names, seen, occupied in found.values() if seen >= names)


def _files(folder: Path) -> Iterator[os.stat_result]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # another user's, or gone since
        return
    for entry in entries:
        with suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            else:
                yield entry.stat(follow_symlinks=False)


def other_owner(run: RunDir) -> str | None:
    """Whose a run is, where it is another user's: who may write there need not mean to remove it. Root may."""
    try:
        owner = run.path.stat().st_uid
    except OSError:  # gone since
        return None
    if os.geteuid() in (0, owner):
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"


def part_of(run: RunDir, *, checkpoints_only: bool) -> list[Path]:
    """What is removed of a run."""
    return [run.checkpoints, run.evaluation_file] if checkpoints_only else [run.path]


def remove(run: RunDir) -> list[str]:
    """Remove a run that does not live; the number in its name is not given again. Raises InputError and OSError.

    Returns the shared snapshots of code that it had, for `shared_code.remove_unused`.
    """
    if run.path.is_symlink():
        raise InputError(f"{run.name} is a link to {run.path.resolve()}: remove the run by that path, and the link")
    _refuse_others(run)
    if not run.journal.path.exists():
        raise InputError(f"{run.path} has no journal: jobkit may not have made it; remove it yourself")
    with run.submission_lock():
        _check_again(run)
        versions = shared_code.used_by(run)
        aside = _move_aside(run.path, run.path.parent)
    _delete(aside)  # without the lock, which holds up a new submission of it: that makes a directory of its own
    return versions


def remove_checkpoints(run: RunDir) -> None:
    """Remove the checkpoints of a run that does not live: it can only be started from its beginning then. Raises as
    `remove`."""
    _refuse_others(run)
    if run.checkpoints.is_symlink():
        raise InputError(f"{run.checkpoints} is a link to {run.checkpoints.resolve()}: remove what is there yourself")
    with run.submission_lock():
        _check_again(run)
        settle(run)
        is_told = True
        try:
            run.record(Event.CHECKPOINTS_REMOVED)  # first: what is said to be there is there at any instant
        except OSError:  # the disk may be full, which is why they go
            is_told = False
        aside = [
            _move_aside(path, run.path.parent)
            for path in part_of(run, checkpoints_only=True)
            if path.exists() and not path.is_symlink()
        ]
        run.checkpoints.mkdir(exist_ok=True)
        for path in aside:
            _delete(path)
        if not is_told:
            run.record(Event.CHECKPOINTS_REMOVED)


def _refuse_others(run: RunDir) -> None:
    if (owner := other_owner(run)) is not None:
        raise InputError(f"{run.name} is {owner}'s: not removed; who is sure of it may use rm -r {run.path}")


def _check_again(run: RunDir) -> None:
    """Raise InputError where somebody has continued the run since it was looked at; the caller holds the lock."""
    status = observe(run)
    if is_active(run, status):
        raise InputError(f"{run.name} is {status.state} by now: not removed")


def _move_aside(path: Path, runs_dir: Path) -> Path:
    """Give a folder, or file, at once a name under which nobody looks for it, on the same disk."""
    folder = runs_dir / ASIDE
    folder.mkdir(exist_ok=True)
    aside = folder / "@".join([str(time.time_ns()), str(os.getpid()), os.uname().nodename, path.name])
    path.rename(aside)
    return aside


def _delete(path: Path) -> None:
    """Delete what was moved aside; OSError says where the rest of it is."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    with suppress(OSError):  # somebody else is removing something
        path.parent.rmdir()


def clear_aside(runs_dir: Path) -> None:
    """Delete what an earlier removal that was killed has left, as far as this user may."""
    with suppress(OSError):
        for path in list((runs_dir / ASIDE).iterdir()):
            if not _is_being_deleted(path):
                with suppress(OSError):
                    _delete(path)


def _is_being_deleted(path: Path) -> bool:
    """Whether another process may be deleting it."""
    moved, pid, host, _ = path.name.split("@", 3) if path.name.count("@") >= 3 else ("0", "", "", "")
    if host != os.uname().nodename:  # nothing is known of processes there
        return time.time() - int(moved) / 1e9 < LEFT_SECONDS
    return Path(f"/proc/{pid}").exists()
