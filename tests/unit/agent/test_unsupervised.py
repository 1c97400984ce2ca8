"""An agent without a supervisor: when it waits, when its ranks save, when it acts for the batch script."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.runs import PATIENCE

from jobkit.agent import unsupervised
from jobkit.agent.unsupervised import Unsupervised
from jobkit.errors import SchedulerError
from jobkit.run import records
from jobkit.run.records import Lease
from jobkit.run.rundir import RunDir
from jobkit.slurm import jobs
from jobkit.wire.messages import Hello, StartRanks


class Children:
    """Ranks that do what they are told at once."""

    def __init__(self) -> None:
        self.attempt, self.ranks = 3, [0, 1]
        self.others: dict[int, int | None] = {}
        self.stopped = self.killed = 0

    def stop_all(self) -> None:
        self.stopped += 1

    def kill_all(self) -> None:
        self.killed += 1
        self.ranks = []

    def reap(self) -> None:
        for pid, code in self.others.items():
            if code is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                self.others[pid] = os.waitstatus_to_exitcode(status) if ended else None


class Link:
    silent_seconds = 0.0


class Scene:
    def __init__(self, path: Path, job_id: str, step: str | None) -> None:
        self.run = RunDir(path / "toy-00000000")
        self.run.path.mkdir()
        self.lease(attempt=3, job_id=job_id)
        self.alone = Unsupervised(self.run, Hello(secret="", node="n1", job_id=job_id, step=step))
        self.children, self.link = Children(), Link()

    def lease(self, attempt: int, job_id: str, restart: int = 0) -> None:
        record = Lease(attempt=attempt, writer="w", token="t", job_id=job_id, restart=restart)
        records.write(self.run.lease_file, record)

    def go_on(self, until: Callable[[], bool] = lambda: True) -> bool:
        """Let time pass until something holds; False once the agent has to end."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.children.reap()
            if not self.alone.go_on(self.link, self.children):
                return False
            if until():
                return True
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(unsupervised, "ASK_SECONDS", 0.0)
    return Scene(tmp_path, "local-host-1", None)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(unsupervised, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(unsupervised.commands, "is_available", lambda *programs: True)  # the answers are the test's
    scene = Scene(tmp_path, "12", "0")
    yield scene
    for pid in [pid for pid, code in scene.children.others.items() if code is None]:
        os.kill(pid, signal.SIGKILL)  # a helper: it would end this process, which is its agent
        os.waitpid(pid, 0)


def test_ranks_train_on_while_job_sh_lives(local: Scene) -> None:
    local.link.silent_seconds = 3600.0
    with local.run.alive_lock():
        assert local.go_on() and local.go_on()
    assert local.children.stopped == 0


def test_ranks_save_and_the_agent_ends_where_the_job_is_dead(local: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    local.link.silent_seconds = unsupervised.LOCAL_SECONDS - 1
    assert local.go_on()
    assert local.children.stopped == 0
    local.link.silent_seconds = unsupervised.LOCAL_SECONDS + 1
    assert local.go_on()
    assert local.go_on()
    assert local.children.stopped == 1
    local.children.ranks = []
    assert not local.go_on()


def test_ranks_that_do_not_save_are_killed(local: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupervised, "LOCAL_SAVE_SECONDS", 0.0)
    local.link.silent_seconds = unsupervised.LOCAL_SECONDS + 1
    assert not local.go_on(lambda: False)
    assert local.children.killed == 1


@pytest.mark.parametrize(("attempt", "job_id", "restart"), [(4, "12", 0), (3, "13", 0), (3, "12", 1)])
def test_an_agent_ends_when_another_attempt_or_job_has_the_run(
    slurm: Scene, attempt: int, job_id: str, restart: int
) -> None:
    assert slurm.go_on()
    slurm.lease(attempt, job_id, restart)
    assert not slurm.go_on()


def test_an_agent_stays_while_the_lease_cannot_be_read(slurm: Scene) -> None:
    slurm.run.lease_file.unlink()
    slurm.run.lease_file.mkdir()  # stands for a disk that is away
    assert slurm.go_on()


def test_an_idle_agent_waits_for_later_attempts(slurm: Scene) -> None:
    slurm.children.ranks = []
    slurm.lease(4, "12")
    assert slurm.go_on()


def test_ranks_stop_in_time_without_a_supervisor(slurm: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsupervised, "_wait_for_end_of_script", lambda job_id: time.sleep(2 * PATIENCE))
    slurm.alone.note_start(
        StartRanks(attempt=3, ranks=[], world_size=2, nodes=1, master_addr="", master_port=0, time_left=1000)
    )
    assert slurm.go_on()
    assert slurm.children.stopped == 0
    slurm.alone.note_start(
        StartRanks(attempt=3, ranks=[], world_size=2, nodes=1, master_addr="", master_port=0, time_left=0.5)
    )
    assert slurm.go_on(lambda: slurm.children.stopped == 1)


def test_an_agent_that_cannot_ask_slurm_leaves_the_job_alone(
    slurm: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(unsupervised, "ASK_SECONDS", 0.0)
    for name in ("sbatch", "squeue"):  # a container may have some of Slurm's commands
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.go_on() and slurm.go_on()
    assert (slurm.children.stopped, slurm.children.others) == (0, {})


SCRIPTS = {
    "it runs": ("alive", "RUNNING", "None"),
    "a preemption": ("alive", "COMPLETING", "None"),
    "no batch step": ("gone", "RUNNING", "None"),
    "it was killed": ("alive", "COMPLETING", "JobLaunchFailure"),
    "its node died": ("alive", "NODE_FAIL", "NodeDown"),
    "no answer": ("silent", "RUNNING", "None"),
    "no answer for long": ("silent for long", "RUNNING", "None"),
}


@pytest.mark.parametrize(("answer", "state", "reason"), SCRIPTS.values(), ids=SCRIPTS)
def test_an_agent_acts_only_for_a_batch_script_that_is_gone(
    slurm: Scene, answer: str, state: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper is another process: it leaves files."""
    asked, acted = tmp_path / "asked", tmp_path / "acted"
    terms: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: terms.append(number))  # as the agent's

    def batch_step_alive(job_id: str) -> bool:
        asked.open("a").write("x")
        if answer.startswith("silent"):
            raise SchedulerError("no answer")
        return answer == "alive"

    def act(run: RunDir, hello: Hello) -> None:
        acted.open("a").write("x")
        if acted.stat().st_size == 1:
            raise OSError("the disk was away")  # then it is tried again

    record = f"JobId=12 JobState={state} Reason={reason}"
    monkeypatch.setattr(unsupervised.jobs, "show", lambda job_id: jobs.parse_job(record))
    monkeypatch.setattr(unsupervised.nodes, "batch_step_alive", batch_step_alive)
    monkeypatch.setattr(unsupervised, "close_and_requeue", act)
    monkeypatch.setattr(unsupervised, "SILENCE_SECONDS", 0.1 if answer == "silent for long" else 60.0)
    try:
        if answer == "silent" or (answer == "alive" and reason == "None"):
            assert slurm.go_on(lambda: asked.exists() and asked.stat().st_size >= 3)
            assert (slurm.children.stopped, acted.exists(), terms) == (0, False, [])
            slurm.alone.end(slurm.children)
        else:
            assert slurm.go_on(lambda: slurm.children.stopped == 1)
            assert terms, "the ranks save while the run is put into the queue"
            slurm.children.ranks = []
            assert not slurm.go_on()
            assert acted.stat().st_size == 2
    finally:
        signal.signal(signal.SIGTERM, before)
