"""`jobkit top` on a real pseudo-terminal: it follows the runs' files, and leaves the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import in_process
from harness.made_run import made_run
from harness.project import Project

from jobkit.cli.top import fitting
from jobkit.run import records
from jobkit.run.records import Progress

ALTERNATE, BACK = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A command on a terminal of 120 x 20, and what it has drawn so far."""

    def __init__(self, project: Project, *arguments: str) -> None:
        self.fd, child = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 120, 0, 0))
        self.before = termios.tcgetattr(child)
        self.child_fd = child
        self.drawn = ""
        environment = project.env | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jobkit", *arguments],
            cwd=project.path,
            env=environment,
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
        )

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """What it drew until a pattern was there; what came before is forgotten then."""
        until = time.monotonic() + seconds
        while not re.search(pattern, plain(self.drawn)):
            assert time.monotonic() < until, self.drawn
            if select.select([self.fd], [], [], 1)[0]:
                self.drawn += os.read(self.fd, 65536).decode(errors="replace")
        found, self.drawn = self.drawn, ""
        return found

    def settings(self) -> list[object]:
        return termios.tcgetattr(self.child_fd)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self.child_fd)


def plain(drawn: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)


@contextmanager
def on_a_terminal(project: Project, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(project, *arguments)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A run that is under way, as far as its files and its lock say, and one that has finished."""
    project = Project(tmp_path)
    made_run(tmp_path / "runs" / "done-00000000", state="finished")
    run = made_run(tmp_path / "runs" / "made-00000001", "[red]x", state="running")
    with run.alive_lock():
        yield project


def test_it_follows_what_is_under_way_until_q(project: Project) -> None:
    file = project.path / "runs" / "made-00000001" / "progress.json"
    with on_a_terminal(project, "top") as terminal:
        first = terminal.wait_for(r"70/100")
        assert ALTERNATE in first
        assert "done-00000000" not in first
        assert terminal.settings() != terminal.before  # a key is read without Enter
        values = {"[red]loss": 0.25}
        now = Progress(attempt=2, time=time.time(), step=87, total_steps=100, steps_per_second=2.0, values=values)
        records.write(file, now)
        second = plain(terminal.wait_for(r"87/100"))
        assert "2 step/s" in second
        assert "0:00:06" in second  # 13 steps
        assert "[red]loss 0.25" in second
        os.write(terminal.fd, b"q")
        assert terminal.process.wait(60) == 0
        assert terminal.settings() == terminal.before


def test_ctrl_c_ends_it_and_the_terminal_is_as_it_was(project: Project) -> None:
    with on_a_terminal(project, "top", "*") as terminal:
        terminal.wait_for(r"done-00000000\s+finished")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(60) == 0
        assert terminal.settings() == terminal.before
        assert select.select([terminal.fd], [], [], 10)[0]
        assert BACK in os.read(terminal.fd, 65536).decode()


def test_without_a_terminal_it_prints_once(project: Project) -> None:
    lines = in_process.jobkit(project, "top").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["RUN", "made-00000001"]
    assert lines[1].split()[1:3] == ["running", "70/100"]
    assert "finished" in in_process.jobkit(project, "top", "done*").stdout


def test_where_nothing_is_under_way_it_says_so(tmp_path: Path) -> None:
    assert "no run is under way" in in_process.jobkit(Project(tmp_path), "top").stdout


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, ["RUN", "STATE", "", "STEP", "RATE", "ETA", "LAST", "GOODPUT", "ATTEMPTS"]),
        (84, ["RUN", "STATE", "", "STEP", "ETA", "LAST"]),
        (10, ["RUN", "STATE", "STEP"]),
    ],
)
def test_a_narrow_terminal_keeps_what_matters(width: int, shown: list[str]) -> None:
    widths = {"RUN": 8, "STATE": 8, "": 16, "STEP": 8, "RATE": 10, "ETA": 7, "LAST": 60, "GOODPUT": 7, "ATTEMPTS": 8}
    assert fitting(widths, width) == shown
