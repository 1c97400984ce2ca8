"""The RankReport of a rank, for every way in which its program can end."""

from __future__ import annotations

import errno
import json
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.small_disk import SmallDisk

from jobkit.errors import (
    CheckpointError,
    InputError,
    JobkitError,
    LostLease,
    Nature,
    NoRoom,
    OutsideError,
    Stopped,
    UsageError,
)
from jobkit.loop.health import NotFinite
from jobkit.loop.rank import Rank
from jobkit.run.rundir import RunDir
from jobkit.weather import place_of
from jobkit.wire.pages import Page, Phase
from jobkit.worker.ending import MAX_TRACEBACK, run_recorded


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    run = RunDir(tmp_path / "toy-00000000")
    return Rank(run, 2, 0, 4, 0, 4, 0, Page.create())


def raising(error: BaseException) -> Callable[[], Any]:
    def program() -> Any:
        raise error

    return program


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__context__ = cause
    return error


class OutOfMemoryError(RuntimeError):
    __module__ = "torch"


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")

ENDS = {
    "an exception": (ValueError("x"), 1, {"kind": "failed", "error": "ValueError: x", "final": False}),
    "an exception without words": (ValueError(), 1, {"kind": "failed", "error": "ValueError"}),
    "a misuse": (UsageError("x"), 1, {"kind": "failed", "final": True}),
    "no checkpoint that can be read": (CheckpointError("x"), 1, {"kind": "failed", "final": True}),
    "a loss that is no number": (NotFinite(3, float("nan"), [7]), 1, {"kind": "failed", "final": True}),
    "a wrong config": (InputError("x"), 1, {"kind": "failed", "final": True}),
    "an error of two lines": (ValueError("a\nb"), 1, {"error": "ValueError: a"}),
    "an error in a worker": (
        ValueError("Caught\nOriginal Traceback (most recent call last):\n  a\nValueError: b\n"),
        1,
        {"error": "ValueError: b"},
    ),
    "exit 0": (SystemExit(0), 0, {"kind": "finished"}),
    "exit without a code": (SystemExit(), 0, {"kind": "finished"}),
    "exit 3": (SystemExit(3), 3, {"kind": "failed"}),
    "exit with words": (SystemExit("x"), 1, {"kind": "failed"}),
    "exit 75": (SystemExit(75), 75, {"kind": "stopped"}),
    "Ctrl-C": (KeyboardInterrupt(), 75, {"kind": "stopped"}),
    "a stop": (Stopped(), 75, {"kind": "stopped"}),
    "a stop that became an exception": (caused_by(ValueError("x"), Stopped()), 75, {"kind": "stopped"}),
    "memory of the host": (MemoryError(), 1, {"kind": "failed", "out_of_memory": "host"}),
    "memory of torch on the CPU": (
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        1,
        {"kind": "failed", "out_of_memory": "host"},
    ),
    "memory of a device": (OutOfMemoryError("x"), 1, {"kind": "failed", "out_of_memory": "GPU"}),
    "a full disk": (NoRoom("x"), 75, {"kind": "failed", "disk": True}),
    "a full disk behind an error": (caused_by(ValueError("x"), NoRoom("x")), 75, {"kind": "failed", "disk": True}),
    "a cache in a full home": (NO_SPACE, 1, {"kind": "failed", "disk": False, "nature": None}),
}


class AcceleratorError(RuntimeError):
    def __init__(self, code: int) -> None:
        super().__init__("CUDA error")
        self.error_code = code


class HTTPError(OSError):
    __module__ = "requests.exceptions"


def hiding(error: BaseException, cause: BaseException) -> BaseException:
    error.__suppress_context__ = True
    return caused_by(error, cause)


NATURES: dict[str, tuple[BaseException, Nature | None]] = {
    **{f"a {type(error).__name__}": (error, "program") for error in (TypeError(), KeyError(), AssertionError())},
    "an assertion of a kernel": (AcceleratorError(710), "program"),
    "an error of a program behind another": (caused_by(RuntimeError(), KeyError()), "program"),
    "a number of the outside behind an error of a program": (caused_by(KeyError(), OSError(errno.EIO, "")), "program"),
    "a connection": (ConnectionResetError(), "outside"),
    "a time that is up": (TimeoutError(), "outside"),
    "a certificate": (ssl.SSLCertVerificationError(), "outside"),
    "no such host": (socket.gaierror(), "outside"),
    "a disk": (OSError(errno.EIO, ""), "outside"),
    "a stale handle behind an error": (caused_by(RuntimeError(), OSError(errno.ESTALE, "")), "outside"),
    "one that is hidden": (hiding(RuntimeError(), OSError(errno.EIO, "")), None),
    "a server": (HTTPError("503"), "outside"),
    "a worker of a loader": (OutsideError(), "outside"),
    "a device": (AcceleratorError(214), "hardware"),
    "a device that is used wrongly": (AcceleratorError(101), None),
    "a file that is not there": (FileNotFoundError(errno.ENOENT, ""), None),
    "a bad image": (OSError("cannot identify image file"), None),
    "a half-read file": (json.JSONDecodeError("x", "{", 1), None),
    "a half-read text": (UnicodeDecodeError("utf-8", b"", 0, 1, ""), None),
    "an error as any other": (RuntimeError(), None),
}


@pytest.mark.parametrize(("error", "nature"), NATURES.values(), ids=NATURES)
def test_the_type_of_an_error_says_whether_time_may_mend_it(
    rank: Rank, error: BaseException, nature: Nature | None
) -> None:
    run_recorded(rank, raising(error))
    (end,) = rank.run.ends(2)
    assert end.nature == nature
    assert end.signature == f"{type(error).__name__} at test_ending.py:{raising.__code__.co_firstlineno + 2}"


def test_the_place_of_an_error_is_the_users_line_and_not_a_librarys() -> None:
    try:
        json.loads("{")
    except ValueError as error:
        assert place_of(error) == f"JSONDecodeError at test_ending.py:{error.__traceback__.tb_lineno}"  # type: ignore[union-attr]


@pytest.mark.parametrize(("error", "code", "fields"), ENDS.values(), ids=ENDS)
def test_an_error_becomes_an_end(rank: Rank, error: BaseException, code: int, fields: dict[str, Any]) -> None:
    rank.beat(7)
    assert run_recorded(rank, raising(error)) == code
    (end,) = rank.run.ends(2)
    assert (end.rank, end.attempt, end.step) == (0, 2, 7)
    assert {key: getattr(end, key) for key in fields} == fields
    is_bug = end.kind == "failed" and not isinstance(error, (JobkitError, SystemExit))
    assert ("test_ending.py" in (end.traceback or "")) == is_bug


class Tensor:
    def tolist(self) -> float:
        return 0.5


def test_a_result_is_rank_0s_in_json(rank: Rank) -> None:
    assert run_recorded(rank, lambda: {"loss": Tensor(), 1: float("nan"), "path": Path("a")}) == 0
    (end,) = rank.run.ends(2)
    assert (end.kind, end.step, end.result) == ("finished", None, {"loss": 0.5, "1": None, "path": "a"})
    rank.rank = 1
    run_recorded(rank, lambda: {"loss": 1.0})
    assert rank.run.ends(2)[1].result is None


def test_a_stop_that_was_swallowed_is_a_stop(rank: Rank) -> None:
    def program() -> str:
        rank.beat(7, Phase.SAVING)
        try:
            raise Stopped
        finally:
            return "done"  # noqa: B012 - the mistake in question

    assert run_recorded(rank, program) == 75
    assert [end.kind for end in rank.run.ends(2)] == ["stopped"]


def test_an_end_names_the_ends_before_it(rank: Rank) -> None:
    for number in (2, 0):
        rank.rank = number
        run_recorded(rank, raising(ValueError("x")))
    assert [(end.rank, end.seen) for end in rank.run.ends(2)] == [(0, [2]), (2, [])]


def test_a_user_s_mistake_is_a_line_and_a_bug_a_traceback(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    run_recorded(rank, raising(UsageError("this and that")))
    assert capsys.readouterr().err == "error: this and that\n"
    run_recorded(rank, raising(ValueError("x")))
    assert "Traceback" in capsys.readouterr().err


def test_a_rank_without_the_lease_leaves_no_end(rank: Rank) -> None:
    assert run_recorded(rank, raising(LostLease("attempt 3 has taken over"))) == 75
    assert rank.run.ends(2) == []


def test_an_end_that_the_disk_does_not_take_is_told_by_the_code(rank: Rank) -> None:
    rank.run.path.write_text("no folder")
    assert run_recorded(rank, raising(ValueError("x"))) == 1
    assert run_recorded(rank, raising(NoRoom("x"))) == 75


def test_a_full_run_directory_is_the_reason_of_a_write_of_the_users_own_that_fails(rank: Rank) -> None:
    with SmallDisk(rank.run.path) as disk:
        assert run_recorded(rank, raising(NO_SPACE)) == 1
        disk.fill()
        assert run_recorded(rank, raising(NO_SPACE)) == 75


def test_of_a_long_traceback_the_end_is_kept(rank: Rank) -> None:
    run_recorded(rank, raising(ValueError("x" * 20_000 + " the reason")))
    (end,) = rank.run.ends(2)
    assert end.traceback is not None
    assert end.traceback.endswith("the reason\n") and len(end.traceback) <= MAX_TRACEBACK


def test_the_page_of_a_rank_says_that_it_has_ended(rank: Rank) -> None:
    """The disk may show its RankReport late."""
    rank.beat(7)
    run_recorded(rank, lambda: None)
    assert rank.page.read().phase is Phase.ENDING
