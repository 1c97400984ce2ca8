"""Whoever follows a run gets its last lines, and its exit code."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from harness.project import Project, status, wait_for

from jobkit.cli.several import worst
from jobkit.errors import SchedulerTimeout
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission.ending import exit_code, read_to_the_end


def test_what_is_printed_until_the_job_has_gone_is_read(tmp_path: Path) -> None:
    log, seen = tmp_path / "log", []
    log.write_text("finished is recorded\n")

    def gone(run: RunDir, status: Status) -> bool:
        if not seen:
            return False
        log.write_text("goodbye\n")  # the very last that its processes do
        return True

    read_to_the_end(RunDir(tmp_path), Status(), lambda: seen.append(log.read_text()), gone)
    assert seen == ["finished is recorded\n", "goodbye\n"]


def test_a_job_that_nobody_can_ask_about_is_not_waited_for(tmp_path: Path) -> None:
    def away(run: RunDir, status: Status) -> bool:
        raise SchedulerTimeout("no answer")

    seen: list[int] = []
    read_to_the_end(RunDir(tmp_path), Status(), lambda: seen.append(1), away)
    assert seen == [1]


def test_the_worst_of_several_ends() -> None:
    codes = [exit_code(state) for state in (State.FINISHED, State.FAILED, State.INTERRUPTED, State.CANCELLED)]
    assert codes == [0, 1, 75, 75]
    assert [worst(each) for each in itertools.combinations(codes, 2)] == [1, 75, 75, 1, 1, 75]
    assert worst([]) == 0


LATE = """
import time
from pathlib import Path

def train(ctx):
    import atexit
    atexit.register(say_goodbye, ctx.run_dir)
    print("begins", flush=True)
    for step in ctx.steps(2):
        pass
    if ctx.params.fails:
        raise ValueError("on purpose")


def say_goodbye(run_dir):
    while not (run_dir / "go").exists():
        time.sleep(0.01)
    print("goodbye", flush=True)
"""


@pytest.mark.parametrize(("fails", "code"), [(False, 0), (True, 1)])
def test_logs_follow_a_run_to_its_last_line_and_end_with_its_exit_code(tmp_path: Path, fails: bool, code: int) -> None:
    project = Project(tmp_path)
    (tmp_path / "mytask.py").write_text(LATE)
    small = ("resources.nodes=1", "resources.tasks_per_node=1", "retry.crash=0", f"+params.fails={fails}")
    project.submit("--local", "--detach", *small)
    (run,) = project.runs
    following = project.start("logs", "-f", run.name)
    end = "failed" if fails else "finished"
    if not fails:
        wait_for("the end", lambda: status(run).get("state") == end, run)
    (run / "go").touch()
    printed, _ = following.communicate(timeout=120)
    assert "begins" in printed and printed.splitlines()[-1] == "goodbye"
    assert following.returncode == code
