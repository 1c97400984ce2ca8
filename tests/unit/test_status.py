"""The status of a run follows from its journal, whatever order, tear or crash the journal has been through."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobkit.checkpoint.store import Store
from jobkit.cli.status import describe
from jobkit.run.files import read_json, write_atomic, write_json
from jobkit.run.journal import Journal
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status, derive

# A journal in short: (event, {field: value}); times are counted up.
Short = tuple[str, dict[str, Any]]

SUBMITTING: Short = ("submitting", {"cluster": "slurm", "scheduler": "slurm", "code": "c0de"})
SUBMITTED: Short = ("submitted", {"job_id": "7"})
FAILED: Short = ("failed", {"attempt": 1, "cause": "crashed", "step": 12, "error": "rank 1: ValueError: no"})


def started(attempt: int = 1, job: str = "7") -> Short:
    return ("started", {"attempt": attempt, "job_id": job, "host": "node1"})


def resumed(step: int = 0, attempt: int = 1) -> Short:
    return ("resumed", {"attempt": attempt, "step": step, "total_steps": 100})


def checkpoint(step: int) -> Short:
    return ("checkpoint", {"step": step})


def interrupted(cause: str, step: int | None = None, attempt: int = 1) -> Short:
    return ("interrupted", {"attempt": attempt, "cause": cause} | ({} if step is None else {"step": step}))


def requeued(job: str = "7") -> Short:
    return ("requeued", {"job_id": job, "cause": "preempted"})


RUNNING = [SUBMITTING, SUBMITTED, started(), resumed()]


def of(short: list[Short], progress: dict[str, Any] | None = None) -> Status:
    events = [{"time": float(second), "event": name, **fields} for second, (name, fields) in enumerate(short)]
    return derive(events, Progress(**({"time": 0.0} | progress)) if progress else None)


STATES: list[tuple[str, list[Short], dict[str, Any]]] = [
    ("nothing yet", [], {"state": "queued", "attempts": [], "job_id": None, "submitting": False}),
    ("being submitted", [SUBMITTING], {"state": "queued", "submitting": True, "cluster": "slurm", "job_id": None}),
    ("submitted", [SUBMITTING, SUBMITTED], {"state": "queued", "submitting": False, "job_id": "7"}),
    ("started", [SUBMITTING, SUBMITTED, started()], {"state": "running", "job_id": "7", "scheduler": "slurm"}),
    ("started before submitted", [SUBMITTING, started(), SUBMITTED], {"state": "running", "submitting": False}),
    ("another job started before submitted", [SUBMITTING, started(job="6"), SUBMITTED], {"job_id": "6"}),
    ("started, submitted never written", [SUBMITTING, started()], {"state": "running", "submitting": False}),
    (
        "finished before submitted",
        [SUBMITTING, started(), resumed(), ("finished", {"step": 100, "result": 1}), SUBMITTED],
        {"state": "finished", "step": 100, "result": 1, "submitting": False, "job_id": "7"},
    ),
    ("in the loop", RUNNING, {"state": "running", "step": 0, "total_steps": 100}),
    ("with a checkpoint", [*RUNNING, checkpoint(50)], {"state": "running", "step": 50, "checkpoint": 50}),
    ("preempted", [*RUNNING, interrupted("preempted", 40)], {"state": "interrupted", "step": 40}),
    ("requeued", [*RUNNING, interrupted("preempted", 40), requeued()], {"state": "queued", "step": 40, "job_id": "7"}),
    ("requeued as another job", [*RUNNING, interrupted("preempted", 40), requeued("8")], {"job_id": "8"}),
    (
        "back from the queue",
        [*RUNNING, interrupted("preempted", 40), requeued(), started(2), resumed(40, 2)],
        {"state": "running", "step": 40},
    ),
    (
        "requeueing refused",
        [*RUNNING, interrupted("preempted", 40), requeued(), ("requeue_failed", {"error": "held"})],
        {"state": "interrupted", "error": "held"},
    ),
    ("cancelled by its ranks", [*RUNNING, interrupted("cancelled", 40)], {"state": "cancelled", "step": 40}),
    (
        "asked to cancel",
        [*RUNNING, ("cancel_requested", {})],
        {"state": "running", "cancel_requested": True},
    ),
    (
        "cancelled in the queue",
        [SUBMITTING, SUBMITTED, ("cancel_requested", {}), ("cancelled", {})],
        {"state": "cancelled"},
    ),
    ("cancelled, and its ranks recorded nothing", [*RUNNING, ("cancelled", {"attempt": 1})], {"state": "cancelled"}),
    (
        "submitted again after a cancel",
        [*RUNNING, ("cancel_requested", {}), interrupted("cancelled", 40), SUBMITTING, ("submitted", {"job_id": "9"})],
        {"state": "queued", "cancel_requested": False, "job_id": "9", "step": 40},
    ),
    ("failed", [*RUNNING, FAILED], {"state": "failed", "step": 12, "error": "rank 1: ValueError: no"}),
    ("submitted again after a failure", [*RUNNING, FAILED, SUBMITTING], {"state": "queued", "error": None}),
    (
        "finished after a resume",
        [*RUNNING, checkpoint(50), interrupted("timeout", 60), requeued(), started(2), resumed(60, 2)]
        + [("finished", {"attempt": 2, "step": 100, "result": {"loss": 0.5}})],
        {"state": "finished", "step": 100, "result": {"loss": 0.5}, "error": None},
    ),
    ("with an event of a later version", [*RUNNING, ("celebrated", {"cake": True})], {"state": "running"}),
]


@pytest.mark.parametrize(("short", "expected"), [row[1:] for row in STATES], ids=[row[0] for row in STATES])
def test_the_status_follows_from_the_journal(short: list[Short], expected: dict[str, Any]) -> None:
    status = of(short).as_dict()
    assert {key: status[key] for key in expected} == expected
    json.dumps(status)


@pytest.mark.parametrize(
    ("before", "state"),
    [
        ([*RUNNING, FAILED], "failed"),
        ([*RUNNING, interrupted("user", 5)], "interrupted"),
        ([*RUNNING, interrupted("cancelled", 5)], "cancelled"),
    ],
)
def test_a_submission_that_fails_leaves_the_state_as_it_was(before: list[Short], state: str) -> None:
    status = of([*before, SUBMITTING, ("submit_failed", {"error": "no such partition"})])
    assert (status.state, status.submitting) == (state, False)
    assert of(before).step == status.step


def test_a_submission_that_fails_does_not_hide_why_the_run_failed() -> None:
    status = of([*RUNNING, FAILED, SUBMITTING, ("submit_failed", {"error": "no such partition"})])
    assert status.error == "rank 1: ValueError: no"


def test_a_first_submission_that_was_cut_off_is_not_queued() -> None:
    assert of([SUBMITTING, ("submit_failed", {"error": "cut off"})]).state == "interrupted"


def test_a_checkpoint_that_was_set_aside_is_not_called_the_newest() -> None:
    back = ("resumed", {"attempt": 2, "step": 50, "total_steps": 100, "checkpoint": "step_00000050"})
    damaged = ("set_aside", {"attempt": 2, "step": 60, "reason": "checksum"})
    status = of([*RUNNING, checkpoint(50), checkpoint(60), interrupted("killed"), started(2), damaged, back])
    assert (status.step, status.checkpoint) == (50, 50)


def test_an_attempt_that_began_from_memory_has_not_made_its_first_step_durable() -> None:
    back = ("resumed", {"attempt": 2, "step": 58, "total_steps": 100, "memory": True, "durable_step": 50})
    status = of([*RUNNING, checkpoint(50), interrupted("killed"), started(2), back])
    assert (status.step, status.checkpoint) == (58, 50)
    assert [(one.from_memory, one.first_step, one.durable_step) for one in status.attempts] == [
        (False, 0, 50),
        (True, 58, 50),
    ]
    nothing = ("resumed", {"attempt": 2, "step": 8, "total_steps": 100, "memory": True, "durable_step": None})
    status = of([*RUNNING, interrupted("killed"), started(2), nothing])
    assert (status.step, status.checkpoint, status.attempts[1].durable_step) == (8, None, 0)


def test_each_attempt_remembers_where_it_ran_how_far_it_came_and_why_it_ended() -> None:
    status = of(
        [*RUNNING, interrupted("preempted", 40), requeued(), started(2), resumed(40, 2), ("finished", {"step": 100})]
    )
    first, second = status.attempts
    assert (first.id, first.cause, first.first_step, first.last_step) == (1, "preempted", 0, 40)
    assert (second.id, second.cause, second.first_step, second.last_step) == (2, "finished", 40, 100)
    assert (first.started, first.ended) == (2.0, 4.0)
    assert {(one.cluster, one.job_id, one.host, one.code) for one in status.attempts} == {
        ("slurm", "7", "node1", "c0de")
    }


def test_a_late_cancel_does_not_change_why_an_attempt_ended() -> None:
    status = of([*RUNNING, interrupted("preempted", 40), requeued(), ("cancelled", {})])
    assert (status.state, status.attempts[0].cause) == ("cancelled", "preempted")


PROGRESS = [
    ("its own report counts", RUNNING, {"attempt": 1, "step": 42, "total_steps": 100}, 42),
    ("another attempt's does not", RUNNING, {"attempt": 2, "step": 42, "total_steps": 100}, 0),
    ("one behind the checkpoint does not", [*RUNNING, checkpoint(50)], {"attempt": 1, "step": 42}, 50),
    ("one from before the loop says nothing", RUNNING, {"attempt": 1, "step": None}, 0),
    ("none", RUNNING, None, 0),
    ("after the end it is the end that counts", [*RUNNING, interrupted("user", 40)], {"attempt": 1, "step": 42}, 40),
    (
        "an old one does not count for the next attempt",
        [*RUNNING, interrupted("preempted", 40), requeued(), started(2), resumed(40, 2)],
        {"attempt": 1, "step": 99},
        40,
    ),
]


@pytest.mark.parametrize(("short", "progress", "step"), [row[1:] for row in PROGRESS], ids=[row[0] for row in PROGRESS])
def test_the_progress_report_counts_for_the_attempt_that_wrote_it(
    short: list[Short], progress: dict[str, Any] | None, step: int
) -> None:
    assert of(short, progress).step == step


def test_an_attempt_that_was_killed_ends_where_its_report_did() -> None:
    status = of([*RUNNING, checkpoint(30), interrupted("killed")], {"attempt": 1, "step": 42, "total_steps": 100})
    assert status.attempts[0].last_step == 42
    assert (status.step, status.checkpoint) == (30, 30)


# The journal on the disk


def test_the_journal_gives_back_what_was_written_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    assert journal.read() == []
    written = [journal.append("one", text="é\u2028\n"), journal.append("two", value={"a": [1, None]})]
    assert journal.read() == written
    assert [list(event)[:2] for event in journal.read()] == [["time", "event"]] * 2


@pytest.mark.parametrize(
    "torn", [b'{"time": 1, "event": "fin', b'{"time": 1', b"{", b"\xff\xfe", b'{"a": "\xc3', b"[1, 2]", b"17"]
)
def test_a_torn_line_is_skipped_and_does_not_swallow_the_next(tmp_path: Path, torn: bytes) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.append("one")
    with journal.path.open("ab") as file:
        file.write(torn)
    assert [event["event"] for event in journal.read()] == ["one"]
    journal.append("two")
    journal.append("three")
    assert [event["event"] for event in journal.read()] == ["one", "two", "three"]
    assert torn in journal.path.read_bytes()


def test_a_journal_cut_anywhere_reads_as_a_beginning_of_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    for number in range(3):
        journal.append("step", number=number)
    whole, events = journal.path.read_bytes(), journal.read()
    for size in range(len(whole) + 1):
        journal.path.write_bytes(whole[:size])
        found = journal.read()
        assert found == events[: len(found)]
        journal.append("after")
        assert [event["event"] for event in journal.read()][-1] == "after"


def test_writers_at_the_same_time_do_not_mix_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    code = (
        "import sys; from pathlib import Path; from jobkit.run.journal import Journal\n"
        "for n in range(100): Journal(Path(sys.argv[1])).append('step', who=sys.argv[2], n=n, text='x' * 300)"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(file), str(who)]) for who in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    events = Journal(file).read()
    assert len(file.read_text().splitlines()) == len(events) == 300
    for who in "012":
        assert [event["n"] for event in events if event["who"] == who] == list(range(100))


# One way to write a file


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    for data in ("old", b"new"):
        write_atomic(file, data)
        assert file.read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    write_json(file, {"state": "old"})
    with pytest.raises(TypeError):
        write_json(file, {"state": object()})
    with pytest.raises(UnicodeEncodeError):
        write_atomic(file, "a lone surrogate: \ud800")
    assert read_json(file) == {"state": "old"}
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomic(tmp_path / "folder", "a file cannot replace a folder")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "folder", file]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "value.json"
    write_json(file, ["a"] * 50_000)
    code = (
        "import sys; from pathlib import Path; from jobkit.run.files import write_json\n"
        "for n in range(60): write_json(Path(sys.argv[1]), ['ab'[n % 2]] * 50_000, durable=False)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(file)])
    while writer.poll() is None:
        found = json.loads(file.read_text())
        assert len(found) == 50_000
        assert len(set(found)) == 1
    assert writer.returncode == 0


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "value.txt"
    write_atomic(file, "old")
    code = (
        "import os, sys; from pathlib import Path; from jobkit.run import files\n"
        "os.fsync = lambda fd: os._exit(9)\n"
        "files.write_atomic(Path(sys.argv[1]), 'new')"
    )
    assert subprocess.run([sys.executable, "-c", code, str(file)], check=False).returncode == 9
    assert file.read_text() == "old"
    write_atomic(file, "newer")
    assert file.read_text() == "newer"


@pytest.mark.parametrize("content", [None, b"", b'{"a": ', b"\xff"])
def test_json_that_is_missing_or_torn_reads_as_nothing(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "value.json"
    if content is not None:
        file.write_bytes(content)
    assert read_json(file) is None
    assert read_json(tmp_path) is None


def test_what_is_written_is_readable_by_the_group_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "status.json", "x")
        assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


def test_what_a_superseded_attempt_writes_late_does_not_end_the_one_that_runs_now() -> None:
    status = of([*RUNNING, started(2), resumed(10, 2), interrupted("user", 5, attempt=1), ("finished", {"attempt": 1})])
    assert (status.state, status.step, status.attempts[1].cause) == ("running", 10, None)


def test_of_a_large_batch_that_failed_a_few_samples_are_printed(tmp_path: Path) -> None:
    failure = {"rank": 1, "step": 12, "samples": list(range(64))}
    failed = of([*RUNNING, (FAILED[0], FAILED[1] | {"failure": failure})])
    text = "\n".join(describe(RunDir(tmp_path), failed))
    assert "samples of that rank's batch: 0, 1, 2, 3, 4, 5, 6, 7 and 56 more (--json lists them)" in text


def test_a_checkpoint_that_somebody_has_removed_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x-1")
    stopped = of([*RUNNING, checkpoint(20), checkpoint(40), interrupted("preempted", 40)])

    def told() -> str:
        return next(line for line in describe(run, stopped) if line.startswith("newest checkpoint"))

    for step in (20, 40):
        folder = Store(run.checkpoints).path(step)
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    assert told() == "newest checkpoint: step 40"
    shutil.rmtree(Store(run.checkpoints).path(40))
    gone = f"newest checkpoint: step 40, which is not in {run.checkpoints} any more"
    assert told() == f"{gone}: it continues from step 20"
    shutil.rmtree(run.checkpoints)
    assert told() == f"{gone}: there is none; it begins again at step 0"


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("user", "attempt 1: stopped by Ctrl-C or SIGTERM, steps 0 to 40"),
        ("left", "attempt 1: the script ended without ctx.finish, steps 0 to 40"),
        ("preempted", "attempt 1: preempted, steps 0 to 40"),
    ],
)
def test_why_an_attempt_ended_is_told_in_words_and_stays_a_name_for_programs(
    tmp_path: Path, cause: str, words: str
) -> None:
    ended = of([*RUNNING, (interrupted(cause, 40))])
    assert words in "\n".join(describe(RunDir(tmp_path), ended))
    assert ended.as_dict()["attempts"][0]["cause"] == cause
