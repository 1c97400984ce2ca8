"""What `jobkit doctor` refuses, checks without a Slurm, prints, and computes from what its probe has measured."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from harness.in_process import jobkit
from harness.project import Project
from rich.console import Console

from jobkit.cli.doctor import disk_verdict, names_verdict, tables, verdict
from jobkit.run.rundir import RunDir
from jobkit.run.status import State, Status
from jobkit.submission import checks
from jobkit.submission.checks import OK, PROBLEM, WARNING, check_runs_dir
from jobkit.worker.network_probe import bus_bandwidth, by_node, node_rounds, slow_nodes


def test_one_rank_has_nobody_to_talk_to(tmp_path: Path) -> None:
    project = Project(tmp_path)
    alone = ("doctor", "--local", "--tasks-per-node", "1")
    assert "--tasks-per-node 2" in jobkit(project, *alone, expect=2).stderr
    jobkit(project, *alone, "--no-probe")


def test_a_cluster_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert "did you mean 'slurm'" in jobkit(project, "doctor", "--cluster", "slrum", expect=2).stderr


def test_a_runs_directory_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = check_runs_dir(tmp_path / "file" / "runs")
    assert check.state == PROBLEM and "not writable" in check.found and "--runs-dir" in check.advice


def test_a_runs_directory_that_is_nearly_full_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LITTLE_SPACE", 1 << 60)
    assert check_runs_dir(tmp_path).state == WARNING
    assert list(tmp_path.iterdir()) == []


# What is printed

WORLD = [{"bytes": 1024, "seconds": 2e-4, "bus": 5e6}, {"bytes": 64 << 20, "seconds": 0.05, "bus": 1.3e9}]
ABOUT = {"device": "cpu", "backend": "gloo", "ranks": 4, "world": WORLD}
EVEN = [{"node": f"node{number}", "inside": 3e9, "between": 1e9} for number in (1, 2, 3)]
UNEVEN = [*EVEN[:2], {"node": "node3", "inside": 3e9, "between": 2e8}]
UNKNOWN = [{"node": "node1", "inside": None, "between": None}]


@pytest.mark.parametrize(
    ("nodes", "slow", "state", "rows"),
    [
        (EVEN, [], OK, ["node1 3 GB/s 1 GB/s", "node2 3 GB/s 1 GB/s", "node3 3 GB/s 1 GB/s"]),
        (UNEVEN, ["node3"], WARNING, ["node1 3 GB/s 1 GB/s", "node2 3 GB/s 1 GB/s", "node3 3 GB/s 200 MB/s slow"]),
        (UNKNOWN, [], OK, []),
    ],
)
def test_the_tables_name_a_slow_node(nodes: Any, slow: list[str], state: str, rows: list[str]) -> None:
    probe = {**ABOUT, "nodes": nodes, "slow": slow}
    console = Console(record=True, width=100, file=io.StringIO())
    for table in tables(probe):
        console.print(table)
    printed = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert {"1 KiB 200 us 5 MB/s", "64 MiB 50 ms 1.3 GB/s"} <= set(printed)
    assert [line for line in printed if re.match(r"node\d", line)] == rows
    check = verdict(RunDir("run"), Status(state=State.FINISHED, result=probe), nodes=3)
    assert check.state == state and all(name in check.found and name in check.advice for name in slow)


DISK = {"between": ["node1", "node2"], "problems": {}, "seen_after": 0.01, "lost_lines": 0}


@pytest.mark.parametrize(
    ("changed", "state", "words"),
    [
        ({}, OK, "between node1 and node2: locks work"),
        ({"between": ["here", "here"]}, OK, "two processes of here (other nodes were not tried)"),
        ({"between": ["here#0", "here#1"]}, OK, "two processes of here (other nodes were not tried)"),
        ({"problems": {"lock": "it did not keep node2 out"}}, PROBLEM, "lock: it did not keep node2 out"),
        ({"lost_lines": 3}, WARNING, "3 lines were lost"),
        ({"seen_after": 31.0}, WARNING, "seen after 31 s"),
    ],
)
def test_what_two_nodes_found_of_the_disk_is_a_check_of_its_own(changed: Any, state: str, words: str) -> None:
    check = disk_verdict(DISK | changed)
    assert (check.name, check.state) == ("shared disk", state) and words in check.found
    assert bool(check.advice) == (state != OK)


# The probe's arithmetic


@pytest.mark.parametrize(
    ("nodes", "rounds"),
    [
        ([[0, 1]], []),  # the world is the node
        ([[0], [1]], []),  # the world is the pair
        ([[0, 1], [2, 3]], [[[0, 1], [2, 3]]]),
        ([[0], [1], [2]], [[[0, 1]], [[1, 2]], [[2, 0]]]),
        ([[0], [1], [2], [3]], [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]),
        ([[0, 2], [1, 3], [4, 5]], [[[0, 2], [1, 3], [4, 5]], [[0, 2, 1, 3]], [[1, 3, 4, 5]], [[4, 5, 0, 2]]]),
    ],
)
def test_each_node_is_measured_alone_and_with_its_neighbours(nodes: Any, rounds: Any) -> None:
    assert node_rounds(nodes) == rounds


@pytest.mark.parametrize("count", range(3, 20))
def test_the_groups_of_a_round_have_no_rank_in_common_and_no_pair_is_left_out(count: int) -> None:
    rounds = node_rounds([[node] for node in range(count)])
    for groups in rounds:
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks))
    pairs = sorted(sorted(group) for groups in rounds for group in groups)
    assert pairs == sorted(sorted((node, (node + 1) % count)) for node in range(count))
    assert len(rounds) == 2 + count % 2


def test_bus_bandwidth_is_as_nccl_tests_define_it() -> None:
    assert bus_bandwidth(1000, 0.5, 2) == 2000.0
    assert bus_bandwidth(1000, 0.5, 8) == 3500.0


def test_a_node_is_as_fast_as_with_the_better_of_its_neighbours() -> None:
    nodes = {"a": [0], "b": [1], "c": [2], "d": [3]}
    groups = node_rounds(list(nodes.values()))
    seconds = [[5.0, 1.0], [5.0, 1.0]]  # a-b, c-d; b-c, d-a: b is slow
    rows = by_node(nodes, [(100, one) for one in groups], seconds)
    assert [row["between"] for row in rows] == [100.0, 20.0, 100.0, 100.0]
    assert slow_nodes(rows) == ["b"]


@pytest.mark.parametrize(
    ("inside", "between", "slow"),
    [
        ([10.0, 9.0, 11.0, 10.0], [1.0] * 4, []),
        ([10.0, 6.0, 11.0, 10.0], [1.0] * 4, ["n1"]),
        ([10.0] * 4, [1.0, 1.0, 1.0, 0.5], ["n3"]),
        ([10.0, 6.0], [None, None], ["n1"]),
        ([10.0, 7.0], [None, None], []),
        ([None, None], [None, None], []),
    ],
)
def test_which_node_is_slow(inside: list[float | None], between: list[float | None], slow: list[str]) -> None:
    pairs = zip(inside, between, strict=True)
    assert slow_nodes([{"node": f"n{i}", "inside": one, "between": two} for i, (one, two) in enumerate(pairs)]) == slow


def test_a_name_service_that_keeps_ranks_waiting_is_a_warning() -> None:
    assert names_verdict({"address": "10.0.0.3", "seconds": 0.2}) == []
    (check,) = names_verdict({"address": "10.0.0.3", "seconds": 5.004})
    assert (check.name, check.state) == ("names", WARNING)
    assert check.found == "the name service takes 5.0 s for 10.0.0.3, the address of a node"
    # As a plain 10.0.0.3 glibc's /etc/hosts does not answer it.
    assert check.advice.endswith("in the form in which it asks: `::ffff:10.0.0.3 NAME`")
