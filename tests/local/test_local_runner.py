"""What the process that waits for a local sweep's runs survives: runs that are broken, its own death, a submission that
is undone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, events, status, wait_for

from jobkit.run import sweeps
from jobkit.run.rundir import RunDir
from jobkit.run.sweeps import Sweep, at

GATE = "echo $$ >> $0.pid; while test ! -e $0.open; do sleep 0.05; done"


class Gates:
    """A sweep of commands; the one with `n` ends when `open(n)` was called."""

    def __init__(self, path: Path) -> None:
        machine = {"JOBKIT_CPU_SLOTS": "8", "JOBKIT_DEVICES_DIR": str(path / "devices")}
        self.project = Project(path / "project", machine)
        (self.project.path / "gate.yaml").write_text(
            f"name: gate\ncommand: [sh, -c, '{GATE}', '{self.project.path}/${{params.n}}']\nparams: {{n: 0}}\n"
        )

    def submit(self, points: str, *words: str, expect: int = 0) -> str:
        done = jobkit(
            self.project, "submit", "gate.yaml", "--local", "--detach", "--sweep", f"params.n={points}", *words
        )
        assert done.returncode == expect, done
        return done.stdout + done.stderr

    @property
    def sweep(self) -> Sweep:
        return at(self.project.path / "runs/.sweeps/gate/s1")

    @property
    def runner(self) -> int:
        return int(self.sweep.process_file.read_text())

    def run(self, n: int) -> Path:
        (found,) = (one for one in self.project.runs if events(one)[0]["params"] == {"n": n})
        return found

    def open(self, *points: int) -> None:
        for n in points:
            (self.project.path / f"{n}.open").touch()

    def begun(self, n: int) -> list[int]:
        """The processes that its command was started as."""
        file = self.project.path / f"{n}.pid"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def wait_for_state(self, state: str, *points: int) -> None:
        for n in points:
            run = self.run(n)
            wait_for(f"{n} {state}", lambda run=run: status(run).get("state") == state, run, seconds=60)

    def wait_for_end(self) -> None:
        wait_for("the end of the process that waits", lambda: not self.sweep.has_runner(), seconds=60)


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    made = Gates(tmp_path)
    yield made
    made.open(*range(10))
    if (made.sweep.path / "alive").exists():
        made.wait_for_end()


def test_a_run_that_is_broken_or_removed_costs_itself_alone(gates: Gates) -> None:
    gates.submit("0,1,2,3,4", "--first", "--max-running", "1")
    wait_for("the first", lambda: gates.begun(0))
    first, broken, removed, _, kept = (gates.run(n) for n in range(5))
    (broken / "config.yaml").write_text("name: [\n")
    shutil.rmtree(removed)
    gates.open(0, 1, 2, 3, 4)
    gates.wait_for_end()
    assert [status(run)["state"] for run in (first, broken, kept)] == ["finished", "interrupted", "finished"]
    assert "config.yaml" in status(broken)["error"]
    assert not removed.exists()


def test_what_a_killed_process_had_started_counts_and_is_not_started_twice(gates: Gates) -> None:
    gates.submit("0,1,2,3,4", "--max-running", "2")
    wait_for("two", lambda: gates.begun(0) and gates.begun(1))
    said = jobkit(gates.project, "queue").stdout
    assert "sweep gate/s1: 3 run(s) wait for their turn, at most 2 at once" in said
    os.kill(gates.runner, signal.SIGKILL)
    gates.wait_for_end()
    assert "\n     sweep gate/s1: 3 run(s)\n" in jobkit(gates.project, "queue").stdout, "they wait no more"
    assert re.search(r"gate/s1: process \d+ starts what waits", jobkit(gates.project, "queue", "--resume").stdout)
    assert '"sweep": "gate/s1",\n   "waiting": 3,' in jobkit(gates.project, "queue", "--json").stdout
    gates.open(0)
    wait_for("the third", lambda: gates.begun(2))
    by_itself = gates.run(4)
    jobkit(gates.project, "cancel", by_itself.name)
    jobkit(gates.project, "resume", by_itself.name, "--detach")  # it does not wait for the sweep, but counts
    gates.submit("0,1,2,3,4", "--max-running", "3")
    wait_for("its start", lambda: gates.begun(4), seconds=60)
    assert gates.begun(3) == [], "three train"
    gates.open(*range(5))
    gates.wait_for_end()
    assert [len(gates.begun(n)) for n in range(5)] == [1] * 5
    spans = [(_time(gates.run(n), "started"), _time(gates.run(n), "finished")) for n in range(5)]
    assert max(sum(start <= begin < end for start, end in spans) for begin, _ in spans) <= 3


def test_what_is_submitted_while_others_stop_starts_when_they_have(gates: Gates) -> None:
    yaml = gates.project.path / "gate.yaml"
    yaml.write_text(yaml.read_text().replace("echo $$", 'trap "" TERM; echo $$'))
    gates.submit("0,1", "--max-running", "1")
    wait_for("the first", lambda: gates.begun(0), seconds=60)
    os.kill(gates.runner, signal.SIGTERM)
    gates.wait_for_state("interrupted", 1)
    assert "(1 continued, 1 running)" in gates.submit("0,1", "--max-running", "1")
    gates.open(0, 1)
    gates.wait_for_state("finished", 1)


def test_two_commands_that_need_what_the_other_has_do_not_wait_for_ever(
    gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submission of a sweep was killed: a command for one run waits for who submits it now, who needs that run."""
    words = ("submit", "gate.yaml", "--local", "--detach", "--sweep")
    shown = jobkit(gates.project, *words, "params.n=0,1", "--dry-run").stdout.splitlines()
    first, second = (RunDir(gates.project.path / "runs" / line.split()[0]) for line in shown[:2])
    with second.submission_lock():
        killed = gates.project.start(*words, "params.n=0,1")
        wait_for("one that is prepared", lambda: events(first.path), seconds=60)
        killed.kill()
        killed.communicate()
    is_kept = threading.Event()

    def keep_second() -> None:
        with second.submission_lock():
            is_kept.set()
            wait_for("the other command", first.is_being_submitted, seconds=60)

    keeper = threading.Thread(target=keep_second)
    keeper.start()
    is_kept.wait()
    sweeping = gates.project.start(*words, "params.n=1,0")
    wait_for("the submission", lambda: sweeps.is_being_submitted(first.path.parent), seconds=60)
    monkeypatch.setattr(sweeps, "WAIT_SECONDS", 0.2)
    done = jobkit(gates.project, "submit", "gate.yaml", "--local", "--detach", "params.n=0", expect=1)
    assert "is still submitting a sweep" in done.stderr and "try again later" in done.stderr
    keeper.join()
    said = sweeping.communicate(timeout=60)
    assert sweeping.returncode == 0 and "2 runs (1 new, 1 continued)" in said[0], said
    gates.open(0, 1)
    gates.wait_for_state("finished", 0, 1)


def _time(run: Path, event: str) -> float:
    (found,) = (one["time"] for one in events(run) if one["event"] == event)
    return float(found)


def test_a_submission_that_is_undone_starts_nothing_though_a_process_looks_meanwhile(gates: Gates) -> None:
    gates.submit("0,9", "--max-running", "1")
    wait_for("the first", lambda: gates.begun(0), seconds=60)
    words = ("submit", "gate.yaml", "--local", "--max-running", "1", "--sweep", "params.n=0,9,1,2,3")
    *_, last, _ = jobkit(gates.project, *words, "--dry-run").stdout.splitlines()
    with RunDir(gates.project.path / "runs" / last.split()[0]).submission_lock():
        submission = gates.project.start(*words)
        wait_for("two that are prepared", lambda: len(gates.project.runs) == 4, seconds=60)
        gates.sweep.announce()  # it looks again, which it may at any time
        gates.open(0)
        wait_for("the second", lambda: gates.begun(9), seconds=60)
        gates.open(9)
        gates.wait_for_state("finished", 9)
        submission.send_signal(signal.SIGINT)
        _, said = submission.communicate(timeout=60)
    assert submission.returncode == 75 and "Traceback" not in said, said
    gates.wait_for_end()
    assert not list(gates.project.path.glob("[123].pid")) and len(gates.project.runs) == 2


def test_one_process_waits_for_a_run_outside_and_ends_with_it(gates: Gates) -> None:
    jobkit(gates.project, "submit", "gate.yaml", "--local", "--detach", "params.n=7")
    outside = gates.run(7)
    gates.submit("0,1", "--after", outside.name)
    said = jobkit(gates.project, "status", gates.run(0).name).stdout
    assert f"waiting for: {outside.name} (" in said
    jobkit(gates.project, "cancel", outside.name)
    gates.wait_for_state("cancelled", 0, 1)
    assert "was cancelled" in status(gates.run(1))["error"]
    gates.wait_for_end()
    assert [RunDir(gates.run(n)).supervisor_log.exists() for n in (7, 0, 1)] == [True, False, False]
