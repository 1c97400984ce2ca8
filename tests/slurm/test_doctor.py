"""jobkit doctor says whether a run would work here, and measures the network with one."""

from __future__ import annotations

import io
import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.imports import HEAVY, imported_by
from harness.project import Project, queue, status, wait_for
from rich.console import Console
from slurm_cluster import Cluster

from jobkit.cli.doctor import tables, verdict
from jobkit.run.rundir import RunDir
from jobkit.run.status import Status
from jobkit.submission import checks
from jobkit.submission.checks import OK, PROBLEM, WARNING, check_runs_dir, check_slurm
from jobkit.worker.network_probe import bus_bandwidth, by_node, node_rounds, slow_nodes

QUICK = "params.sizes=[1024,65536]"


def doctor(project: Project, *arguments: str, expect: int = 0) -> dict[str, Any]:
    found = json.loads(project.jobkit("doctor", "--json", *arguments, expect=expect).stdout)
    assert found["ok"] == (expect == 0)
    return dict(found)


def states(found: Mapping[str, Any]) -> dict[str, str]:
    return {check["name"]: check["state"] for check in found["checks"]}


def test_doctor_measures_the_ranks_of_this_machine_and_leaves_nothing_behind(tmp_path: Path) -> None:
    project = Project(tmp_path)
    found = doctor(project, "--local", QUICK)
    assert states(found) == {"python": OK, "torch": OK, "submitit": OK, "runs": OK, "network": OK}
    probe = found["probe"]
    assert (probe["ranks"], probe["backend"], probe["device"], probe["slow"]) == (2, "gloo", "cpu", [])
    assert [row["bytes"] for row in probe["world"]] == [1024, 65536]
    for row in probe["world"]:
        assert row["seconds"] > 0 and row["bus"] == pytest.approx(row["bytes"] / row["seconds"])  # 2 (n-1)/n is 1
    assert project.runs == []


def test_doctor_measures_two_nodes_of_a_slurm(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    printed = project.jobkit("doctor", QUICK).stdout
    for words in ("Slurm", "low is UP: 4 node(s)", "JobRequeue=1", "PreemptMode=REQUEUE, GraceTime=20, KillWait=10"):
        assert words in printed
    assert "all-reduce of 2 ranks on 2 node(s)" in printed and "1 KiB" in printed
    assert project.runs == [] and queue(slurm, project) == []


def test_ctrl_c_cancels_a_probe_that_waits_in_the_queue(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    process = project.start("doctor", "clusters.slurm.hold=true")
    wait_for("a queued job", lambda: project.runs and status(project.runs[0]).get("job_id"))
    (run,) = project.runs
    job = status(run)["job_id"]
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "cancelling" in printed
    assert slurm.job(job)["JobState"] == "CANCELLED" and project.runs == []


def test_a_node_with_a_slow_network_is_named(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.path / "mytask.py").write_text(
        "import os, time\n"
        "import torch.distributed as dist\n"
        "from jobkit.worker.network_probe import probe\n"
        "def train(ctx):\n"
        "    real, seconds = dist.all_reduce, 0.5 if os.environ['GROUP_RANK'] == '2' else 0.1\n"
        "    def slowly(*args, **kwargs):  # long enough for a busy machine not to matter\n"
        "        time.sleep(seconds)\n"
        "        return real(*args, **kwargs)\n"
        "    dist.all_reduce = slowly\n"
        "    return probe(ctx)\n"
    )
    project.submit("--local", "resources.nodes=4", "resources.tasks_per_node=1", "params={sizes: [1024]}")
    (run,) = project.runs
    result = status(run)["result"]
    (slow,) = result["slow"]
    assert slow.endswith("#2")
    assert [row["node"] for row in result["nodes"]] == [f"{slow[:-1]}{node}" for node in range(4)]
    assert all(row["inside"] is None and row["between"] > 0 for row in result["nodes"])


def test_a_probe_that_fails_is_a_problem_and_its_run_stays(tmp_path: Path) -> None:
    project = Project(tmp_path)
    found = doctor(project, "--local", "params.sizes=[many]", expect=1)
    assert states(found)["network"] == PROBLEM and found["probe"] is None
    (run,) = project.runs
    (check,) = [check for check in found["checks"] if check["name"] == "network"]
    assert "ValueError" in check["found"] and run.name in check["advice"]


def test_one_rank_has_nobody_to_talk_to(tmp_path: Path) -> None:
    project = Project(tmp_path)
    alone = ("doctor", "--local", "--tasks-per-node", "1")
    assert "--tasks-per-node 2" in project.jobkit(*alone, expect=2).stderr
    project.jobkit(*alone, "--no-probe")


def test_a_cluster_that_is_not_there_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    project = Project(tmp_path)
    assert "did you mean 'slurm'" in project.jobkit("doctor", "--cluster", "slrum", expect=2).stderr


def test_the_checks_alone_import_nothing_heavy(tmp_path: Path) -> None:
    assert imported_by(Project(tmp_path), "doctor", "--local", "--no-probe") == {name: set() for name in HEAVY}


# The checks


def test_a_runs_directory_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = check_runs_dir(tmp_path / "file" / "runs")
    assert check.state == PROBLEM and "not writable" in check.found and "--runs-dir" in check.advice


def test_a_runs_directory_that_is_nearly_full_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LITTLE_SPACE", 1 << 60)
    assert check_runs_dir(tmp_path).state == WARNING
    assert list(tmp_path.iterdir()) == []


def slurm_states(slurm: Cluster, monkeypatch: pytest.MonkeyPatch, partition: str | None, nodes: int) -> dict[str, str]:
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    return {check.name: check.state for check in check_slurm(partition, nodes)}


def test_what_slurm_offers(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"slurm": OK, "partition": OK, "requeue": OK, "preemption": OK}
    assert slurm_states(slurm, monkeypatch, None, 2) == good
    assert slurm_states(slurm, monkeypatch, "high", 4) == good
    assert slurm_states(slurm, monkeypatch, "low", 5) == good | {"partition": PROBLEM}
    assert slurm_states(slurm, monkeypatch, "lowe", 1) == {"slurm": OK, "partition": PROBLEM}
    (wrong,) = [check for check in check_slurm("lowe", 1) if check.state == PROBLEM]
    assert "did you mean 'low'?" in wrong.found and "clusters.<name>.partition" in wrong.advice


def test_preemption_that_leaves_no_time_for_a_checkpoint_is_a_warning(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(short_dir, nodes=1, grace=0, kill_wait=3, requeue=False) as cluster:
        found = slurm_states(cluster, monkeypatch, None, 1)
        assert found == {"slurm": OK, "partition": OK, "requeue": OK, "preemption": WARNING}


def test_a_slurm_that_is_not_set_up_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm.conf").write_text("nonsense\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (check,) = check_slurm(None, 1)
    assert (check.name, check.state) == ("slurm", PROBLEM) and "--local" in check.advice


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
    check = verdict(RunDir("run"), Status(state="finished", result=probe), nodes=3)
    assert check.state == state and all(name in check.found and name in check.advice for name in slow)


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
