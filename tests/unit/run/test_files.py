"""Files appear whole or not at all, and JSON is JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from jobkit import disk
from jobkit.disk import explained, is_full, write_probe
from jobkit.run.files import (
    FOR_OWNER,
    as_plain,
    foreign_owner,
    json_text,
    read_json,
    replace_link,
    write_atomic,
    write_json,
)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x"
    write_atomic(file, "old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomic(file, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert file.read_text() == "old"


def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    write_json(file, [0] * 9999)
    code = "import sys; from pathlib import Path; from jobkit.run.files import write_json\n"
    code += "for n in range(60): write_json(Path(sys.argv[1]), [n] * 9999, durable=False)"
    with subprocess.Popen([sys.executable, "-c", code, str(file)]) as writer:
        while writer.poll() is None:
            value = read_json(file)
            assert len(value) == 9999 and len(set(value)) == 1
    assert writer.returncode == 0 and read_json(file)[0] == 59


def test_json_has_no_nan(tmp_path: Path) -> None:
    file = tmp_path / "x"
    write_json(file, {"a": [math.nan, 1.5], "b": math.inf, "c": (1,)})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"a": [None, 1.5], "b": None, "c": [1]}


def test_every_result_of_a_training_function_has_a_form_in_json() -> None:
    result = {
        1: np.array([[1, 2], [3, 4]]),
        "complex": np.array([1j]),
        "date": np.datetime64("2026-03-05"),
        "path": [Path("a")],
        "params": OmegaConf.create([1, {"a": [2]}]),
    }
    expected = {
        "1": [[1, 2], [3, 4]],
        "complex": ["1j"],
        "date": "2026-03-05",
        "path": ["a"],
        "params": [1, {"a": [2]}],
    }
    assert json.loads(json_text(as_plain(result))) == expected


def test_a_torn_or_absent_json_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "torn").write_text('{"a": ')
    assert read_json(tmp_path / "torn") is None
    assert read_json(tmp_path / "folder" / "absent", fresh=True) is None


def test_a_secret_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: modes.append(stat.S_IMODE(os.fstat(file).st_mode)))
    old = os.umask(0)
    try:
        write_atomic(tmp_path / "x", "secret", mode=FOR_OWNER)
    finally:
        os.umask(old)
    assert modes[0] == FOR_OWNER


def test_a_link_is_relative_and_replaced(tmp_path: Path) -> None:
    link = tmp_path / "run" / "latest"
    link.parent.mkdir()
    for name in ("a", "b"):
        replace_link(link, tmp_path / name)
        assert link.readlink() == Path("..", name)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_the_owner_of_a_file_is_this_user_the_folders_or_a_stranger(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.touch()
    assert foreign_owner(file, tmp_path) is None
    os.chown(file, 54321, -1)
    assert foreign_owner(file, tmp_path) == "54321"
    os.chown(tmp_path, 54321, -1)
    assert foreign_owner(file, tmp_path) is None
    assert foreign_owner(file) == "54321"


def _caused_by(cause: BaseException) -> BaseException:
    error = RuntimeError("save failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "no space"), True),
        (_caused_by(OSError(errno.EDQUOT, "quota")), True),
        (ValueError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.ESTALE, "stale"), False),
        (TimeoutError(errno.ETIMEDOUT, "a socket"), False),
        (ValueError("28"), False),
        (None, False),
    ],
)
def test_errors_of_a_full_disk_are_known_by_their_number(error: BaseException | None, full: bool) -> None:
    assert is_full(error) == full


def test_a_disk_is_explained_and_a_bug_is_not(tmp_path: Path) -> None:
    error = explained(OSError(errno.ENOSPC, "No space left on device", str(tmp_path)))
    assert error.file == str(tmp_path) and "make room" in error.hint
    bug = OSError(errno.EBADF, "Bad file descriptor")
    with pytest.raises(OSError) as raised:
        explained(bug)
    assert raised.value is bug


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ([(10, errno.ESTALE)] * 13, [60, 120]),
        ([(10, errno.EIO), (10, None)] * 6, [70]),  # one run of two is gone from the server
        ([(10, errno.EIO)] * 4 + [(100, None)] + [(10, errno.EIO)] * 5, []),  # two outages
        ([(180, errno.ETIMEDOUT), (10, errno.ETIMEDOUT), (50, errno.ETIMEDOUT)], [180, 240]),
    ],
    ids=["an outage", "every other look", "two outages", "looks that take long"],
)
def test_a_disk_that_is_away_is_said_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int | None]], said: list[int]
) -> None:
    now, when = 1000.0, []
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(disk.log, "warning", lambda *words: when.append(now - 1000))

    def look(seconds: int, number: int | None) -> str:
        nonlocal now
        now += seconds
        if number is not None:
            raise OSError(number, os.strerror(number), "/runs")
        return "seen"

    who = disk.Looks()
    seen = [who.at(look, seconds, number) for seconds, number in looks]
    assert seen == [None if number is not None else "seen" for _, number in looks]
    assert when == said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE, errno.ENOENT, errno.EACCES])
def test_other_errors_end_the_wait(number: int) -> None:
    def look() -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError) as raised:
        disk.Looks().at(look)
    assert raised.value.errno == number


def test_the_probe_leaves_nothing_and_says_why_it_failed(tmp_path: Path) -> None:
    assert write_probe(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    refused = write_probe(tmp_path / "absent")
    assert refused is not None and refused.errno == errno.ENOENT
