"""A file that another host has just made is found, though this one remembers that there was none."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.late_files import RememberedAbsence, made_elsewhere

from jobkit import addresses
from jobkit.checkpoint.store import Manifest, Store
from jobkit.run.files import is_there, read_json
from jobkit.run.rundir import RunDir
from jobkit.run.tail import Tail
from jobkit.train.prepared import prepare_folder

PROGRESS = json.dumps({"attempt": 1, "time": 1.0})
REQUEST = json.dumps({"cause": "user"})
REPORT = json.dumps({"time": 1.0, "rank": 0, "error": "KeyError: 1"})


@pytest.fixture
def nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RememberedAbsence:
    return RememberedAbsence(tmp_path, monkeypatch)


def test_the_simulated_client_does_remember(tmp_path: Path, nfs: RememberedAbsence) -> None:
    file = tmp_path / "a" / "b"
    assert not file.exists()
    made_elsewhere(file, "x")
    assert not file.exists() and nfs.absent == {tmp_path / "a"}
    assert is_there(file) and file.exists()


@pytest.mark.parametrize(
    ("name", "content", "look"),
    [
        ("config.yaml", "name: x", RunDir.exists),
        ("events.jsonl", '{"event": "submitting", "time": 1}', lambda run: run.journal.read()),
        ("progress.json", PROGRESS, RunDir.progress),
        ("lease.json", json.dumps({"attempt": 1}), RunDir.lease),
        ("logs/1/notice.json", REQUEST, lambda run: run.stop_request(1)),
        ("logs/1/error_0.json", REPORT, lambda run: run.failure_reports(1)),
        ("logs/rendezvous-x.json", "[1]", lambda run: read_json(run.launch_file("x"), fresh=True)),
        ("logs/1/rank_0.out", "a line", lambda run: Tail().read(run.rank_log(1, 0))),
    ],
)
def test_what_is_looked_for_again_and_again_is_found_when_it_is_there(
    tmp_path: Path, nfs: RememberedAbsence, name: str, content: str, look: Callable[[RunDir], object]
) -> None:
    run = RunDir(tmp_path / "runs" / "x")
    assert not look(run)
    made_elsewhere(run.path / name, content)
    assert look(run)


def test_a_second_submission_sees_the_run_that_the_first_has_made(tmp_path: Path, nfs: RememberedAbsence) -> None:
    run = RunDir(tmp_path / "x")
    assert not run.exists()  # before it waits for the lock
    made_elsewhere(run.config_file, "name: x")
    assert run.exists()


def test_a_local_supervisor_on_another_host_is_seen(tmp_path: Path, nfs: RememberedAbsence) -> None:
    run = RunDir(tmp_path / "x")
    assert run.has_local_supervisor() is False
    lock = tmp_path / ".locks" / "x.alive"
    made_elsewhere(lock, "")
    held = subprocess.Popen(
        ["flock", lock, "sh", "-c", "echo held; cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert held.stdout is not None and held.stdout.readline() == b"held\n"
    assert run.has_local_supervisor() is True
    held.communicate()
    assert run.has_local_supervisor() is False


def test_ranks_find_the_address_that_rank_0_has_just_written(
    tmp_path: Path, nfs: RememberedAbsence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "RENDEZVOUS_SECONDS", 20.0)
    file = tmp_path / "logs" / "1" / "rendezvous.json"
    found: list[tuple[str, int, str]] = []
    looked = threading.Event()
    real = addresses.read_json

    def reading(path: Path, *, fresh: bool = False) -> object:
        value = real(path, fresh=fresh)
        looked.set()
        return value

    monkeypatch.setattr(addresses, "read_json", reading)
    with socket.create_server(("127.0.0.1", 0)) as server:
        waiting = threading.Thread(target=lambda: found.append(next(addresses.answering(file))))
        waiting.start()
        assert looked.wait(20)
        port = server.getsockname()[1]
        made_elsewhere(file, json.dumps({"addresses": ["127.0.0.1"], "port": port, "token": "t"}))
        waiting.join()
    assert found == [("127.0.0.1", port, "t")]


def test_the_files_of_a_checkpoint_are_found(tmp_path: Path, nfs: RememberedAbsence) -> None:
    store = Store(tmp_path, missing_seconds=5)
    manifest = store.path(1) / "manifest.json"
    assert not manifest.exists()
    made_elsewhere(manifest, json.dumps(Manifest(1, 1, {}).to_json()))
    assert store.manifest(1).step == 1


def test_a_prepared_folder_is_not_made_twice(tmp_path: Path, nfs: RememberedAbsence) -> None:
    folder = tmp_path / "data"
    assert not folder.exists()
    made_elsewhere(folder / "file", "x")
    prepare_folder(folder, lambda temporary: pytest.fail("it is there"))
