"""The runs of a runs directory, and which of them some words mean: names, beginnings, patterns, job ids, paths.

    words --find--> RunDir --views (run/view.py)--> View(run, status, job)

Every command that takes RUN calls `find`. Nothing is written here. Slurm is asked about a job id that no attempt had.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from jobkit.errors import InputError, NoSuchRun, nearest
from jobkit.run.journal import read_status
from jobkit.run.locks import Lock
from jobkit.run.rundir import RunDir

WORDS = "a name, the beginning of a name, a pattern ('digits*'), a sweep (digits-11f5f19c.sweep), a job id or a path"

SWEEP = ".sweep"
"""End of the name of a file in the runs directory with the names of a sweep's runs, one a line."""

_PATTERN = re.compile(r"[*?\[]")
_JOB_ID = re.compile(r"\d+(_\d+)?|local-.+")
_RUN_NAME = re.compile(r"(?P<identity>.+-[0-9a-f]{8})(?:-(?P<number>\d+))?")


def runs_dir_of(option: Path | None) -> Path:
    """Return the runs directory: --runs-dir, else $JOBKIT_RUNS, else ./runs."""
    return Path(option or os.environ.get("JOBKIT_RUNS") or "runs").absolute()


def runs_in(runs_dir: Path) -> list[RunDir]:
    """Return every run of a runs directory, the most recently changed first."""
    changed = [(moment, name) for name in _names(runs_dir) if (moment := _changed(name, runs_dir)) is not None]
    return [RunDir.listed(runs_dir, name) for _, name in sorted(changed, reverse=True)]


def versions(runs_dir: Path, name: str) -> list[RunDir]:
    """Return the runs of one config, the oldest first: `toy-11f5f19c`, then `toy-11f5f19c-2` made by --fresh."""
    matches = [match for match in map(_RUN_NAME.fullmatch, _names(runs_dir)) if match and match["identity"] == name]
    runs = [RunDir(runs_dir / match[0]) for match in sorted(matches, key=lambda match: int(match["number"] or 1))]
    return [run for run in runs if run.exists()]


def identity_of(name: str) -> str:
    """Return the name of a run without the number of --fresh: `toy-11f5f19c` for `toy-11f5f19c-2`."""
    match = _RUN_NAME.fullmatch(name)
    return match["identity"] if match else name


def verified_file(runs_dir: Path, code: str | None, name: str) -> Path:
    """Return the file that tells of the last `jobkit verify` of a run's code and values; runs of --fresh share it."""
    return runs_dir / ".verified" / f"{code}-{identity_of(name)[-8:]}.json"


def newest(runs_dir: Path, names: Iterable[str]) -> list[RunDir]:
    """Return the newest run of each config, by the names that the configs have; of a new one the run that it will be.

    The directory is listed once for all of them.
    """
    numbers: dict[str, int] = {}
    for match in filter(None, map(_RUN_NAME.fullmatch, _names(runs_dir))):
        number = int(match["number"] or 1)
        if number > numbers.get(match["identity"], 1) and _changed(match[0], runs_dir) is not None:
            numbers[match["identity"]] = number
    return [RunDir(runs_dir / (f"{name}-{numbers[name]}" if name in numbers else name)) for name in names]


def find(words: Sequence[str], runs_dir: Path) -> list[RunDir]:
    """Return the runs that words mean together, each once. Raises NoSuchRun for a word that means none.

    find(["toy"], runs)             the newest run with this name in its YAML
    find(["digits*", "17"], runs)   all runs that a pattern matches, and the run of Slurm's job 17
    """
    runs = [run for word in words for run in _meant(word, runs_dir)]
    if words and not runs:
        raise NoSuchRun("none of its runs has begun", key="RUN", found=words[0])
    return list({run.path.resolve(): run for run in runs}.values())


def sweep_file(word: str, runs_dir: Path) -> Path | None:
    """Return the file of the sweep that a word means; None where there is none."""
    files = (runs_dir / word, Path(word).absolute())
    return next((file for file in files if file.name.endswith(SWEEP) and file.is_file()), None)


def absent_runs(word: str, runs_dir: Path) -> list[str]:
    """Return the names of the runs of a sweep that do not exist; none for any other word. Raises OSError."""
    file = sweep_file(word, runs_dir)
    names = file.read_text(encoding="utf-8").split() if file is not None else []
    return [name for name in names if file is not None and not RunDir(file.parent / name).exists()]


def sweep_lock(file: Path) -> Lock:
    """Return the lock that the loop of a sweep holds, which starts its runs on this machine."""
    return Lock(file.parent / ".locks" / f"{file.name}.alive")


def sweep_cancel_file(file: Path) -> Path:
    """Return the file that `cancel` makes for that loop: the loop starts nothing more."""
    return file.parent / ".locks" / f"{file.name}.cancel"


def joined(names: Sequence[str]) -> str:
    """Return as many names as a line has room for."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _meant(word: str, runs_dir: Path) -> list[RunDir]:
    if word.endswith(SWEEP):
        return _of_sweep(word, runs_dir)
    for path in (runs_dir / word, Path(word)):
        run = RunDir(path)
        # Elsewhere any project's folder may have a config.yaml.
        if run.exists() and (run.path.parent == runs_dir or run.journal_file.exists()):
            return [run]
    names = [name for name in _names(runs_dir) if _changed(name, runs_dir) is not None]
    if _PATTERN.search(word):
        chosen = sorted(name for name in names if fnmatchcase(name, word))
    else:
        chosen = _beginning_with(word, runs_dir, names)
    if not chosen and _JOB_ID.fullmatch(word):
        chosen = _of_job(word, runs_dir)
    return [RunDir(runs_dir / name) for name in chosen] or _none(word, runs_dir, names)


def _of_sweep(word: str, runs_dir: Path) -> list[RunDir]:
    """The runs of a sweep that exist: those that were refused, or wait for their turn here, do not (`absent_runs`)."""
    file = sweep_file(word, runs_dir)
    if file is None:
        hint = nearest(word, [path.name for path in runs_dir.glob(f"*{SWEEP}")])
        raise NoSuchRun(key="RUN", found=word, allowed=f"a sweep in {runs_dir}", hint=hint)
    names = file.read_text(encoding="utf-8").split()
    return [RunDir(file.parent / name) for name in names if _changed(name, file.parent) is not None]


def _beginning_with(word: str, runs_dir: Path, names: Sequence[str]) -> list[str]:
    """The newest run whose YAML has this name, else the only run whose name begins with the word."""
    identities = {match["identity"] for match in map(_RUN_NAME.fullmatch, names) if match}
    named = [identity for identity in identities if identity[:-9] == word]
    if len(named) == 1:
        return [versions(runs_dir, named[0])[-1].name]
    begun = [name for name in names if name.startswith(word)]
    if _RUN_NAME.fullmatch(word):  # typed a second time, after `rm`, it shall not mean a run of --fresh
        begun = [name for name in begun if not re.fullmatch(re.escape(word) + r"-\d+", name)]
    if len(begun) > 1:
        raise InputError(
            key="RUN",
            found=word,
            allowed=f"one of {joined(sorted(begun))}",
            hint=f"{word + '*'!r} means all of them",
        )
    return begun


def _of_job(job_id: str, runs_dir: Path) -> list[str]:
    """The runs that had a job of this id, else the runs whose job in the queue has it. Clusters repeat ids."""
    from jobkit.run.status import UNDER_WAY
    from jobkit.run.view import look

    def is_meant(name: str | None) -> bool:  # the id of an array means all of its tasks
        return name is not None and job_id in (name, name.partition("_")[0])

    read = [(run, read_status(run)) for run in runs_in(runs_dir)]
    had = [run.name for run, status in read if any(is_meant(attempt.began.job_id) for attempt in status.attempts)]
    waiting = [(run, status) for run, status in read if status.state in UNDER_WAY]
    return had or [now.run.name for now in look(waiting) if is_meant(now.job_id)]


def _none(word: str, runs_dir: Path, names: Sequence[str]) -> list[RunDir]:
    """Raise the error for a word that means no run."""
    in_yaml = {match["identity"][:-9] for match in map(_RUN_NAME.fullmatch, names) if match}
    hint = nearest(word.rstrip("*"), sorted(in_yaml | set(names)))
    where = f"a run in {runs_dir}" if names else f"a run; {runs_dir} has none: --runs-dir DIR, or JOBKIT_RUNS"
    raise NoSuchRun(key="RUN", found=word, allowed=where, hint=hint)


def _names(runs_dir: Path) -> list[str]:
    try:
        return [name for name in os.listdir(runs_dir) if not name.startswith(".")]  # noqa: PTH208 - thousands
    except FileNotFoundError:
        return []


def _changed(name: str, runs_dir: Path) -> float | None:
    """When something of the run was last journalled; None where the folder is no run."""
    folder = f"{runs_dir}/{name}"
    if not os.path.exists(f"{folder}/config.yaml"):  # noqa: PTH110 - a Path takes longer than the question
        return None
    try:
        return os.stat(f"{folder}/events.jsonl").st_mtime  # noqa: PTH116
    except OSError:
        return 0.0  # its submission is about to write it
