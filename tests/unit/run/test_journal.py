"""The journal has whole events only, whatever a crash or a full disk does to the last one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from harness.journals import began, ended, make_run, submitted

from jobkit.run.journal import Journal, cached_status, read_status
from jobkit.run.records import Rewound


def test_a_line_that_a_crash_cut_off_is_no_event_and_the_next_one_takes_its_place(tmp_path: Path) -> None:
    run = make_run(tmp_path, "toy-11f5f19c", submitted(), began(1))
    file = run.journal_file
    file.write_bytes(file.read_bytes()[:-10])
    assert read_status(run).attempts == [] and cached_status(run) is None
    Journal(run).append(began(2))
    assert [json.loads(line).get("attempt") for line in file.read_text().splitlines()] == [None, 2]


def test_an_event_that_finds_no_room_leaves_no_part_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "toy-11f5f19c", submitted())
    whole, journal, pwrite = run.journal_file.read_bytes(), Journal(run), os.pwrite
    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        patch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:9], at))
        journal.append(began())
    assert error.value.errno == errno.ENOSPC
    assert run.journal_file.read_bytes() == whole and journal.status.attempts == []
    journal.append(began())
    assert len(read_status(run).attempts) == 1


def test_an_attempt_after_a_rewind_forgets_it(tmp_path: Path) -> None:
    stopped = ended("stopped", "stop", last_step=30)
    run = make_run(tmp_path, "toy-11f5f19c", submitted(), began(), stopped, Rewound(step=20, branch="b"))
    assert read_status(run).rewound == 20
    for event in (submitted(number=2), began(2)):
        Journal(run).append(event)
    assert read_status(run).rewound is None
