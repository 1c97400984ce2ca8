"""Which runs words mean, and how runs are now: run/runs.py and run/view.py."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from harness.journals import TOKEN, began, ended, finished, make_run, submitted

from jobkit.errors import InputError, NoSuchRun, SchedulerTimeout
from jobkit.run import runs
from jobkit.run.journal import Journal, read_status
from jobkit.run.locks import Lock
from jobkit.run.rundir import RunDir
from jobkit.run.view import View, look, view, views
from jobkit.slurm import commands, jobs
from jobkit.slurm.jobs import Job
from jobkit.slurm.pending import explain_reason

NAMES = ["toy-11f5f19c", "toy-11f5f19c-2", "digits-aaaaaaaa", "digits-bbbbbbbb", "digits-big-cccccccc"]


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    for name in NAMES:
        make_run(tmp_path / "runs", name, submitted())
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["toy"], ["toy-11f5f19c-2"]),  # the newest of its only config
        (["toy-11f5f19c"], ["toy-11f5f19c"]),  # a whole name is no beginning
        (["digits-bb"], ["digits-bbbbbbbb"]),
        (["digits-big"], ["digits-big-cccccccc"]),
        (["digits-[ab]*"], NAMES[2:5]),
        (["toy", "toy-11f5f19c-2", "digits-a*"], ["toy-11f5f19c-2", "digits-aaaaaaaa"]),
    ],
)
def test_words_mean_runs(runs_dir: Path, words: list[str], names: list[str]) -> None:
    assert [run.name for run in runs.find(words, runs_dir)] == names


def test_the_beginning_of_several_names_says_how_to_mean_all(runs_dir: Path) -> None:
    with pytest.raises(InputError) as refusal:
        runs.find(["digits-b"], runs_dir)
    error = refusal.value
    assert (error.key, error.found, error.hint) == ("RUN", "digits-b", "'digits-b*' means all of them")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("tooy", "did you mean 'toy'?"),
        ("dgits*", "did you mean 'digits'?"),
        ("notes", ""),
    ],
)
def test_a_word_that_means_no_run_names_the_nearest(runs_dir: Path, word: str, hint: str) -> None:
    with pytest.raises(NoSuchRun) as refusal:
        runs.find([word], runs_dir)
    assert (refusal.value.found, refusal.value.hint) == (word, hint)


def test_a_removed_name_means_no_run_of_fresh(runs_dir: Path) -> None:
    (runs_dir / "toy-11f5f19c" / "config.yaml").unlink()
    with pytest.raises(NoSuchRun):
        runs.find(["toy-11f5f19c"], runs_dir)


def test_paths_versions_and_order(runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = make_run(tmp_path / "old", "toy-11f5f19c", submitted(), began(), finished())
    monkeypatch.chdir(tmp_path)
    assert runs.find(["old/toy-11f5f19c"], runs_dir)[0].path == elsewhere.path
    assert [run.name for run in runs.versions(runs_dir, "toy-11f5f19c")] == NAMES[:2]
    Journal(RunDir(runs_dir / NAMES[2])).append(began(token="other"))
    assert runs.runs_in(runs_dir)[0].name == NAMES[2]
    assert runs.runs_in(tmp_path / "missing") == []
    monkeypatch.setenv("JOBKIT_RUNS", "here")
    assert runs.runs_dir_of(None) == tmp_path / "here"


def test_a_job_id_is_found_in_journals_and_in_the_comment(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(runs_dir, "old-dddddddd", submitted(), began(job_id="31"), ended("crashed", "fail"))
    monkeypatch.setattr(commands, "is_available", lambda: True)
    comments = {"17": TOKEN, "18": "jobkit:toy-11f5f19c:1:000000"}  # 18: of a copy of the run elsewhere
    monkeypatch.setattr(commands, "is_here", lambda cluster: cluster == "here")
    monkeypatch.setattr(jobs, "queue", lambda users, timeout: [_job(*item) for item in comments.items()])
    make_run(runs_dir, "new-11f5f19c", submitted("slurm", cluster="here"))
    assert [run.name for run in runs.find(["17"], runs_dir)] == ["new-11f5f19c"]
    assert [run.name for run in runs.find(["31"], runs_dir)] == ["old-dddddddd"]
    with pytest.raises(NoSuchRun):
        runs.find(["18"], runs_dir)


def _job(job_id: str = "17", comment: str = TOKEN, state: str = "PENDING", reason: str = "Priority") -> Job:
    return Job(job_id, state, reason, None, None, "", "main", comment)


# How runs are now


class _Slurm:
    """Answers as Slurm does, and counts the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answer: Job, error: Exception | None = None) -> None:
        self.questions = 0
        self.error = error
        self.answer = list(answer)
        monkeypatch.setattr(commands, "is_available", lambda: True)
        monkeypatch.setattr(commands, "is_here", lambda cluster: cluster == "here")
        monkeypatch.setattr(jobs, "queue", self.queue)

    def queue(self, users: str, timeout: float) -> list[Job]:
        self.questions += 1
        if self.error is not None:
            raise self.error
        return self.answer


@pytest.mark.parametrize(
    ("answer", "events", "state", "alive"),
    [
        ([_job()], [], "queued", True),
        ([_job(state="RUNNING")], [], "queued", True),  # its supervisor starts
        ([_job(state="RUNNING")], [began()], "running", True),
        ([_job()], [began()], "queued", True),  # Slurm itself has put it back
        ([_job(state="COMPLETING")], [began()], "running", True),
        ([_job(state="CANCELLED")], [], "lost", False),
        ([_job(comment="jobkit:toy-11f5f19c:1:000000")], [began()], "lost", False),  # of a copy of the run
        ([], [began()], "lost", False),
        ([_job(state="CANCELLED"), _job("18", state="RUNNING")], [began()], "running", True),
        ([_job(comment=f"site=x {TOKEN}")], [], "queued", True),
        ([], [began(), ended("crashed", "fail")], "failed", False),
    ],
)
def test_a_job_is_the_runs_where_its_comment_has_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: list[Job], events: list[Any], state: str, alive: bool
) -> None:
    _Slurm(monkeypatch, *answer)
    run = make_run(tmp_path, "toy-11f5f19c", submitted("slurm", cluster="here"), *events)
    now = view(run)
    assert (now.state, now.alive, now.answered) == (state, alive, True)


def test_a_job_that_is_found_says_that_its_cluster_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its controller has moved: no job of another run of it is an answer too."""
    _Slurm(monkeypatch, _job(state="RUNNING"))
    found = make_run(tmp_path, "toy-11f5f19c", submitted("slurm", cluster="moved"), began())
    gone = submitted("slurm", cluster="moved", token="jobkit:sine-11f5f19c:1:000000")
    runs_there = [found, make_run(tmp_path, "sine-11f5f19c", gone, began())]
    assert [now.state for now in views(runs_there)] == ["running", "lost"]


@pytest.mark.parametrize(
    "case",
    ["no answer", "another cluster", "another user", "no slurm here"],
)
def test_silence_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    slurm = _Slurm(monkeypatch, error=SchedulerTimeout("no answer") if case == "no answer" else None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    fields: dict[str, Any] = {"cluster": "there" if case == "another cluster" else "here"}
    fields |= {"user": "somebody"} if case == "another user" else {}
    if case == "no slurm here":
        monkeypatch.setattr(commands, "is_available", lambda: False)
    now = view(make_run(tmp_path, "toy-11f5f19c", submitted("slurm", **fields), began()))
    assert (now.state, now.answered, now.is_over) == ("running", False, False)
    assert f"cluster {fields['cluster']}" in now.words
    assert slurm.questions <= 1


def test_one_question_for_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [f"jobkit:toy-{number:08}:1:abcdef" for number in range(30)]
    slurm = _Slurm(monkeypatch, *(_job(str(n), token) for n, token in enumerate(tokens)))
    made = [make_run(tmp_path, token.split(":")[1], submitted("slurm", token=token)) for token in tokens]
    assert [now.job_id for now in views(made)] == [str(number) for number in range(30)]
    assert slurm.questions == 1
    views([make_run(tmp_path, "done-11f5f19c", submitted("slurm"), began(), finished())])
    assert slurm.questions == 1  # a run that is over needs none


def test_runs_of_one_array_have_their_own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Slurm(monkeypatch, _job("9_0", state="RUNNING"), _job("9_1"))
    made = [make_run(tmp_path, f"toy-{task:08}", submitted("slurm", task=task)) for task in range(3)]
    assert [(now.job_id, now.state) for now in views(made)] == [("9_0", "queued"), ("9_1", "queued"), (None, "lost")]


def test_a_local_run_lives_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    run = make_run(tmp_path, "toy-11f5f19c", submitted(), began(job_id="local-here-5"))
    with run.alive_lock():
        assert (view(run).state, view(run).job_id) == ("running", "local-here-5")
    assert (view(run).state, view(run).is_over) == ("lost", True)
    with run.submit_lock():  # a submission is about to start its job
        assert (view(run).state, view(run, locked=True).state) == ("running", "lost")


def test_a_run_directory_that_goes_away_during_a_look_is_not_over(tmp_path: Path) -> None:
    run = make_run(tmp_path, "toy-11f5f19c", submitted(), began())
    status = read_status(run)
    run.path.rename(tmp_path / "elsewhere")  # as by a mount that ends between the journal and the lock
    now = look([(run, status)])[0]
    assert (now.state, now.answered, now.is_over) == ("running", False, False)


@pytest.mark.parametrize(
    ("host", "held", "answered", "state"),
    [
        (socket.gethostname(), False, True, "lost"),
        ("", False, True, "lost"),  # an older journal
        ("elsewhere", False, False, "running"),  # its file system may keep locks to a host
        ("elsewhere", True, True, "running"),
    ],
)
def test_a_free_lock_is_no_answer_about_another_host(
    tmp_path: Path, host: str, held: bool, answered: bool, state: str
) -> None:
    run = make_run(tmp_path, "toy-11f5f19c", submitted(host=host), began(job_id="local-elsewhere-5"))
    with run.alive_lock() if held else nullcontext():
        now = view(run)
    assert (now.answered, now.state, now.is_over) == (answered, state, state == "lost")
    assert (now.elsewhere, "on host elsewhere, not known from here" in now.words) == (
        ("", False) if answered else ("elsewhere", True)
    )
    Journal(run).append(ended("crashed", "fail"))
    assert (view(run).answered, view(run).state) == (True, "failed")


def test_a_lock_that_cannot_be_opened_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(lock: Lock) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Lock, "is_held", refused)
    now = view(make_run(tmp_path, "toy-11f5f19c", submitted(), began()))
    assert (now.state, now.answered, now.is_over) == ("running", False, False)


def test_a_run_that_ended_during_the_question_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "toy-11f5f19c", submitted("slurm"), began())
    slurm = _Slurm(monkeypatch)

    def queue(users: str, timeout: float) -> list[Job]:
        Journal(run).append(finished({"loss": 1.0}))
        return []

    monkeypatch.setattr(jobs, "queue", queue)
    assert (view(run).state, slurm.questions) == ("finished", 0)


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("Priority", "higher priority"),
        ("(Resources)", "in use"),
        ("QOSMaxCpuPerUserLimit", "limit of its QOS"),
        ("AssocMaxJobsPerJob", "more than your account allows one job"),
        ("ReqNodeNotAvail, UnavailableNodes:node7", "UnavailableNodes:node7"),
        ("launch_failed_requeued_held", "Slurm holds it"),
        ("SomethingNew", "man squeue"),
    ],
)
def test_reasons_are_in_plain_words_beside_slurms_own(reason: str, part: str) -> None:
    assert part in explain_reason(reason)
    assert reason in explain_reason(reason)


def test_words_of_a_view_say_how_to_release_a_held_job(tmp_path: Path) -> None:
    run = make_run(tmp_path, "toy-11f5f19c", submitted("slurm"))
    held = View(run, Journal(run).status, _job(reason="JobHeldUser"), answered=True, alive=True)
    assert "scontrol release 17" in held.words
