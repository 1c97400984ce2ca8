"""What jobkit says beside a script's own output."""

from __future__ import annotations

import sys
import threading

import pytest
from tqdm import tqdm

from jobkit.log import configure, log


@pytest.fixture(autouse=True)
def logs_to_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", log.propagate)
    configure("stderr")


def shown(written: str) -> list[str]:
    """The lines of a terminal: after a carriage return a line is written over."""
    lines = []
    for line in written.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return lines


def test_a_line_does_not_stand_behind_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bar = tqdm(range(3), file=sys.stderr)
    log.info("one rank waits")
    lines = shown(capsys.readouterr().err)
    bar.close()
    assert "jobkit: one rank waits" in lines
    assert lines[-1].startswith("  0%")  # the bar is there again


def test_a_line_is_printed_though_another_thread_keeps_tqdms_lock(capsys: pytest.CaptureFixture[str]) -> None:
    bar = tqdm(range(3), file=sys.stderr)
    with tqdm.get_lock():
        told = threading.Thread(target=log.info, args=["one rank waits"], daemon=True)
        told.start()
        told.join(60)
        printed = not told.is_alive()
    bar.close()
    assert printed and "jobkit: one rank waits" in shown(capsys.readouterr().err)
