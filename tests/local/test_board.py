"""`jobkit board` in a real process: TensorBoard shows the chosen runs under their names, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.journals import make_run, submitted
from harness.runs import is_alive, wait_until

from jobkit.cli.board import free_port, link
from jobkit.run.metrics import EventFile, scalar
from jobkit.run.rundir import RunDir

NAMES = ["digits-aaaaaaaa", "digits-bbbbbbbb", "toy-11f5f19c"]


@pytest.fixture
def project(tmp_path: Path, no_process_left: None) -> Path:
    """A folder with runs, and with a module that would hide one of Python's."""
    for name in NAMES:
        make_run(tmp_path / "runs", name, submitted())
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    (tmp_path / "temporary").mkdir()
    return tmp_path


def log_a_value(run: RunDir) -> None:
    run.tensorboard.mkdir()
    file = EventFile(run.tensorboard, first_step=0)
    file.add(1, scalar("train/loss", 0.5))
    file.write()


def start(project: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(project / "temporary"), "JOBKIT_RUNS": str(project / "other")}
    command = [sys.executable, "-m", "jobkit", "board", "--runs-dir", str(project / "runs"), *words]
    return subprocess.Popen(
        command, cwd=project, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@contextmanager
def board(project: Path, *words: str, ends_by: signal.Signals) -> Iterator[str]:
    """Yield the URL of a board, and end it by a signal: TensorBoard and its folder go with it."""
    process = start(project, *words)
    assert process.stdout is not None
    url, ssh = process.stdout.readline(), process.stdout.readline()
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    match = re.match(r"http://127\.0\.0\.1:(\d+)/", url)
    assert match and f"ssh -L {match[1]}:127.0.0.1:{match[1]} " in ssh
    assert len(list((project / "temporary").glob("jobkit-board-*"))) == 1
    yield match[0]
    process.send_signal(ends_by)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (0, "")
    assert not is_alive(int(child)) and not list((project / "temporary").glob("jobkit-board-*"))


def shown(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}data/runs", timeout=60) as answer:
        return sorted(json.load(answer))


def port_of_this_worker() -> int:
    """Return a free port; from the default ones two boards that begin at the same time would choose the same."""
    return free_port(range(20_000 + os.getpid() % 10_000, 60_000))


def test_a_queued_run_appears_once_it_has_logged_and_sigterm_ends_all(project: Path) -> None:
    first, second, other = (RunDir(project / "runs" / name) for name in NAMES)
    log_a_value(first)
    log_a_value(other)
    with board(project, "digits*", "--port", str(port_of_this_worker()), ends_by=signal.SIGTERM) as url:
        wait_until(lambda: shown(url) == [first.name], "the run that has logged")
        log_a_value(second)
        wait_until(lambda: shown(url) == [first.name, second.name], "the run that was queued")


def test_all_runs_on_a_port_and_ctrl_c(project: Path) -> None:
    port = port_of_this_worker()
    with board(project, "--port", str(port), ends_by=signal.SIGINT) as url:
        assert url.endswith(f":{port}/") and shown(url) == []  # none has logged
        refused = start(project, "--port", str(port))  # meanwhile another person takes the same port
        _, error = refused.communicate(timeout=60)
        assert refused.returncode == 2 and error.startswith("error: --port") and error.count("\n") == 1
    with board(project, NAMES[0], ends_by=signal.SIGHUP) as url:
        assert shown(url) == []


def test_links_of_runs_of_one_name_in_two_places(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / place / NAMES[0]) for place in ("here", "there")]
    folder = tmp_path / "links"
    folder.mkdir()
    link(runs, folder)
    assert {place.readlink() for place in folder.iterdir()} == {run.tensorboard for run in runs}
