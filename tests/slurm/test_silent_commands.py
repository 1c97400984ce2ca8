"""A `command:` that knows nothing of jobkit: what it was told decides how its end is read, and not its silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.project import Project, causes, describe, is_over, status, wait_for
from slurm_cluster import Cluster

SCRIPT = """\
trap 'exit 0' TERM USR2
echo ready >>"$JOBKIT_RUN/ready"
[ -e "$JOBKIT_RUN/done" ] || while :; do sleep 0.1; done
"""


@pytest.fixture
def project(tmp_path: Path, slurm: Cluster) -> Project:
    made = Project(tmp_path, slurm.env)
    (made.path / "train.sh").write_text(SCRIPT)
    (made.path / "toy.yaml").write_text(
        "name: toy\ncommand: [bash, train.sh]\n"
        'resources: {nodes: 1, tasks_per_node: 1, time: "0:01:00"}\nclusters: {slurm: {partition: low}}\n'
    )
    return made


def reach(run: Path, attempt: int) -> str:
    """Wait until the script of an attempt can be told something; the id of its job."""
    file = run / "ready"

    def reached() -> bool:
        assert not is_over(run), describe(run)
        return file.exists() and len(file.read_text().split()) == attempt

    wait_for(f"attempt {attempt}", reached, run)
    return str(status(run)["job_id"])


def test_a_command_that_ends_well_when_it_is_told_to_stop_has_not_finished(project: Project, slurm: Cluster) -> None:
    project.submit("--cluster", "slurm")
    (run,) = project.runs
    slurm.command("scancel", "--signal=USR2", reach(run, 1))  # as at the time limit, which Slurm may be a minute early
    slurm.preempt(reach(run, 2))
    reach(run, 3)
    (run / "done").touch()
    project.jobkit("preempt", run.name)
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["timeout", "preempted", "preempted", "finished"], describe(run)
