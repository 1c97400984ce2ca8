"""Which runs a person means: names, beginnings, patterns, `latest`, job ids, sweeps and paths."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from jobkit.errors import InputError, nearest
from jobkit.run.command_line import to_type
from jobkit.run.files import is_there
from jobkit.run.index import facts_of_ended
from jobkit.run.rundir import VERSION, RunDir
from jobkit.run.runs import FoundRun, all_runs, in_a_folder_above, run_at, versions
from jobkit.run.summary import Facts, facts_of
from jobkit.run.sweeps import names_of_sweeps, runs_of

LATEST = "latest"
"""The word for the run that was submitted last."""

SHOWN_NAMES = 5
"""How many names a line shows of runs of which there may be thousands."""

_JOB_ID = r"[0-9]+(?:_[0-9]+)?"


def choose(words: Sequence[str], runs_dir: Path) -> list[FoundRun]:
    """The runs that some words mean together, each once, in the words' order; InputError for a word that means none.

    A pattern means all runs that it matches, and a job's id all runs of that job's array. The beginning of several
    names is an error that says how to mean all of them.
    """
    if len(words) == 1 and (run := _at_path(words[0], runs_dir)) is not None:
        return [run]  # without a look at thousands of others
    runs = all_runs(runs_dir)
    found: dict[Path, FoundRun] = {}
    for word in words:
        for run in _meant(word, runs_dir, runs):
            found.setdefault(Path(run.directory).resolve(), run)
    return list(found.values())


def find_run(text: str, runs_dir: Path) -> RunDir:
    """The one run that a word means; InputError where it means none or several.

    The name in the YAML means the newest version of its only run; others only begin with it.
    """
    found = choose([text], runs_dir)
    if len(found) > 1:
        raise InputError(f"{text!r} means {len(found)} runs, and one is wanted: {some_names(found)}")
    return found[0].open()


def is_short(word: str, runs_dir: Path) -> bool:
    """Whether a word is `latest` or the beginning of a name: typed again it may mean another run."""
    is_whole = _at_path(word, runs_dir) is not None or runs_of(runs_dir, word) is not None
    return not (is_whole or any(sign in word for sign in "*?[") or re.fullmatch(_JOB_ID, word))


def some_names(runs: Iterable[FoundRun | RunDir]) -> str:
    """`a, b, c, d, e ...`: as many names as a line has room for."""
    return some([run.name for run in runs])


def some(names: Sequence[str]) -> str:
    """As many names as a line has room for."""
    return ", ".join(names[:SHOWN_NAMES]) + (" ..." if len(names) > SHOWN_NAMES else "")


def _meant(word: str, runs_dir: Path, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs that one word means; `runs` are all there are."""
    if (run := _at_path(word, runs_dir)) is not None:
        return [run]
    if any(sign in word for sign in "*?["):
        matches = [run for run in runs if fnmatchcase(run.name, word)]
        return matches or _none(word, runs_dir, runs)
    if word == LATEST and runs:
        return [max(runs, key=lambda run: run.submitted)]
    if (names := runs_of(runs_dir, word)) is not None:
        by_name = {run.name: run for run in runs}
        return [by_name[name] for name in names if name in by_name]  # some may have been removed
    begun = [run for run in runs if run.name.startswith(word) and not _is_version_of(run.name, word)]
    if re.fullmatch(_JOB_ID, word) and (of_job := _of_job(word, runs)):
        if others := [run for run in begun if run not in of_job]:
            has = f"the job of {some_names(of_job)} and the beginning of {some_names(others)}"
            raise InputError(f"{word!r} is ambiguous: {has}; name the run, or {word + '*'!r} for those that begin so")
        return of_job
    return _beginning_with(word, runs_dir, begun) or _none(word, runs_dir, runs)


def _at_path(word: str, runs_dir: Path) -> FoundRun | None:
    """The run whose path or whole name a word is."""
    for path in (Path(word), runs_dir / word):
        if _is_run(RunDir(path), runs_dir):
            return run_at(path.absolute())
    return None


def _is_run(run: RunDir, runs_dir: Path) -> bool:
    """Whether a folder is a run: outside the runs directory it may be any project's that has a config.yaml."""
    return run.exists() and (run.path.parent == runs_dir or is_there(run.journal.path))


def _beginning_with(word: str, runs_dir: Path, begun: Sequence[FoundRun]) -> list[FoundRun]:
    """The run that the beginning of its name, or the name in its YAML, means; `begun` are those that begin so."""
    found = [re.fullmatch(rf"({re.escape(word)}-[0-9a-f]{{8}}){VERSION}", run.name) for run in begun]
    own = {match[1] for match in found if match}
    if len(own) == 1:
        newest = list(versions(runs_dir, own.pop()))[-1]
        return [run for run in begun if run.name == newest.name]
    if len(begun) > 1:
        every = f"{word + '*'!r} means all of them"
        raise InputError(f"{word!r} is the beginning of {len(begun)} runs: {some_names(begun)}; {every}")
    return list(begun)


def _is_version_of(name: str, word: str) -> bool:
    """Whether a run is one that --fresh made of the whole name that a word is: who says that name means no other run,
    as one who removes it twice."""
    whole = re.fullmatch(rf"(.+-[0-9a-f]{{8}}){VERSION}", name)
    return whole is not None and whole[1] == word


def _none(word: str, runs_dir: Path, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """Raise the InputError for a word that means no run."""
    folder, slash, number = word.rpartition("/")
    if slash and not any(sign in word for sign in "*?[") and re.fullmatch(r"s?\d*", number):
        known = names_of_sweeps(runs_dir)
        own = [name for name in known if name.startswith(f"{folder}/")]
        hint = f"there are {some(own)}" if own else nearest(word, known).removeprefix("; ")
        raise InputError(f"no sweep {word!r} in {runs_dir}{hint and f'; {hint}'}")
    names = [run.name for run in runs]
    known = [*names, *(name.rpartition("-")[0] for name in names)]
    hint = nearest(word.rstrip("*"), [name for name in known if name != word])
    if Path(word).suffix in (".yaml", ".yml"):  # what a shell makes of digits* beside digits.yaml
        hint = "; a pattern is to be quoted, as in 'digits*': the shell takes it for names of files"
    if re.search(r"\w\s*[=<>~]", word):
        hint = f"; a condition: --where {shlex.quote(word)}"
    hint = hint or in_a_folder_above(runs_dir)
    if not (hint or runs):
        raise InputError(f"no run {word!r} in {runs_dir}, which has none; --runs-dir DIR, or JOBKIT_RUNS, says where")
    end = " " if hint.endswith("?") else "; "
    raise InputError(f"no run {word!r} in {runs_dir}{hint}{end}`{to_type('list')}` shows them")


def _of_job(job_id: str, runs: Sequence[FoundRun]) -> list[FoundRun]:
    """The runs that have a job now, else those that have had it: Slurm may count anew, and so do other clusters.

    The id of an array means the runs of all its tasks.
    """
    known = facts_of_ended(runs)
    facts = [(run, known.get(run.directory) or _facts(run)) for run in runs]
    now = [run for run, one in facts if _is_of(one.get("job_id"), job_id)]
    return now or [run for run, one in facts if any(_is_of(own, job_id) for own in one.get("jobs", ()))]


def _is_of(job_id: Any, asked: str) -> bool:
    """Whether a job is the one that was asked for, or a task of that array."""
    return job_id == asked or str(job_id).partition("_")[0] == asked


def _facts(run: FoundRun) -> Facts:
    try:
        return facts_of(run.recorded_status() or run.open().status().as_dict())
    except OSError:  # another user's: its jobs are theirs
        return {}
