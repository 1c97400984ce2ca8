"""A `command:` that knows nothing of jobkit: what it was told decides how its end is read, and not its silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.project import Project, causes, describe, is_over, status, wait_for
from slurm_cluster import Cluster

from jobkit.run.rundir import RunDir

SCRIPT = """\
trap 'exit 0' TERM USR2
echo ready >>"$JOBKIT_RUN/ready"
[ -e "$JOBKIT_RUN/done" ] || while :; do sleep 0.1; done
"""


@pytest.fixture
def project(tmp_path: Path, slurm: Cluster) -> Project:
    return made(tmp_path, slurm, SCRIPT)


def made(folder: Path, cluster: Cluster, script: str) -> Project:
    project = Project(folder, cluster.env)
    (project.path / "train.sh").write_text(script)
    (project.path / "toy.yaml").write_text(
        "name: toy\ncommand: [bash, train.sh]\n"
        'resources: {nodes: 1, tasks_per_node: 1, time: "0:01:00"}\nclusters: {slurm: {partition: low}}\n'
    )
    return project


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


def test_a_preemption_is_told_by_sigterm_where_slurm_sends_others_a_user_signal(
    tmp_path: Path, short_dir: Path
) -> None:
    with Cluster(short_dir, nodes=1, cred_expire=5, user_signal=True) as cluster:
        project = made(tmp_path, cluster, SCRIPT.replace("TERM USR2", "TERM"))
        project.submit("--cluster", "slurm")
        (run,) = project.runs
        cluster.preempt(reach(run, 1))
        (run / "done").touch()
        wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["preempted", "finished"], describe(run)
    assert "User defined signal" not in (run / "logs" / "1" / "rank_0.err").read_text()


IN_TURN = """\
[ ! -e "$JOBKIT_RUN/survived" ] || exit 0
trap 'touch "$JOBKIT_RUN/told"; until [ -e "$JOBKIT_RUN/survived" ]; do sleep 0.1; done; exit 0' USR2
if [ "$RANK" = 1 ]; then
    trap - USR2
    until [ -e "$JOBKIT_RUN/told" ]; do sleep 0.1; done
    exec touch "$JOBKIT_RUN/survived"
fi
while :; do sleep 0.1; done
"""


def test_the_notice_comes_as_early_as_the_cluster_says_and_does_not_end_what_does_not_catch_it(
    project: Project,
) -> None:
    (project.path / "train.sh").write_text(IN_TURN)
    entry = ("resources.time=5min", "resources.tasks_per_node=2", "clusters.slurm.signal_delay_s=292")
    project.submit("--cluster", "slurm", *entry)
    (run,) = project.runs
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["timeout", "finished"], describe(run)
    assert status(run)["attempts"][1]["began"] == "requeued"  # in place it would have had no time


def test_a_shell_that_fails_because_its_program_was_told_to_stop_is_not_held_against_its_node(
    project: Project, slurm: Cluster
) -> None:
    trap_and_fail = SCRIPT.replace("trap 'exit 0' TERM USR2", "trap : USR2").replace("sleep 0.1", "sleep 9 || exit 1")
    (project.path / "train.sh").write_text(trap_and_fail)
    project.submit("--cluster", "slurm")
    (run,) = project.runs
    slurm.command("scancel", "--signal=USR2", reach(run, 1))
    (run / "done").touch()
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["timeout", "finished"], describe(run)


def test_exit_code_75_of_a_rank_that_was_told_nothing_is_its_failure(project: Project) -> None:
    (project.path / "train.sh").write_text('[ "$RANK" = 0 ] || exit 75\nwhile :; do sleep 0.1; done\n')
    project.submit("--cluster", "slurm", "resources.tasks_per_node=2", "retry.crash=1")
    (run,) = project.runs
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["crashed"], describe(run)
    assert "rank 1 ended with exit code 75" in status(run)["error"]


NO_LOOP = """\
import os, time
import jobkit

ctx = jobkit.init()
with open(ctx.run_dir / "ready", "a") as file:
    file.write("ready\\n")
while not (ctx.run_dir / "done").exists():
    time.sleep(0.1)
"""


def test_a_script_whose_loop_never_begins_ends_when_it_is_preempted_and_says_what_it_lacks(
    project: Project, slurm: Cluster
) -> None:
    (project.path / "train.py").write_text(NO_LOOP)
    project.submit("--cluster", "slurm", "command=[python, train.py]")
    (run,) = project.runs
    slurm.preempt(reach(run, 1))
    reach(run, 2)
    assert "SIGTERM came, and no loop of jobkit's has begun" in (run / "logs" / "1" / "rank_0.out").read_text()
    (run / "done").touch()
    wait_for("the end", lambda: is_over(run), run)
    assert causes(run) == ["preempted", "finished"], describe(run)
    assert "ended without ctx.finish(result)" in (run / "logs" / "2" / "rank_0.out").read_text()


def test_what_is_said_of_a_command_on_slurm_names_no_step_and_no_checkpoint_of_jobkits(
    project: Project, slurm: Cluster
) -> None:
    project.submit("--cluster", "slurm")
    (run,) = project.runs
    slurm.preempt(reach(run, 1))
    reach(run, 2)
    seen = project.jobkit("status", run.name).stdout
    cancelled = project.jobkit("cancel", run.name)
    assert "your program got SIGTERM and has" in cancelled.stderr
    assert "cancelled; jobkit has no checkpoint of it\nto start it again: " in cancelled.stdout
    seen += cancelled.stdout + project.jobkit("status", run.name).stdout
    assert causes(run) == ["preempted", "cancelled"], describe(run)
    assert not [words for words in ("step", "goodput", "start-up", "newest checkpoint") if words in seen], seen
    said = RunDir(run).job_log(str(status(run)["job_id"])).read_text()
    assert "preempted: your program was told to stop; jobkit has no checkpoint of it" in said
