"""One writer at a time: no line is lost where an append is no append, and no claim outlives its holder for long."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from jobkit.run import claim, processes
from jobkit.run.claim import claimed
from jobkit.run.journal import Journal

# Each child begins with this. Two hosts that append to one file on NFS each ask how long it is when they open it, and
# write there, whatever the other one has done since.
CHILD = """
import contextlib, os, signal, sys, time
from pathlib import Path
from jobkit.run import claim, journal
from jobkit.run.journal import Journal

real_open = os.open

def open_as_on_nfs(path, flags, *rest, **more):
    fd = real_open(path, flags & ~os.O_APPEND, *rest, **more)
    if str(path).endswith("events.jsonl"):
        os.lseek(fd, 0, os.SEEK_END)
        time.sleep(0.002)
    return fd

def without_a_claim(path):
    return contextlib.nullcontext(claim.Claim(time.monotonic()))

file = Path(sys.argv[1])
"""


def child(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    """A process that runs `code` after CHILD."""
    command = [sys.executable, "-c", CHILD + code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def heard(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that a child prints."""
    stream: IO[bytes] | None = process.stdout
    assert stream is not None
    return stream.readline().strip()


APPENDS = "for n in range(25): Journal(file).append('step', who=int(sys.argv[2]), n=n)"
ON_NFS = "os.open = open_as_on_nfs\n"
WITHOUT = "journal.claimed = without_a_claim\n"
HOLDS = "with claim.claimed(file):\n    print('held', flush=True)\n    sys.stdin.readline()\n"


def together(path: Path, code: str, writers: int = 8) -> list[tuple[int, int]]:
    """(writer, number) of every event that writers at the same time leave in a journal."""
    processes = [child(code, path, who) for who in range(writers)]
    assert [process.wait(120) for process in processes] == [0] * writers
    return [(event["who"], event["n"]) for event in Journal(path).read()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def in_order(writers: int) -> list[tuple[int, int]]:
    return [(who, n) for who in range(writers) for n in range(25)]


def test_many_hosts_at_once_lose_no_event_where_an_append_writes_where_the_file_ended(file: Path) -> None:
    assert sorted(together(file, ON_NFS + APPENDS)) == in_order(8)
    assert file.read_bytes().count(b"\n") == 200, "no empty lines: nobody took a line in the making for a torn one"
    assert names(file.parent) == [file.name]


def test_the_same_hosts_lose_events_without_a_claim(file: Path) -> None:
    """Else the test above shows nothing."""
    assert len(together(file, ON_NFS + WITHOUT + APPENDS, writers=3)) < 75


def test_the_events_of_each_writer_stand_in_its_order(file: Path) -> None:
    written = together(file, APPENDS)
    for who in range(8):
        assert [n for one, n in written if one == who] == list(range(25))


def test_a_journal_whose_disk_has_no_room_for_a_claim_is_locked_by_the_kernel(file: Path) -> None:
    full = (
        "import errno\ndef is_full(self): raise OSError(errno.ENOSPC, 'full')\n"
        "Path.mkdir = is_full\nclaim.LONGEST_PAUSE = 0.001\n"
    )
    assert sorted(together(file, ON_NFS + full + APPENDS, writers=3)) == in_order(3)


def test_the_claim_of_a_killed_process_of_this_host_is_broken_at_once(file: Path) -> None:
    holder = child(HOLDS, file)
    assert heard(holder) == b"held"
    holder.kill()
    # Not waited for before: as a zombie it is gone, too.
    Journal(file).append("next")  # within ABANDONED_SECONDS of a claim that is respected
    holder.wait()
    assert names(file.parent) == [file.name]


def test_writers_that_are_killed_at_any_moment_stop_no_other(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "ABANDONED_SECONDS", 1e6)
    forever = "n = 0\nwhile True:\n    n += 1\n    Journal(file).append('step', who=int(sys.argv[2]), n=n)"
    for generation in range(6):
        writers = [child(forever, file, who) for who in range(3)]
        reached = (generation + 1) * 30
        while file.exists() is False or file.read_bytes().count(b"\n") < reached:
            os.sched_yield()
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.wait()
        Journal(file).append("alive", generation=generation)
    assert [event["generation"] for event in Journal(file).read() if event["event"] == "alive"] == list(range(6))


def claim_of(file: Path, holder: str) -> Path:
    """The claim of a holder, as another host leaves it."""
    directory = file.with_name("events.jsonl.claim")
    directory.mkdir()
    (directory / holder).touch()
    return directory


def test_the_claim_of_another_host_is_broken_when_it_has_not_changed_for_long(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_of(file, "1_1_elsewhere_abcd")
    monkeypatch.setattr(claim, "ABANDONED_SECONDS", 0.05)
    Journal(file).append("next")
    assert names(file.parent) == [file.name]


def test_a_claim_that_changes_hands_is_waited_for_and_not_broken() -> None:
    watch = claim._Watch()
    assert [watch.seconds("a", 0.0), watch.seconds("a", 0.5), watch.seconds("a", 1.5)] == [0.0, 0.5, 1.5]
    assert watch.seconds("b", 2.0) == 0.0
    assert watch.seconds("b", 2.25) == 0.25


def test_who_was_suspended_has_not_watched_meanwhile() -> None:
    watch = claim._Watch()
    watch.seconds("a", 0.0)
    assert watch.seconds("a", 3600.0) == claim.LONGEST_LOOK


def test_a_claim_is_given_up_with_an_error_that_names_its_holder(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_of(file, "1_1_elsewhere_abcd")
    monkeypatch.setattr(claim, "WAIT_SECONDS", 0.0)
    with pytest.raises(OSError, match="still claimed by 1_1_elsewhere_abcd"):
        Journal(file).append("next")
    assert not file.exists() and names(file.parent) == ["events.jsonl.claim"]


def test_who_is_late_removes_nobody_elses_claim(file: Path) -> None:
    with claimed(file):
        (token,) = (file.parent / "events.jsonl.claim").iterdir()
        token.unlink()  # broken
        token.parent.rmdir()
        claim_of(file, "another")
    assert names(file.parent / "events.jsonl.claim") == ["another"]


def test_a_claim_whose_holder_died_between_the_steps_of_its_release_is_free(file: Path) -> None:
    file.with_name("events.jsonl.claim").mkdir()
    Journal(file).append("next")
    assert names(file.parent) == [file.name]


def refuse_empty(rename: Callable[[str, str], None], source: str, target: str) -> None:
    if Path(target).exists():
        raise OSError(errno.EEXIST, "File exists", target)
    rename(source, target)


def answer_lost(rename: Callable[[str, str], None], source: str, target: str) -> None:
    rename(source, target)
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", source)


@pytest.mark.parametrize("kind", [refuse_empty, answer_lost])
def test_other_answers_to_a_rename_are_understood(
    file: Path, kind: Callable[[Callable[[str, str], None], str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename
    if kind is refuse_empty:
        file.with_name("events.jsonl.claim").mkdir()
    monkeypatch.setattr(os, "rename", lambda source, target: kind(rename, source, target))
    Journal(file).append("next")
    assert names(file.parent) == [file.name]


def test_a_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Journal(tmp_path / "gone" / "events.jsonl").append("next")


STOPS = """
claim.ABANDONED_SECONDS = 0.5
def open_and_stop(path, *rest, **more):
    fd = open_as_on_nfs(path, *rest, **more)
    if str(path).endswith("events.jsonl"):
        os.open = open_as_on_nfs
        print("held", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return fd
os.open = open_and_stop
Journal(file).append("late")
"""


def test_who_was_stopped_within_an_append_writes_over_nobody(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = child(STOPS, file)
    assert heard(stopped) == b"held"
    monkeypatch.setattr(claim, "ABANDONED_SECONDS", 0.5)
    for event in ("one", "two", "three"):
        Journal(file).append(event)
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(60) == 0
    assert [event["event"] for event in Journal(file).read()] == ["one", "two", "three", "late"]


def test_threads_of_one_process_take_turns(file: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with claimed(file):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80 and set(most) == {1}


def test_a_process_of_another_container_with_the_same_host_name_is_not_taken_for_gone() -> None:
    own = processes.named(os.getpid())
    pid, began, where = own.split("_", 2)
    assert not processes.is_gone(own) and processes.seen_here(own) == os.getpid()
    assert processes.is_gone(f"{pid}_1_{where}"), "another process has its id by now"
    assert not processes.is_gone(f"4194305_{began}_{where}x")
    assert processes.is_gone(f"4194305_{began}_{where}"), "beyond every process id"
    assert not processes.is_gone("somebody") and processes.seen_here("somebody") is None


def test_a_writer_that_waits_leaves_the_generator_of_the_training_as_it_is(tmp_path: Path) -> None:
    journal, before = tmp_path / "events.jsonl", random.getstate()
    with claimed(journal):
        waiting = threading.Thread(target=Journal(journal).append, args=("checkpoint",))
        waiting.start()
        time.sleep(0.1)
    waiting.join()
    assert random.getstate() == before
