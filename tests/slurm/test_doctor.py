"""jobkit doctor says whether a run would work here, and measures the network with one."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.imports import HEAVY, heavy_in, imported_by
from harness.project import Project, queue, status, wait_for
from slurm_cluster import Cluster

from jobkit.submission.checks import OK, PROBLEM, WARNING, check_slurm

QUICK = "+params.sizes=[1024,65536]"


def doctor(project: Project, *arguments: str, expect: int = 0) -> dict[str, Any]:
    found = json.loads(project.jobkit("doctor", "--json", *arguments, expect=expect).stdout)
    assert found["ok"] == (expect == 0)
    return dict(found)


def states(found: Mapping[str, Any]) -> dict[str, str]:
    return {check["name"]: check["state"] for check in found["checks"]}


def test_doctor_measures_the_ranks_of_this_machine_and_leaves_nothing_behind(tmp_path: Path) -> None:
    project = Project(tmp_path)
    found = doctor(project, "--local", QUICK)
    found["checks"] = [one for one in found["checks"] if one["name"] != "names"]  # for this machine's to answer
    assert states(found) == {"python": OK, "torch": OK, "submitit": OK, "runs": OK, "network": OK, "shared disk": OK}
    probe = found["probe"]
    assert (probe["ranks"], probe["backend"], probe["device"], probe["slow"]) == (2, "gloo", "cpu", [])
    assert [row["bytes"] for row in probe["world"]] == [1024, 65536]
    for row in probe["world"]:
        assert row["seconds"] > 0 and row["bus"] == pytest.approx(row["bytes"] / row["seconds"])  # 2 (n-1)/n is 1
    assert probe["names"]["address"] == "127.0.0.1" and probe["names"]["seconds"] > 0
    assert project.runs == []


def test_doctor_measures_two_nodes_of_a_slurm(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    printed = project.jobkit("doctor", QUICK).stdout
    for words in ("Slurm", "low is UP: 4 node(s)", "JobRequeue=1", "PreemptMode=REQUEUE, GraceTime=20, KillWait=10"):
        assert words in printed
    assert "all-reduce of 2 ranks on 2 node(s)" in printed and "1 KiB" in printed
    assert re.search(r"between node\d and node\d: locks work, .* appends lose no line", printed)
    assert project.runs == [] and queue(slurm, project) == []


def test_ctrl_c_cancels_a_probe_that_waits_in_the_queue(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    process = project.start("doctor", "clusters.slurm.hold=true")
    wait_for("a queued job", lambda: project.runs and status(project.runs[0]).get("job_id"))
    (run,) = project.runs
    job = status(run)["job_id"]
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=600)
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
    project.submit("--local", "resources.nodes=4", "resources.tasks_per_node=1", "+params={sizes: [1024]}")
    (run,) = project.runs
    result = status(run)["result"]
    (slow,) = result["slow"]
    assert slow.endswith("#2")
    assert [row["node"] for row in result["nodes"]] == [f"{slow[:-1]}{node}" for node in range(4)]
    assert all(row["inside"] is None and row["between"] > 0 for row in result["nodes"])


def test_a_probe_that_fails_is_a_problem_and_its_run_stays(tmp_path: Path) -> None:
    project = Project(tmp_path)
    found = doctor(project, "--local", "+params.sizes=[many]", expect=1)
    assert states(found)["network"] == PROBLEM and found["probe"] is None
    (run,) = project.runs
    (check,) = [check for check in found["checks"] if check["name"] == "network"]
    assert "ValueError" in check["found"] and run.name in check["advice"]


def test_the_checks_alone_import_nothing_heavy(tmp_path: Path) -> None:
    modules = imported_by(Project(tmp_path), "doctor", "--local", "--no-probe")
    assert heavy_in(modules) == {name: set() for name in HEAVY}


# The checks


def slurm_states(slurm: Cluster, monkeypatch: pytest.MonkeyPatch, partition: str | None, nodes: int) -> dict[str, str]:
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    return {check.name: check.state for check in check_slurm(partition, nodes)}


def test_what_slurm_offers(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"slurm": OK, "partition": OK, "requeue": OK, "preemption": OK}
    assert slurm_states(slurm, monkeypatch, None, 2) == good
    assert slurm_states(slurm, monkeypatch, "high", 4) == good
    assert slurm_states(slurm, monkeypatch, "low", 5) == good | {"partition": PROBLEM}
    assert slurm_states(slurm, monkeypatch, "lowe", 1) == {"slurm": OK, "partition": PROBLEM}
    assert slurm_states(slurm, monkeypatch, "low,high", 2) == good
    both = [check.found.split()[0] for check in check_slurm("low,high", 2) if check.name in ("partition", "preemption")]
    assert both == ["low", "high", "low:", "high:"]
    assert PROBLEM in {check.state for check in check_slurm("low,hihg", 2)}
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
