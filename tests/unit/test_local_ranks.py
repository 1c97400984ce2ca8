"""The ranks of this machine, with a server that fails where a test says."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobkit.run.config import Config, Resources
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.supervisor.attempt import begin
from jobkit.supervisor.fork_client import ForkClient, ForkServerError
from jobkit.supervisor.ranks import LocalRanks


class Server:
    """Starts a process for each rank; fails after so many of them."""

    is_gone = False
    has_imported = True
    start_new_session = True

    def __init__(self, forks: int) -> None:
        self.forks = forks
        self.processes: list[subprocess.Popen[bytes]] = []

    def fork(self, *call: Any, **options: Any) -> int:
        if len(self.processes) == self.forks:
            self.is_gone = True
            raise ForkServerError("the process that forks the ranks ended")
        self.processes.append(subprocess.Popen(["sleep", "60"], start_new_session=self.start_new_session))
        return self.processes[-1].pid

    def poll(self, pid: int) -> int | None:
        (process,) = [one for one in self.processes if one.pid == pid]
        return process.poll()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Server]]:
    servers = [Server(forks=2), Server(forks=3)]
    left = iter(servers)
    monkeypatch.setattr(ForkClient, "start", lambda environment, preload: next(left))
    yield servers
    for process in [one for server in servers for one in server.processes]:
        process.kill()
        process.wait()


def test_ranks_that_a_server_forked_before_it_died_are_not_there_twice(tmp_path: Path, servers: list[Server]) -> None:
    run = RunDir(tmp_path / "toy-12345678")
    run.path.mkdir()
    run.write_config(Config(name="toy", task="m:f", resources=Resources(tasks_per_node=3)))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    ranks = LocalRanks(run, "7")
    ranks.start(begin(run, job_id="7", scheduler="local"))
    assert [process.poll() for process in servers[0].processes] == [-9, -9]
    assert [process.poll() for process in servers[1].processes] == [None] * 3
    assert ranks.are_running()
    ranks.close()
    assert not ranks.are_running()


def test_a_rank_that_has_no_group_of_its_own_yet_is_killed(tmp_path: Path, servers: list[Server]) -> None:
    run = RunDir(tmp_path / "toy-12345678")
    run.path.mkdir()
    run.write_config(Config(name="toy", task="m:f"))
    run.record(Event.SUBMITTING, cluster="local", scheduler="local")
    servers[0].start_new_session = False  # forked just now
    ranks = LocalRanks(run, "7")
    ranks.start(begin(run, job_id="7", scheduler="local"))
    ranks.signal("KILL")
    assert servers[0].processes[0].wait(10) == -9
