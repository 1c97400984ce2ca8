"""Why an attempt ended whose ranks could not say so: the most certain witness is believed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jobkit import slurm
from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.files import write_json
from jobkit.run.records import Failure
from jobkit.run.rundir import RunDir
from jobkit.run.status import CAUSES, Attempt
from jobkit.slurm import JobInfo
from jobkit.supervisor.attempt import begin
from jobkit.supervisor.diagnosis import (
    EndCause,
    FirstFailure,
    diagnose,
    failed_launch,
    first_failure,
    first_failure_of_job,
    own_failure,
    srun_said_about,
    srun_starts,
)

# What srun prints: real words of Slurm 22.05.

ABORTED = "srun: Job step aborted: Waiting up to 12 seconds for job step to finish.\n"
KILLED = """\
srun: error: node2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node2: task 2: Killed
srun: error: node1: tasks 0-1: Killed
srun: Force Terminated StepId=1.0
"""
CRASHED = """\
srun: error: node1: task 1: Exited with exit code 1
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node2: tasks 2-3: Exited with exit code 143
srun: error: node1: task 0: Killed
"""
NODE_LOST = f"""\
srun: error: Node failure on node2
{ABORTED}srun: got SIGCONT
srun: forcing job termination
srun: error: node4: tasks 0-1: Exited with exit code 143
"""
NODE_LOST_AFTER_ITS_VICTIM = """\
srun: error: node1: task 0: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node1: task 1: Exited with exit code 143
srun: error: Node failure on node2
srun: Force Terminated StepId=4.0
"""
OUT_OF_MEMORY = """\
slurmstepd-node2: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.
srun: error: node2: task 2: Out Of Memory
srun: launch/slurm: _step_signal: Terminating StepId=1.0
srun: error: node1: tasks 0-1: Killed
"""
NO_LAUNCH = """\
srun: error: Task launch for StepId=1.1 failed on node node2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 12 seconds for job step to finish.
srun: error: node3: task 2: Killed
"""
PREEMPTED = f"{ABORTED}srun: got SIGCONT\nsrun: forcing job termination\n"

SAID: list[tuple[str, str, FirstFailure | None]] = [
    ("nothing", "", None),
    ("a preemption", PREEMPTED, None),
    ("the user's own words", "warning: task 3: Killed time by sleeping\n", None),
    ("a rank was killed", KILLED, FirstFailure(rank=3, node="node2", signal=9)),
    ("a rank crashed", CRASHED, FirstFailure(rank=1, node="node1", code=1)),
    ("a node was lost", NODE_LOST, FirstFailure(node="node2", node_lost=True)),
    ("a node was lost, and a rank noticed", NODE_LOST_AFTER_ITS_VICTIM, FirstFailure(node="node2", node_lost=True)),
    ("out of memory", OUT_OF_MEMORY, FirstFailure(rank=2, node="node2", signal=9, out_of_memory=True)),
    ("out of memory, of no known rank", OUT_OF_MEMORY.splitlines()[0], FirstFailure(signal=9, out_of_memory=True)),
    (
        "out of memory, where srun says only killed",
        OUT_OF_MEMORY.splitlines()[0] + "\n" + KILLED,
        FirstFailure(rank=3, node="node2", signal=9, out_of_memory=True),
    ),
    ("several at once", "srun: error: gpu-a.x: tasks 4-7: Killed\n", FirstFailure(rank=4, node="gpu-a.x", signal=9)),
    ("several, with holes", "srun: error: n1: tasks 0,2-3: Killed\n", FirstFailure(rank=0, node="n1", signal=9)),
    (
        "a segmentation fault",
        "srun: error: node1: task 0: Segmentation fault (core dumped)\n",
        FirstFailure(rank=0, node="node1", signal=11),
    ),
    ("an abort", "srun: error: node1: task 0: Aborted\n", FirstFailure(rank=0, node="node1", signal=6)),
    ("a bus error", "srun: error: node1: task 0: Bus error\n", FirstFailure(rank=0, node="node1", signal=7)),
    ("a SIGTERM", "srun: error: node1: task 0: Terminated\n", FirstFailure(rank=0, node="node1", signal=15)),
    (
        "a large exit code",
        "srun: error: n1: task 12: Exited with exit code 143\n",
        FirstFailure(rank=12, node="n1", code=143),
    ),
    ("a way to die that is not known", "srun: error: n1: task 1: Evaporated\n", FirstFailure(rank=1, node="n1")),
    ("a node that nothing could be started on", f"{KILLED}{NO_LAUNCH}", FirstFailure(node="node2", node_lost=True)),
    ("after other words", f"{ABORTED}{KILLED}", FirstFailure(rank=3, node="node2", signal=9)),
]


@pytest.mark.parametrize(("text", "first"), [row[1:] for row in SAID], ids=[row[0] for row in SAID])
def test_srun_says_who_died_first(text: str, first: FirstFailure | None) -> None:
    assert first_failure(text) == first


NO_STEP = "srun: error: Unable to create step for job 1: {}\n"
AWAY = "srun: error: Unable to confirm allocation for job 1: Unable to contact slurm controller (connect failure)\n"

LAUNCHES: list[tuple[str, str, Sequence[str], str | bool]] = [
    ("a node that does not answer", NO_LAUNCH, [], "node2"),
    ("no step", NO_STEP.format("Required node not available (down, drained or reserved)"), [], True),
    ("no step, and a node is down", NO_STEP.format("Required node not available"), ["node3"], "node3"),
    ("no step, for a node that left", NO_STEP.format("Requested node configuration is not available"), ["n1"], "n1"),
    ("too much asked for", NO_STEP.format("Requested node configuration is not available"), [], False),
    ("too much memory", NO_STEP.format("Memory required by task is not available"), [], False),
    ("no controller", AWAY, [], True),
    ("a wrong option", "srun: unrecognized option '--bogus'\n", ["node3"], False),
    ("an earlier srun's words", f"{NO_LAUNCH}{srun_starts(['node1'])}srun: error: node1: task 0: Killed\n", [], False),
]


@pytest.mark.parametrize(("text", "down", "node"), [row[1:] for row in LAUNCHES], ids=[row[0] for row in LAUNCHES])
def test_srun_says_which_node_it_could_start_nothing_on(text: str, down: Sequence[str], node: str | bool) -> None:
    first = failed_launch(text, lambda: down)
    if node is False:
        assert first is None
    else:
        assert first is not None and first.node_lost and first.error
        assert first.node == (None if node is True else node)


def attempt(number: int, *nodes: str, began: str = "in place") -> Attempt:
    return Attempt(id=number, cluster="slurm", job_id="7", started=0.0, nodes=list(nodes), began=began)


LOST_2, KILLED_1 = "srun: error: Node failure on node2\n", "srun: error: node1: task 0: Killed\n"
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n"
TWO = [attempt(1, "node1", "node2", began="submitted"), attempt(2, "node1", "node3")]

ABOUT: list[tuple[str, dict[int, str], Sequence[Attempt], str]] = [
    ("a step of the attempt before", {1: KILLED_1}, TWO, KILLED_1),
    ("a node that was replaced", {1: LOST_2 + KILLED_1}, TWO, KILLED_1),
    ("a parent that was started again", {1: KILLED_1, 2: srun_starts(["node1"])}, TWO, ""),
    ("another one that was", {1: KILLED_1, 2: srun_starts(["node3"])}, TWO, KILLED_1),
    ("memory that ran out before", {1: OOM}, TWO, ""),
    ("memory that ran out", {2: OOM}, TWO, OOM),
    ("an earlier start of the job", {1: KILLED_1}, [TWO[0], attempt(2, "node1", began="requeued")], ""),
]


@pytest.mark.parametrize(("said", "attempts", "expected"), [row[1:] for row in ABOUT], ids=[row[0] for row in ABOUT])
def test_of_what_srun_says_that_counts_which_is_about_the_attempt(
    tmp_path: Path, said: dict[int, str], attempts: Sequence[Attempt], expected: str
) -> None:
    run = RunDir(tmp_path / "toy-12345678")
    for number, text in said.items():
        run.logs(number).mkdir(parents=True)
        run.srun_log(number).write_text(text)
    assert srun_said_about(run, attempts, 2) == expected.strip()


def test_a_node_that_was_replaced_is_not_the_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "dead_node", lambda nodes: "node2" if "node2" in nodes.split(",") else None)
    assert first_failure_of_job("", job(nodes="node1,node2,node3"), ["node1", "node3"]) is None
    assert first_failure_of_job("", job(nodes="node1,node2,node3")) == FirstFailure(node="node2", node_lost=True)


# The witnesses

GIB = 2**30
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:55969. GLHF!"
"""What gloo says where another rank is gone."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose attempt 2 has just ended, on two nodes of two ranks."""
    run = RunDir(tmp_path / "toy-12345678")
    for attempt in (1, 2):
        run.logs(attempt).mkdir(parents=True)
    return run


def report(run: RunDir, rank: int, error: str = "ValueError: no", time: float = 100.0, **more: Any) -> None:
    """Write down what a rank of attempt 2 does when it fails."""
    own = {"time": time, "rank": rank, "node_index": rank // 2, "node": f"node{rank // 2 + 1}", "error": error}
    rest = {"traceback": "Traceback ...", "step": None, "samples": [], "alone": False, "disk": False}
    write_json(run.error_file(2, rank), own | rest | more)


def death(run: RunDir, first: FirstFailure | None = None, job: JobInfo | None = None, nodes: int = 2) -> EndCause:
    return diagnose(run, 2, nodes, first, job)


def job(state: str = "RUNNING", reason: str = "None", **more: Any) -> JobInfo:
    fields = {
        "preempt_time": None,
        "start": 1000.0,
        "end": 4600.0,
        "elapsed": 60.0,
        "restarts": 0,
        "nodes": "node[1-2]",
    }
    return JobInfo(job_id="9", state=state, reason=reason, **(fields | more))


def test_the_rank_that_failed_says_where_and_why(run: RunDir) -> None:
    report(run, 3, "ValueError: no", step=12, samples=[4, 7], peak_bytes=3 * GIB)
    found = death(run, FirstFailure(rank=3, node="node2", code=1), job())
    assert found.cause == "crashed"
    expected = {"rank": 3, "node": "node2", "step": 12, "samples": [4, 7], "error": "rank 3: ValueError: no"}
    assert {key: getattr(found.failure, key) for key in expected} == expected
    assert found.failure.traceback.startswith("Traceback")
    assert not found.failure.everywhere


SECONDARY = [
    CLOSED,
    "RuntimeError: [unbound_buffer.cc:78] Read error [127.0.0.1]:5: Connection reset by peer",
    "RuntimeError: writev [127.0.0.1]:5: Broken pipe",
    "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2006, remote process exited or there was a network error",
    "DistNetworkError: recvValue failed on SocketImpl(fd=3)",
    "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?",
    "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete",
]


@pytest.mark.parametrize("error", SECONDARY)
def test_a_rank_with_a_broken_connection_is_no_culprit_even_if_it_speaks_first(run: RunDir, error: str) -> None:
    report(run, 0, error, time=99.0)
    report(run, 1, error, time=100.0)
    report(run, 2, "ValueError: no", time=101.0)
    found = death(run, FirstFailure(rank=0, node="node1", code=1), job())
    assert (found.failure.rank, found.failure.error) == (2, "rank 2: ValueError: no")


def test_the_first_to_fail_by_itself_counts(run: RunDir) -> None:
    report(run, 1, "ValueError: late", time=101.0)
    report(run, 2, "ValueError: early", time=100.0)
    assert death(run).failure.error == "rank 2: ValueError: early"


def test_what_would_fail_again_is_told_by_the_rank_that_knows_and_not_by_those_that_heard_of_it(run: RunDir) -> None:
    report(run, 0, "RankError: rank 1: no tensor_plan()", time=99.0, alone=True)
    report(run, 1, "UsageError: no tensor_plan()", time=100.0, final=True)
    failure = death(run).failure
    assert (failure.rank, failure.error, failure.final) == (1, "rank 1: UsageError: no tensor_plan()", True)


def test_where_all_have_broken_connections_the_first_of_them_counts(run: RunDir) -> None:
    report(run, 1, CLOSED, time=101.0)
    report(run, 0, CLOSED, time=100.0)
    found = death(run)
    assert (found.cause, found.failure.rank) == ("crashed", 0)


def test_a_script_that_is_continued_does_not_blame_the_victim_of_a_closed_connection(run: RunDir) -> None:
    run.write_config(Config(name="toy", task="m:f"))
    run.record("submitting", cluster="local", scheduler="local")
    run.record("started", attempt=1, job_id="7")
    run.record("started", attempt=2, job_id="8")
    report(run, 0, CLOSED, time=99.0)
    report(run, 1, "ValueError: no", time=100.0)
    told = own_failure(run, 2)
    assert told is not None and told.failure.rank == 1
    assert begin(run, job_id="9", scheduler="local", launcher="torchrun").number == 3
    second = run.status().attempts[1]
    assert (second.cause, second.failure and second.failure.error) == ("crashed", "rank 1: ValueError: no")


def test_an_attempt_whose_ranks_only_missed_each_other_is_lost_and_no_rank_is_blamed(run: RunDir) -> None:
    run.write_config(Config(name="toy", task="m:f"))
    run.record("submitting", cluster="local", scheduler="local")
    run.record("started", attempt=2, job_id="8")
    report(run, 0, CLOSED)
    begin(run, job_id="9", scheduler="local")
    lost = run.status().attempts[0]
    assert (lost.cause, lost.failure) == ("lost", Failure())


def test_a_rank_that_ended_without_a_word_is_the_culprit_where_the_others_only_missed_it(run: RunDir) -> None:
    report(run, 0, CLOSED)
    report(run, 1, CLOSED)
    found = death(run, FirstFailure(rank=2, node="node2", code=3), job())
    assert (found.cause, found.failure.rank, found.failure.node) == ("crashed", 2, "node2")
    assert "exit code 3" in found.failure.error


def test_reports_of_another_attempt_do_not_count(run: RunDir) -> None:
    write_json(run.error_file(1, 0), {"time": 1.0, "rank": 0, "error": "ValueError: old"})
    assert "old" not in death(run).failure.error


def test_a_report_that_is_not_whole_does_not_count(run: RunDir) -> None:
    run.error_file(2, 0).write_text('{"time": 1')
    report(run, 1, "ValueError: whole")
    assert death(run).failure.error == "rank 1: ValueError: whole"


# On every node?

EVERYWHERE: list[tuple[str, Sequence[tuple[int, str, bool]], int, bool]] = [
    ("the same on both nodes", [(0, "no", False), (2, "no", False)], 2, True),
    ("the same on all ranks", [(rank, "no", False) for rank in range(4)], 2, True),
    ("the same on one node's ranks", [(0, "no", False), (1, "no", False)], 2, False),
    ("another on the other node", [(0, "no", False), (2, "else", False)], 2, False),
    ("a broken connection on the other node", [(0, "no", False), (2, CLOSED, False)], 2, False),
    ("the only node", [(0, "no", False)], 1, True),
    ("two of three nodes", [(0, "no", False), (2, "no", False)], 3, False),
    ("that the ranks did not find each other", [(0, "no", True), (2, "no", True)], 2, False),
]


@pytest.mark.parametrize(
    ("reports", "nodes", "everywhere"), [row[1:] for row in EVERYWHERE], ids=[row[0] for row in EVERYWHERE]
)
def test_an_error_is_everywhere_when_all_nodes_have_the_same(
    run: RunDir, reports: Sequence[tuple[int, str, bool]], nodes: int, everywhere: bool
) -> None:
    for rank, error, alone in reports:
        report(run, rank, error, time=100.0 + rank, alone=alone)
    assert death(run, nodes=nodes).failure.everywhere == everywhere


# What is no exception


def test_a_rank_that_was_killed_is_not_called_crashed_for_what_the_others_say(run: RunDir) -> None:
    report(run, 0, CLOSED)
    found = death(run, FirstFailure(rank=3, node="node2", signal=9), job())
    assert (found.cause, found.failure.rank, found.failure.node) == ("killed", 3, "node2")
    assert "rank 3 on node2 was killed by SIGKILL" in found.failure.error


@pytest.mark.parametrize(
    ("first", "cause", "said"),
    [
        (FirstFailure(rank=1, signal=9), "killed", ["rank 1 was killed by SIGKILL", "out of memory?"]),
        (FirstFailure(signal=9), "killed", ["a rank was killed by SIGKILL"]),
        (FirstFailure(rank=1, node="n1", signal=11), "killed", ["rank 1 on n1 was killed by signal 11"]),
        (FirstFailure(rank=1, signal=9, out_of_memory=True), "out_of_memory", ["lack of memory on the host"]),
        (FirstFailure(rank=1, code=3), "crashed", ["rank 1 ended with exit code 3; what it printed is in its log"]),
        (FirstFailure(rank=1), "crashed", ["rank 1 ended; what it printed is in its log"]),
        (None, "crashed", ["the ranks ended; what it printed is in its log"]),
        (FirstFailure(node="node2", node_lost=True), "node_failure", ["node node2 died"]),
    ],
)
def test_who_left_no_report_is_described_by_how_it_ended(
    run: RunDir, first: FirstFailure | None, cause: str, said: list[str]
) -> None:
    found = death(run, first)
    assert found.cause == cause
    for part in said:
        assert part in found.failure.error
    assert found.failure.node == (first.node if first else None)


def test_the_last_that_a_silent_rank_printed_to_stderr_is_told(run: RunDir) -> None:
    log = run.rank_log(2, 1, "err")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("before\n" * 20000 + "usage: train.py [-h]\n\ntrain.py: error: unrecognized arguments: --foo\n")
    error = death(run, FirstFailure(rank=1, code=2)).failure.error or ""
    assert error.startswith("rank 1 ended with exit code 2: ") and error.count(" / ") == 3
    assert error.endswith("usage: train.py [-h] / train.py: error: unrecognized arguments: --foo")
    log.write_text("x" * 100_000 + "the end\n")
    error = death(run, FirstFailure(rank=1, code=2)).failure.error or ""
    assert error.endswith("xthe end") and len(error) < 5000, "it stands in the journal"


ARGPARSE = (
    "usage: train.py [-h] --lr LR\n                [--steps STEPS]\ntrain.py: error: unrecognized arguments: --foo\n"
)
CLICK = "Usage: train.py [OPTIONS]\nTry 'train.py --help' for help.\n\nError: No such option '--foo'.\n"


def refused(words: str) -> str:
    """By a parser of argparse's."""
    return f"usage: train.py [-h] --lr LR\ntrain.py: error: {words}\n"


@pytest.mark.parametrize(
    ("said", "code", "final"),
    [
        (f"a warning\n{ARGPARSE}\n", 2, True),
        (ARGPARSE.replace("[-h]", "[-h]" + " [--an_option_of_many AN_OPTION_OF_MANY]" * 200), 2, True),
        (CLICK, 2, True),
        (ARGPARSE, 1, None),  # as of torchrun, whose ranks may have failed otherwise
        (ARGPARSE + "Traceback (most recent call last):\nOSError: no\n", 2, None),  # of a program that was called
        ("python: can't open file 'train.py': [Errno 2] No such file or directory\n", 2, None),  # a disk may be away
        ("train.py: error: the server is away\n", 2, None),
        (refused("argument -l/--lr: invalid float value: 'a'"), 2, True),
        (refused("the following arguments are required: --lr"), 2, True),
        (refused("argument --data: can't open '/data': [Errno 5] Input/output error: '/data'"), 2, None),
        (refused("--data: no such folder"), 2, None),  # what a script has parser.error say
        (refused("argument --data: invalid existing value: '/data'"), 2, None),  # which a function has looked for
        (CLICK.replace("No such option '--foo'.", "Invalid value for '--data': Path '/data' does not exist."), 2, None),
        (CLICK.replace("No such option '--foo'.", "Invalid value for '--lr': 'a' is not a valid float."), 2, True),
        ("Usage: 80%\ntrain.py: error: the server is away\n", 2, None),
        ("", 2, None),
    ],
)
def test_wrong_options_of_a_program_would_be_wrong_again(run: RunDir, said: str, code: int, final: bool | None) -> None:
    log = run.rank_log(2, 1, "err")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(said)
    found = death(run, FirstFailure(rank=1, code=code))
    assert (found.cause, found.failure.final) == ("crashed", final)
    for attempt in (1, 2):
        run.record(Event.STARTED, attempt=attempt, job_id="9", host="node1")
    found = death(run, FirstFailure(rank=1, code=code))
    assert (found.cause, found.failure.final) == ("crashed", None), "they were right in an attempt before"


def test_the_memory_that_was_used_is_told_where_it_may_be_the_reason(run: RunDir) -> None:
    write_json(run.progress_file, {"attempt": 2, "time": 1.0, "step": 5, "peak_bytes": 3 * GIB})
    for first in (FirstFailure(rank=1, signal=9), FirstFailure(rank=1, signal=9, out_of_memory=True)):
        found = death(run, first)
        assert "3.00 GiB" in found.failure.error
        assert found.failure.peak_bytes == 3 * GIB


def test_the_memory_that_another_attempt_used_is_not_told(run: RunDir) -> None:
    write_json(run.progress_file, {"attempt": 1, "time": 1.0, "step": 5, "peak_bytes": 3 * GIB})
    assert "GiB" not in death(run, FirstFailure(rank=1, signal=9)).failure.error


@pytest.mark.parametrize(
    ("more", "cause", "said"),
    [
        ({"out_of_memory": "GPU", "peak_bytes": 2 * GIB}, "out_of_memory", "peak of the GPU's memory: 2.00 GiB"),
        ({"out_of_memory": "host", "peak_bytes": GIB}, "out_of_memory", "peak of the host's memory: 1.00 GiB"),
        ({"disk": True}, "disk", "rank 0: OSError"),
        ({"peak_bytes": GIB}, "crashed", "rank 0: OSError"),
    ],
)
def test_a_report_may_say_that_memory_or_the_disk_was_at_an_end(
    run: RunDir, more: dict[str, Any], cause: str, said: str
) -> None:
    report(run, 0, "OSError: no", step=7, **more)
    found = death(run, FirstFailure(rank=0, code=1))
    assert found.cause == cause
    assert said in found.failure.error
    assert found.failure.step == 7


# Whom to believe


def test_slurms_record_is_believed_before_the_ranks(run: RunDir) -> None:
    first = FirstFailure(rank=3, node="node2", signal=9)
    report(run, 0, CLOSED)
    records = {
        "preempted": job("COMPLETING", end=None),
        "timeout": job("COMPLETING", "TimeLimit"),
        "cancelled": job("COMPLETING"),
        "node_failure": job("COMPLETING", "NodeDown"),
        "killed": job("COMPLETING", "JobLaunchFailure"),
        "out_of_memory": job("OUT_OF_MEMORY"),
    }
    assert {cause: death(run, first, record).cause for cause, record in records.items()} == {
        cause: cause for cause in records
    }


def test_a_script_that_was_killed_is_named(run: RunDir) -> None:
    assert "batch script" in death(run, None, job("COMPLETING", "JobLaunchFailure")).failure.error


def test_a_job_that_slurm_put_back_for_a_dead_node_was_not_preempted(run: RunDir) -> None:
    found = death(run, FirstFailure(node="node2", node_lost=True), job("COMPLETING", end=None))
    assert (found.cause, found.failure.node) == ("node_failure", "node2")


@pytest.mark.parametrize("cause", ["user", "timeout", "preempted", "hang"])
def test_jobkits_own_notice_is_believed_before_the_ranks_and_slurm(run: RunDir, cause: str) -> None:
    write_json(run.stop_request_file(2), {"cause": cause, "error": "no progress"})
    report(run, 0, CLOSED)
    found = death(run, FirstFailure(rank=3, node="node2", signal=9), job("COMPLETING"))
    assert (found.cause, found.failure.error) == (cause, "no progress")


def test_a_notice_to_another_attempt_does_not_count(run: RunDir) -> None:
    write_json(run.stop_request_file(1), {"cause": "user"})
    assert death(run, FirstFailure(rank=3, signal=9)).cause == "killed"


def test_every_cause_is_one_that_is_explained(run: RunDir) -> None:
    found = {death(run).cause, death(run, FirstFailure(signal=9)).cause, death(run, FirstFailure(node_lost=True)).cause}
    for more in ({"disk": True}, {"out_of_memory": "GPU"}, {}):
        report(run, 0, **more)
        found.add(death(run).cause)
    assert found == {"crashed", "killed", "node_failure", "disk", "out_of_memory"}
    assert found <= set(CAUSES)
