"""What is kept of a long journal changes nothing but the time it takes to read it."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobkit.run import fold as fold_module
from jobkit.run.events import Event
from jobkit.run.fold import fold
from jobkit.run.journal import Journal, encode
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status, apply, derive

FAILURE = {"error": "ValueError: no", "rank": 3, "samples": [1, 2], "traceback": "é\n", "peak_bytes": 1 << 40}

# What the event of each kind may hold, beside its attempt.
FIELDS: dict[Event, Callable[[random.Random], dict[str, Any]]] = {
    Event.SUBMITTING: lambda draw: {"cluster": "h100", "scheduler": draw.choice(["slurm", "local"]), "command": "x"},
    Event.SUBMITTED: lambda draw: {"job_id": str(draw.randrange(99))},
    Event.SUBMIT_FAILED: lambda draw: {"error": "no such partition"},
    Event.PLACED: lambda draw: {"nodes": [f"n{draw.randrange(9)}"], "wanted": 2},
    Event.NODE_LOST: lambda draw: {"node": f"n{draw.randrange(9)}"},
    Event.RESUMED: lambda draw: {"step": draw.randrange(99), "total_steps": 100, "memory": draw.random() < 0.5},
    Event.CHECKPOINT: lambda draw: {"step": draw.randrange(99), "seconds": draw.random(), "stall": draw.random()},
    Event.STRAGGLER: lambda draw: {"rank": draw.randrange(4), "host": "n", "seconds": 0.1, "median": 0.05, "factor": 2},
    Event.STRAGGLER_OVER: lambda draw: {"rank": draw.randrange(4)},
    Event.INTERRUPTED: lambda draw: {
        "cause": draw.choice(["preempted", "cancelled", "killed"]),
        "failure": draw.choice([None, {}, FAILURE]),
        "reached": draw.choice([None, draw.randrange(99)]),
        "last_seen": draw.random(),
    },
    Event.REQUEUED: lambda draw: {"job_id": str(draw.randrange(99)), "predecessor": draw.choice([None, "3"])},
    Event.REQUEUE_FAILED: lambda draw: {"error": "held"},
    Event.EXCLUDED: lambda draw: {"node": f"n{draw.randrange(9)}"},
    Event.REWOUND: lambda draw: {"step": draw.randrange(99), "branch": 1, "skip_samples": [draw.randrange(9)]},
    Event.LOSS_WITHOUT_HARM: lambda draw: {"step": draw.randrange(99), "rank": 0, "samples": [draw.randrange(9)]},
    Event.BATCH_SKIPPED: lambda draw: {"step": draw.randrange(99), "samples": [draw.randrange(9)]},
    Event.FINISHED: lambda draw: {"step": 100, "result": {"loss": draw.random(), "nested": [None, "\u2028"]}},
    Event.FAILED: lambda draw: {"step": draw.randrange(99), "error": "rank 1: ValueError", "failure": FAILURE},
}
TORN = [b"\n", b'{"time": 1, "ev\n', b"\xff\xfe\x00\n", b"[1]\n", b'{"no": "event"}\r\n']


def journal_of(seed: int) -> bytes:
    """Any events in any order, from all attempts, with the remains of crashes between them."""
    draw, attempt, lines = random.Random(seed), 0, []
    for second in range(draw.randrange(5, 60)):
        event = draw.choice([*Event, Event.CHECKPOINT, Event.STARTED])
        attempt += event == Event.STARTED
        whose = attempt if event == Event.STARTED else draw.choice([None, 1, attempt])
        fields = FIELDS.get(event, lambda draw: {"job_id": "7", "host": "n1"})(draw)
        lines.append(encode({"time": second + draw.random(), "event": event, "attempt": whose, **fields}))
        lines += [draw.choice(TORN)] * (draw.random() < 0.1)
    return b"".join(lines)


def expected(journal: Path) -> Status:
    """The status by its definition, from all events at once."""
    status = Status(journal_bytes=journal.stat().st_size)
    for event in Journal(journal).read():
        apply(status, event)
    return status


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "status.fold.json"


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what was read of a journal however short it is."""
    monkeypatch.setattr(fold_module, "KEEP_BYTES", 0)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.usefixtures("always")
def test_a_journal_read_in_any_two_parts_gives_the_status_of_the_whole(seed: int, journal: Path, kept: Path) -> None:
    whole = journal_of(seed)
    journal.write_bytes(whole)
    status = expected(journal)
    ends = [position + 1 for position, byte in enumerate(whole) if byte == 10]
    for size in [0, *ends, *random.Random(seed).sample(range(len(whole)), 20)]:
        kept.unlink(missing_ok=True)
        journal.write_bytes(whole[:size])
        assert fold(journal, kept, keep=True) == expected(journal)
        assert fold(journal, kept) == expected(journal), "with what was kept, and the torn line that is not part of it"
        journal.write_bytes(whole)
        assert fold(journal, kept) == status


@pytest.mark.parametrize("seed", range(40, 50))
@pytest.mark.usefixtures("always")
def test_a_journal_read_as_it_grows_gives_the_status_of_the_whole(seed: int, journal: Path, kept: Path) -> None:
    whole = journal_of(seed)
    for size in sorted(random.Random(seed).sample(range(len(whole) + 1), 30)):
        journal.write_bytes(whole[:size])
        assert fold(journal, kept, keep=True) == expected(journal)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def change_a_step(file: Path) -> None:
    plain = json.loads(file.read_text())
    plain["status"]["step"] += 1
    file.write_text(json.dumps(plain))


def forget_a_field(file: Path) -> None:
    plain = json.loads(file.read_text())
    del plain["status"]["state"]
    file.write_text(json.dumps(plain))


def another_shape(file: Path) -> None:
    file.write_text("[1, 2]")


def no_file(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [Path.unlink, cut, change_a_step, forget_a_field, another_shape, no_file])
@pytest.mark.usefixtures("always")
def test_what_is_kept_may_be_lost_or_damaged(damage: Callable[[Path], None], journal: Path, kept: Path) -> None:
    journal.write_bytes(journal_of(1))
    fold(journal, kept, keep=True)
    assert kept.exists()
    damage(kept)
    assert fold(journal, kept, keep=True) == expected(journal)


@pytest.mark.parametrize("other", [journal_of(2), journal_of(1)[:-30], b""])
@pytest.mark.usefixtures("always")
def test_what_is_kept_of_another_journal_is_not_used(other: bytes, journal: Path, kept: Path) -> None:
    journal.write_bytes(journal_of(1))
    fold(journal, kept, keep=True)
    journal.write_bytes(other)
    assert fold(journal, kept) == expected(journal)


@pytest.mark.usefixtures("always")
def test_what_another_jobkit_has_kept_is_not_used(journal: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.write_bytes(journal_of(1))
    fold(journal, kept, keep=True)
    monkeypatch.setattr(fold_module, "_rules", lambda: b"others")
    read = counted(monkeypatch)
    assert fold(journal, kept) == expected(journal)
    assert len(read) == journal.read_bytes().count(b"\n")


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines of journals that are read from now on."""
    lines: list[bytes] = []
    decode = fold_module.decode

    def noted(line: bytes) -> dict[str, Any] | None:
        lines.append(line)
        return decode(line)

    monkeypatch.setattr(fold_module, "decode", noted)
    return lines


def long_run(path: Path, checkpoints: int) -> RunDir:
    run = RunDir(path)
    path.mkdir()
    events: list[dict[str, Any]] = [
        {"time": 1.0, "event": "submitting", "cluster": "slurm", "scheduler": "slurm"},
        {"time": 2.0, "event": "started", "attempt": 1, "job_id": "7"},
        {"time": 3.0, "event": "resumed", "attempt": 1, "step": 0, "total_steps": 10**6},
    ]
    events += [{"time": 4.0 + n, "event": "checkpoint", "attempt": 1, "step": n} for n in range(checkpoints)]
    run.journal.path.write_bytes(b"".join(map(encode, events)))
    return run


def test_neither_an_event_nor_a_status_reads_a_long_journal_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = long_run(tmp_path / "run", 5000)
    run.record(Event.CHECKPOINT, attempt=1, step=5000)
    read = counted(monkeypatch)
    for step in range(5001, 5011):
        run.record(Event.CHECKPOINT, attempt=1, step=step)
    assert run.status().step == 5010
    assert len(read) < 100
    assert run.status() == dataclasses.replace(
        derive(run.journal.read()), journal_bytes=run.journal.path.stat().st_size
    )


def test_who_only_looks_writes_nothing_and_a_short_journal_needs_nothing(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 5000)
    run.status()
    assert [file.name for file in run.path.iterdir()] == ["events.jsonl"]
    short = long_run(tmp_path / "short", 5)
    short.record(Event.CHECKPOINT, attempt=1, step=6)
    assert sorted(file.name for file in short.path.iterdir()) == ["events.jsonl", "status.json"]


def test_a_kept_fold_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 5000)
    run.fold_file.mkdir()
    assert run.write_status().step == 4999


def test_an_event_that_lacks_something_is_passed_over(journal: Path, kept: Path) -> None:
    """A journal that somebody has written to by hand."""
    lines = [
        {"event": "started"},
        {"event": "checkpoint", "step": "x"},
        {"event": "submitting", "params": 3},
        {"event": 7},
    ]
    journal.write_bytes(b"".join(map(encode, [*lines, {"time": 1, "event": "rewound", "step": 5}])))
    assert fold(journal, kept).step == 5
