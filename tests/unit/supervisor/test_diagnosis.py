"""Why an attempt ended: the first cause by arrival, by tables of what arrived and what lay on the disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from jobkit.run.records import AttemptBegan, Cause, RankReport
from jobkit.supervisor.diagnosis import Facts, FailedSetup, LostNode, Traces, Verdict, diagnose, is_failure, last_words
from jobkit.wire.messages import RankExited, Silent

GIB = 2**30


def node_of(rank: int) -> str:
    """Four ranks on two nodes."""
    return f"n{1 + rank // 2}"


def exits(*codes: tuple[int, int], **facts: Any) -> list[tuple[RankExited, str]]:
    """Exits of (rank, code), in order of arrival."""
    return [
        (RankExited(serial=number, attempt=2, rank=rank, code=code, **facts), node_of(rank))
        for number, (rank, code) in enumerate(codes)
    ]


def failed(rank: int, error: str = "ValueError: no", *, seen: Sequence[int] = (), **facts: Any) -> RankReport:
    return end(rank, "failed", **{"error": error, "signature": error, "seen": list(seen), **facts})


def end(rank: int, kind: Literal["finished", "stopped", "failed"] = "finished", **facts: Any) -> RankReport:
    return RankReport(
        **{"rank": rank, "attempt": 2, "kind": kind, "time": 100.0 - rank, "node": node_of(rank), **facts}
    )


CLOSED = "RuntimeError: Connection closed by peer"
ALL_FINISHED = [end(rank) for rank in range(4)]
ALL_STOPPED = [end(rank, "stopped") for rank in range(4)]
LOST = [LostNode(node="n2", why="no answer")]
DEAD_1 = exits((1, -9), (0, 1))
SETUP = FailedSetup(node="n1", words="module load x")
SILENT = (Silent(attempt=2, rank=3, seconds=9.0, step=7), "n2")


def verdict(facts: Facts, ends: Sequence[RankReport] = (), *, command: bool = False, **traces: Any) -> Verdict:
    began = AttemptBegan(attempt=2, token="t", job_id="7", nodes=["n1", "n2"], ranks=4)
    return diagnose(facts, Traces(ends=ends, **traces), began, command=command)


# (what happened, what the supervisor saw, what the ranks left) -> (cause, rank, node)
DIAGNOSES: list[tuple[str, Facts, Sequence[RankReport], tuple[Cause, int | None, str | None]]] = [
    ("a setup line", Facts(failed_setup=SETUP), [], ("setup", None, "n1")),
    # Finished
    ("all say so", Facts(), ALL_FINISHED, ("finished", None, None)),
    ("all exit with 0", Facts(exits=exits((0, 0), (1, 0), (2, 0), (3, 0))), [], ("finished", None, None)),
    ("something called exit(0) in a step", Facts(exits=exits((1, 0), in_step=True)), [], ("crashed", 1, "n1")),
    ("some say so, some exit", Facts(exits=exits((0, 0), (1, 0))), ALL_FINISHED[2:], ("finished", None, None)),
    ("a crash after the end", Facts(exits=exits((1, -11))), ALL_FINISHED, ("finished", None, None)),
    ("finished in spite of a scancel", Facts(slurm_cause="cancelled"), ALL_FINISHED, ("finished", None, None)),
    ("one did not finish", Facts(exits=exits((3, -9))), ALL_FINISHED[:3], ("killed", 3, "n2")),
    # The first by arrival
    ("a kill", Facts(exits=DEAD_1, reported=frozenset()), [failed(0, CLOSED)], ("killed", 1, "n1")),
    ("a kill, and nobody looked at the Ends", Facts(exits=DEAD_1), [failed(0, CLOSED)], ("killed", 1, "n1")),
    (
        "a kill that another rank reported its lost connection to before",
        Facts(exits=DEAD_1, reported=frozenset({0})),
        [failed(0, CLOSED)],
        ("killed", 1, "n1"),
    ),
    (
        "an error, and a kill of the same rank in its teardown",
        Facts(exits=exits((0, -9)), reported=frozenset({0})),
        [failed(0)],
        ("crashed", 0, "n1"),
    ),
    (
        "an exception, then an abort of a rank that missed the first",
        Facts(exits=exits((1, -6), (0, -9)), reported=frozenset({3})),
        [failed(3)],
        ("crashed", 3, "n2"),
    ),
    (
        "an exception whose rank ends last",
        Facts(exits=exits((0, 1), (3, 1)), reported=frozenset({0, 3})),
        [failed(0, CLOSED, seen=[3]), failed(3)],
        ("crashed", 3, "n2"),
    ),
    (
        "a consequence that was seen before its cause, as over NFS",
        Facts(exits=exits((0, 1), (3, 1)), reported=frozenset({0})),
        [failed(0, CLOSED, seen=[3]), failed(3)],
        ("crashed", 3, "n2"),
    ),
    (
        "an exception after another rank had finished",
        Facts(exits=exits((0, 0), (1, 1)), reported=frozenset({1})),
        [end(0), failed(1, seen=[0])],
        ("crashed", 1, "n1"),
    ),
    (
        "a silent exit, and then what others missed",
        Facts(exits=exits((2, 7), (0, 1)), reported=frozenset()),
        [failed(0, CLOSED)],
        ("crashed", 2, "n2"),
    ),
    (
        "an error that would come again, beside another",
        Facts(exits=exits((0, 1), (2, 1)), reported=frozenset({0, 2})),
        [failed(0), failed(2, final=True)],
        ("crashed", 2, "n2"),
    ),
    ("the End of a rank whose exit was acknowledged before", Facts(), [failed(2)], ("crashed", 2, "n2")),
    # Nodes
    ("a node is lost", Facts(lost_nodes=LOST), [], ("node_failure", None, "n2")),
    ("a node is lost first", Facts(lost_nodes=LOST, exits=DEAD_1), [failed(0)], ("node_failure", None, "n2")),
    (
        "a rank is killed, then its node is lost",
        Facts(lost_nodes=[LostNode(node="n2", why="gone", at=1)], exits=DEAD_1),
        [],
        ("killed", 1, "n1"),
    ),
    (
        "a rank had finished before the node was lost",
        Facts(lost_nodes=[LostNode(node="n2", why="gone", at=1)], exits=exits((0, 0), (1, 1))),
        [],
        ("node_failure", None, "n2"),
    ),
    ("Slurm calls it a preemption", Facts(lost_nodes=LOST, slurm_cause="preempted"), [], ("node_failure", None, "n2")),
    ("nothing could be started", Facts(launch_error="srun: error"), [], ("node_failure", None, None)),
    # Slurm's word, and our own doing
    ("preempted", Facts(slurm_cause="preempted", exits=DEAD_1), [failed(0)], ("preempted", None, None)),
    ("the batch script died", Facts(slurm_cause="killed"), [], ("killed", None, None)),
    (
        "cancelled, which nothing revives",
        Facts(slurm_cause="cancelled", lost_nodes=LOST),
        [],
        ("cancelled", None, None),
    ),
    ("our time limit", Facts(stop_reason=("timeout", ""), exits=DEAD_1), [failed(0)], ("timeout", None, None)),
    (
        "a scancel during our stop",
        Facts(stop_reason=("timeout", ""), slurm_cause="cancelled"),
        [],
        ("cancelled", None, None),
    ),
    (
        "the agents' step died",
        Facts(stop_reason=("killed", "all agents"), slurm_cause="timeout"),
        [],
        ("timeout", None, None),
    ),
    ("a hang", Facts(stop_reason=("hang", "no beat"), silent=SILENT, exits=exits((0, -9))), [], ("hang", 3, "n2")),
    (
        "a hang of ranks that wait for one that failed",
        Facts(stop_reason=("hang", "")),
        [failed(3)],
        ("crashed", 3, "n2"),
    ),
    # Stops that nobody explains
    ("a signal to a rank", Facts(exits=exits((0, 75), (1, 75))), ALL_STOPPED, ("unknown", None, None)),
    ("a signal while Slurm is silent", Facts(signalled=True, exits=exits((0, 75))), [], ("unknown", None, None)),
    ("ranks that died of it", Facts(signalled=True, exits=exits((0, -15))), [], ("unknown", None, None)),
    ("a kill of somebody's", Facts(exits=exits((0, -15))), [], ("killed", 0, "n1")),
    ("nothing is known", Facts(), [], ("unknown", None, None)),
    # Disks
    ("an End that did not fit on the disk", Facts(exits=exits((2, 75))), [], ("disk", 2, None)),
    ("an End that did", Facts(exits=exits((2, 75), (0, 1))), [failed(2, disk=True)], ("disk", 2, "n2")),
]


def test_of_a_log_only_the_bytes_of_a_setup_line_count(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("before\n\x1b[31mno module cuda/99\x1b[0m\n\nsee \x1b]0;title\x07 spider\njobkit: after\n")
    begin, end = log.read_text().index("\x1b"), log.read_text().index("jobkit")
    assert last_words(log, begin, end, lines=8) == "no module cuda/99 / see ]0;title spider"
    assert last_words(log, end, end, lines=8) == ""
    assert last_words(log) == "after"


def test_a_setup_line_that_a_signal_of_slurm_ends_is_not_to_blame() -> None:
    assert verdict(Facts(failed_setup=SETUP, slurm_cause="preempted")).cause == "preempted"


@pytest.mark.parametrize(
    ("facts", "ends", "expected"), [row[1:] for row in DIAGNOSES], ids=[row[0] for row in DIAGNOSES]
)
def test_the_first_cause_by_arrival_counts(
    facts: Facts, ends: Sequence[RankReport], expected: tuple[Cause, int | None, str | None]
) -> None:
    cause = verdict(facts, ends)
    assert (cause.cause, cause.rank, cause.node) == expected


COMMANDS: list[tuple[str, Facts, Sequence[RankReport], Cause]] = [
    ("all exit with 0", Facts(exits=exits((0, 0), (1, 0), (2, 0), (3, 0))), [], "finished"),
    (
        "all, one before ctx.finish",
        Facts(exits=exits((0, 0), (1, 0), (2, 0), (3, 0))),
        [failed(0, "JobkitError: no ctx.finish")],
        "crashed",
    ),
    ("all in a step", Facts(exits=exits((0, 0), (1, 0), (2, 0), (3, 0), in_step=True)), [], "crashed"),
    ("after a stop", Facts(exits=exits((0, 0), (1, 0), (2, 0), (3, 0)), stop_reason=("timeout", "")), [], "timeout"),
    ("after Slurm's", Facts(exits=exits((0, 0), (1, 0), (2, 0), (3, 0)), slurm_cause="preempted"), [], "preempted"),
    ("after a signal", Facts(exits=exits((0, 0), (1, 0), (2, 0), (3, 0)), signalled=True), [], "unknown"),
    (
        "a stop after which jobkit.init says that it finished",
        Facts(stop_reason=("timeout", "")),
        ALL_FINISHED,
        "finished",
    ),
    ("a shell that died of the signal", Facts(exits=exits((0, 143)), signalled=True), [], "unknown"),
    ("a program's own 75", Facts(exits=exits((0, 75))), [], "unknown"),
    ("an exit code", Facts(exits=exits((0, 3))), [], "crashed"),
]


@pytest.mark.parametrize(("facts", "ends", "cause"), [row[1:] for row in COMMANDS], ids=[row[0] for row in COMMANDS])
def test_a_command_reports_by_its_exit_code(facts: Facts, ends: Sequence[RankReport], cause: Cause) -> None:
    assert verdict(facts, ends, command=True).cause == cause


def test_the_end_of_a_rank_says_where_and_why() -> None:
    error = failed(3, step=12, samples=[4, 7], traceback="Traceback ...")
    expected = {"rank": 3, "node": "n2", "step": 12, "samples": [4, 7], "traceback": "Traceback ..."}
    diagnosed = verdict(Facts(exits=exits((3, 1))), [error])
    assert {key: getattr(diagnosed, key) for key in expected} == expected
    assert "ValueError: no" in str(diagnosed.error) and not diagnosed.everywhere


@pytest.mark.parametrize(
    ("ends", "everywhere"),
    [
        ([failed(0), failed(1), failed(2), failed(3)], True),
        ([failed(1), failed(2)], True),  # the others were killed before they could say it
        ([failed(0), failed(1)], False),
        ([failed(0), failed(2, "TypeError: other")], False),
        ([failed(0), failed(2, "KeyError: b", signature="KeyError: a")], False),
        ([failed(0, "OSError: a", signature="OSError"), failed(2, "OSError: b", signature="OSError")], True),
        ([failed(0, signature="RuntimeError"), failed(2, CLOSED, signature="RuntimeError", seen=[0])], False),
    ],
)
def test_an_error_of_all_nodes_is_no_nodes_fault(ends: Sequence[RankReport], everywhere: bool) -> None:
    diagnosed = verdict(Facts(exits=exits((ends[0].rank, 1))), ends)
    assert (diagnosed.everywhere, diagnosed.alone) == (everywhere, not everywhere)


def test_on_one_node_an_error_is_everywhere() -> None:
    for nodes in ([], ["n1"]):
        began = AttemptBegan(attempt=2, token="t", job_id="7", ranks=2, nodes=nodes)
        assert diagnose(Facts(exits=exits((0, 1))), Traces(ends=[failed(0)]), began).everywhere


HARDWARE = failed(1, "AcceleratorError: ECC", nature="hardware", step=7)
EVIDENCE: list[tuple[str, Facts, Sequence[RankReport], str | None, str | None, bool]] = [
    ("an exception", Facts(exits=exits((1, 1))), [failed(1)], "ValueError: no", None, True),
    ("a device's own word", Facts(exits=exits((1, 1))), [HARDWARE], "AcceleratorError: ECC", "its device failed", True),
    ("a fault of memory", Facts(exits=exits((1, -7))), [], "SIGBUS of rank 1", "rank 1 died of SIGBUS", True),
    ("on both nodes", Facts(exits=exits((1, -11), (2, -11))), [], "SIGSEGV of rank 1", None, False),
    ("a kill, after which we kill", Facts(exits=exits((1, -9), (2, -9))), [], "SIGKILL of rank 1", "SIGKILL", True),
    ("an abort", Facts(exits=exits((1, -6))), [], None, None, True),
    ("memory", Facts(exits=exits((1, -9), out_of_memory=True)), [], "SIGKILL of rank 1", None, True),
    ("an exit", Facts(exits=exits((1, 7))), [], "exit code 7 of rank 1", None, True),
    ("a hang", Facts(stop_reason=("hang", ""), silent=SILENT), [], "hang", None, True),
    ("a lost node", Facts(lost_nodes=LOST), [], None, "no answer", False),
]


@pytest.mark.parametrize(
    ("facts", "ends", "signature", "evidence", "alone"), [row[1:] for row in EVIDENCE], ids=[row[0] for row in EVIDENCE]
)
def test_what_makes_deaths_alike_and_what_speaks_against_a_node(
    facts: Facts, ends: Sequence[RankReport], signature: str | None, evidence: str | None, alone: bool
) -> None:
    diagnosed = verdict(facts, ends)
    assert (diagnosed.signature, diagnosed.alone) == (signature, alone)
    assert (evidence or "") in (diagnosed.evidence or "") and bool(evidence) == bool(diagnosed.evidence)


def test_a_sick_device_is_the_cause_wherever_a_rank_failed_first() -> None:
    sick = RankExited(
        serial=9, attempt=2, rank=3, code=-9, device="cuda:0 on n2: row remap pending", device_is_sick=True
    )
    diagnosed = verdict(Facts(exits=[*exits((1, 1)), (sick, "n2")]), [failed(1)])
    assert (diagnosed.node, diagnosed.nature, diagnosed.evidence) == ("n2", "hardware", sick.device)
    assert diagnosed.error == "rank 1: ValueError: no; cuda:0 on n2: row remap pending"


def test_what_a_device_says_is_shown_where_it_may_be_the_reason() -> None:
    facts = {"device": "cuda:0 on n1: 2 uncorrected ECC errors", "device_memory": "cuda:0 on n1: process 7 of alice"}
    for end, words in ((failed(1), facts["device"]), (failed(1, out_of_memory="GPU"), facts["device_memory"])):
        diagnosed = verdict(Facts(exits=exits((1, 1), **facts)), [end])
        assert str(diagnosed.error).endswith(f"; {words}") and diagnosed.evidence is None, (
            "errors of another day are none"
        )


def test_a_death_without_an_end_has_the_step_of_its_page() -> None:
    assert verdict(Facts(exits=exits((1, -9), step=7))).step == 7
    assert verdict(Facts(exits=exits((1, 4), step=-1))).step is None


def test_memory_is_for_a_programmer_and_a_program_that_is_not_there_too() -> None:
    assert verdict(Facts(exits=exits((1, 1))), [failed(1, out_of_memory="GPU")]).nature == "program"
    assert verdict(Facts(exits=exits((1, -9), out_of_memory=True))).nature == "program"
    assert [verdict(Facts(exits=exits((0, code))), command=True).final for code in (1, 126, 127)] == [False, True, True]
    assert not verdict(Facts(exits=exits((0, 127)))).final


@pytest.mark.parametrize(
    ("facts", "ends", "cause", "words"),
    [
        (Facts(exits=exits((1, -9))), [], "killed", "3.00 GiB"),
        (Facts(exits=exits((1, -9), out_of_memory=True)), [], "out_of_memory", "3.00 GiB"),
        (Facts(exits=exits((1, 1))), [failed(1, out_of_memory="GPU", peak_bytes=GIB)], "out_of_memory", "1.00 GiB"),
        (Facts(exits=exits((1, -11))), [], "killed", "SIGSEGV"),
    ],
)
def test_the_memory_that_was_used_is_named_where_it_may_be_the_reason(
    facts: Facts, ends: Sequence[RankReport], cause: Cause, words: str
) -> None:
    diagnosed = verdict(facts, ends, peak_bytes=3 * GIB)
    assert diagnosed.cause == cause and words in str(diagnosed.error)


def test_a_silent_exit_shows_what_the_rank_printed_and_a_full_disk_explains_it() -> None:
    facts = Facts(exits=exits((1, 7)))
    assert "the last words" in str(verdict(facts, said=lambda rank: "the last words").error)
    assert verdict(facts, disk_is_full=lambda: True).cause == "disk"


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [(0, None, False), (75, None, False), (1, None, True), (-9, None, True), (-11, "finished", False)]
    + [(75, "failed", True), (1, "stopped", False)],
)
def test_a_rank_fails_by_its_end_else_by_its_code(code: int, kind: Any, expected: bool) -> None:
    ((exited, _),) = exits((1, code))
    assert is_failure(exited, [end(1, kind)] if kind else []) is expected


def test_the_last_words_are_few(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.err"
    assert last_words(log) == ""
    log.write_text("warning\n" * 5000 + "Traceback\n\n  of\xff\nthe\n end \n")
    assert last_words(log) == "end"
    log.write_text("\x1b[91mFATAL:   could not open image\n\x1b[0m")
    assert last_words(log) == "FATAL:   could not open image", "apptainer's words have colours in a file, too"
    log.write_text("x" * 100_000)
    assert len(last_words(log)) <= 2000, "it stands in the journal"


def test_a_hang_names_its_step() -> None:
    assert verdict(Facts(stop_reason=("hang", ""), silent=SILENT)).step == 7
