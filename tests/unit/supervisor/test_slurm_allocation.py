"""A Slurm job as an allocation, with a stand-in for srun: it starts one agent at a time, and none on the node `bad`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.journals import make_run, submitted
from harness.runs import wait_until

from jobkit.config.schema import Config
from jobkit.slurm import nodes
from jobkit.supervisor.allocation import LaunchFailure, SchedulerReport
from jobkit.supervisor.lease import NotRunnable, ThisJob
from jobkit.supervisor.placement import Placement
from jobkit.supervisor.slurm_allocation import SlurmAllocation, this_job

SRUN = """\
#!/bin/sh
for word; do case $word in --nodelist=*) echo "${word#--nodelist=}" >>"$(dirname "$0")/calls";; esac; done
case "$*" in *--nodelist=*,*|*--nodelist=bad*) echo "srun: error: no step" >&2; exit 1;; esac
exec sleep 600
"""


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmAllocation]:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1,bad,node3")
    monkeypatch.setattr(nodes, "expand", lambda text: text.split(","))
    run = make_run(tmp_path / "runs", "toy-11f5f19c", submitted("slurm"))
    made = SlurmAllocation(run, ThisJob(job_id="7", token="t"), Config(name="toy", task="m:f"))
    yield made
    for step in made._steps:
        step.srun.kill()


def test_each_node_has_an_srun_of_its_own_and_the_bad_one_is_found(allocation: SlurmAllocation, tmp_path: Path) -> None:
    names, ready = allocation.nodes(), {"node1", "node3"}
    calls = tmp_path / "calls"
    calls.touch()
    allocation.start_agents(names, 1)

    def failure_of(missing: set[str]) -> LaunchFailure | None:
        return allocation.launch_failure(missing, SchedulerReport(asked_at=time.monotonic()))

    found = wait_until(lambda: failure_of(set(names)) or len(calls.read_text().split()) == 4, "an srun for each")
    assert found is True, found
    failure = wait_until(lambda: failure_of(set(names) - ready), "the end of the last srun")
    assert calls.read_text().split()[0] == ",".join(names)
    assert sorted(calls.read_text().split()[1:]) == sorted(names)
    assert (failure.nodes, failure.final) == ({"bad"}, False)
    assert "no step" in failure.words


def test_an_attempt_begins_in_place_where_time_is_left(allocation: SlurmAllocation) -> None:
    placement = Placement(allocation.nodes(), (), (), count=lambda usable: usable)
    for seconds, is_enough in ((500.0, True), (100.0, False)):
        look = SchedulerReport(asked_at=0.0, ends=time.monotonic() + seconds, margin=90.0)
        room = allocation.restart_options(None, look, placement)  # type: ignore[arg-type]
        assert room.in_place(frozenset()) == is_enough


@pytest.mark.parametrize(
    ("silent", "others", "blamed"),
    [
        ({"node1"}, {"node3"}, {"node1"}),
        ({"node1"}, set(), {"node1"}),  # a job of one node
        ({"node1", "node3"}, set(), set()),  # where all hang it is no node
    ],
)
def test_a_node_whose_agent_is_given_up_is_to_blame(
    allocation: SlurmAllocation, silent: set[str], others: set[str], blamed: set[str]
) -> None:
    for node in sorted(others):
        allocation.start_agents([node], 1)
    for node in silent:
        allocation.give_up(node, "silent")
        allocation.lost(node)
    allocation.start_agents(sorted(silent), 1)  # none: each has failed
    failure = allocation.launch_failure(silent, SchedulerReport(asked_at=time.monotonic()))
    assert failure is not None
    assert (failure.nodes, failure.final, len(allocation._steps)) == (blamed, False, len(others))
    assert "silent" in failure.words


def test_a_supervisor_that_cannot_ask_slurm_ends_with_a_line(
    allocation: SlurmAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(NotRunnable, match="scontrol is not on PATH") as ended:
        this_job(allocation.run)
    assert ended.value.exit_code == 1  # job.sh tries three times, and leaves the node
