"""Another user may look at runs that are readable: nothing is written, nothing waited for, and no traceback shown."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.in_process import Done, jobkit
from harness.other_user import as_nobody, only_root, open_folder
from harness.project import Project

from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir

pytestmark = only_root

for name in ("cli.list", "cli.logs", "cli.resume", "cli.status", "cli.cancel", "submission.submit", "submission.local"):
    importlib.import_module(f"jobkit.{name}")  # another user may not be able to read it

LOOKS = (("list",), ("list", "--json"), ("status", "x-1"), ("status", "x-1", "--json"), ("logs", "x-1"))


@pytest.fixture
def project() -> Iterator[Project]:
    with open_folder() as folder:
        yield Project(folder / "project")


@pytest.fixture
def run(project: Project) -> RunDir:
    """One that the journal says is running here."""
    run = RunDir(project.path / "runs" / "x-1")
    run.path.mkdir(parents=True)
    run.write_config(Config(name="x", task="mytask:train"))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    run.record(Event.SUBMITTED, job_id="1")
    run.record(Event.STARTED, attempt=1, job_id="1")
    run.rank_log(1, 0).parent.mkdir(parents=True)
    run.rank_log(1, 0).write_text("a line\n")
    return run


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.lstat().st_mtime_ns, file.lstat().st_mode) for file in folder.rglob("*")}


def as_typed_by_nobody(project: Project, *arguments: str, expect: int | None = 0) -> Done:
    before = tree(project.path)
    done = as_nobody(lambda: jobkit(project, *arguments, expect=expect))
    assert tree(project.path) == before, "who looks writes nothing"
    return done


@pytest.mark.parametrize("lock", ["held", "free", "unreadable", "missing"])
def test_whether_a_run_lives_is_found_by_who_may_only_read(project: Project, run: RunDir, lock: str) -> None:
    alive = run.alive_lock()
    file = Path(alive.lock_file)
    if lock == "held":
        alive.acquire()
    elif lock == "unreadable":
        file.chmod(0o600)
    elif lock == "missing":
        file.unlink()
        file.parent.rmdir()
    try:
        for look in LOOKS:
            as_typed_by_nobody(project, *look)
        known = {"held": True, "free": False, "unreadable": None, "missing": False}[lock]
        assert as_nobody(run.has_local_supervisor) is known
        (found,) = json.loads(as_typed_by_nobody(project, "list", "--json").stdout)
        # What is certain for who may not look at the lock is only what the journal says.
        assert (found["state"], found["probably"]) == (
            ("running", None) if known is not False else ("interrupted", "lost")
        )
    finally:
        alive.release()


def test_a_run_that_may_not_be_read_is_left_out_of_the_list_and_named(project: Project, run: RunDir) -> None:
    run.journal.path.chmod(0o600)
    done = as_typed_by_nobody(project, "list", "--json")
    assert json.loads(done.stdout) == []
    assert "x-1 is left out" in done.stderr and "events.jsonl: Permission denied" in done.stderr


def test_a_run_whose_directory_is_closed_is_named_too(project: Project, run: RunDir) -> None:
    run.path.chmod(0o700)
    assert "x-1 is left out" in as_typed_by_nobody(project, "list").stderr


@pytest.mark.parametrize("closed", ["", "events.jsonl"])
@pytest.mark.parametrize("verb", ["status", "logs"])
def test_what_may_not_be_read_is_said_in_a_line(project: Project, run: RunDir, verb: str, closed: str) -> None:
    (run.path / closed).chmod(0o700 if closed == "" else 0o600)
    said = as_typed_by_nobody(project, verb, "x-1", expect=2).stderr
    assert said.startswith("error: ") and "Permission denied" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("verb", ["cancel", "preempt"])
def test_another_users_run_is_not_acted_on_and_that_is_said_in_a_line(project: Project, run: RunDir, verb: str) -> None:
    with run.alive_lock():
        said = as_typed_by_nobody(project, verb, "x-1", expect=2).stderr
    assert said.startswith("error: ") and len(said.splitlines()) == 1
    assert "it is root's" in said or "it is another user's" in said  # of a file that is not there yet


def test_a_submission_into_another_users_runs_is_refused_in_a_line(project: Project, run: RunDir) -> None:
    run.path.parent.chmod(0o1777)  # runs of all may lie there, but the folder of locks is the first user's
    run.submission_lock()
    said = as_typed_by_nobody(project, "submit", "toy.yaml", "--local", expect=2).stderr
    assert said.startswith("error: ") and ".locks" in said and len(said.splitlines()) == 1
