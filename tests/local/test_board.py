"""`jobkit board`: the chosen runs in a real TensorBoard, and nothing of it left after Ctrl-C."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import in_process
from harness.made_run import made_run
from harness.project import Project, wait_for


@pytest.fixture
def project(tmp_path: Path) -> Project:
    folders = tmp_path / "folders"
    folders.mkdir()
    project = Project(tmp_path / "project", {"TMPDIR": str(folders)})
    for name in ("made-00000000", "made-00000001", "other-00000002"):
        made_run(project.path / "runs" / name, state="finished")
    return project


@pytest.fixture
def board(project: Project) -> Iterator[subprocess.Popen[str]]:
    board = project.start("board", "made*")
    yield board
    board.kill()
    board.communicate()


def address_of(board: subprocess.Popen[str]) -> str:
    """What it prints when TensorBoard answers."""
    assert board.stdout is not None
    said = board.stdout.readline()
    assert said.startswith("TensorBoard of 2 runs: http://localhost:")
    return said.split()[-1]


def is_served(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=60):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_chosen_runs_are_served_until_ctrl_c(
    project: Project, board: subprocess.Popen[str], end: signal.Signals
) -> None:
    address = address_of(board)

    def served() -> list[str]:
        with urllib.request.urlopen(f"{address}data/runs", timeout=60) as answer:
            return sorted(json.load(answer))

    wait_for("both runs", lambda: served() == ["made-00000000", "made-00000001"])
    (folder,) = (project.path.parent / "folders").glob("jobkit-board-*")
    board.send_signal(end)
    assert board.wait(60) == 0
    assert not folder.exists()
    assert board.stderr is not None
    port = address.split(":")[-1].strip("/")
    assert f"ssh -L {port}:localhost:{port} {socket.gethostname()}" in board.stderr.read()
    assert not is_served(address)


def test_tensorboard_ends_where_its_parent_is_killed(board: subprocess.Popen[str]) -> None:
    address = address_of(board)
    board.kill()
    wait_for("its end", lambda: not is_served(address))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "--port: found 70000, allowed: 1 to 65535"),
        (["made-00000000", "--port", "{taken}"], "Address already in use; without --port the first free one is taken"),
        (["mode*"], "mode*"),
    ],
)
def test_what_cannot_be_served_is_a_line(project: Project, arguments: list[str], said: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [word.replace("{taken}", str(taken.getsockname()[1])) for word in arguments]
        done = in_process.jobkit(project, "board", *words, expect=2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 2
