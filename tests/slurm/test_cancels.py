"""A cancel under a real Slurm: final for the run that was meant, in the time that a save takes, and for no other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import in_process
from harness.project import Project, names, queue, status, step, wait_for
from harness.quick_slurm import NO_ANSWER, QUICK
from slurm_cluster import Cluster, wait_until

from jobkit import slurm as slurm_commands
from jobkit.run.events import Event
from jobkit.run.rundir import RunDir
from jobkit.submission import cancel

ON_ONE_NODE = ("resources.nodes=1", "resources.tasks_per_node=1")
LONG = (*ON_ONE_NODE, "params.steps=4000", "params.sleep=0.05")
HELD = (*ON_ONE_NODE, "clusters.slurm.hold=true")


def test_a_cancel_leaves_a_save_the_time_it_takes(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    task = project.path / "mytask.py"
    task.write_text(
        "import time\n\nimport torch\n\n\n"
        "class Slow:\n"
        "    def __init__(self, logs):\n"
        "        self.logs = logs\n\n"
        "    def state_dict(self):\n"
        "        is_told = any(self.logs.glob('*/notice.json'))\n"
        "        time.sleep(12 if is_told else 0)  # longer than this cluster's KillWait\n"
        "        return {}\n\n"
        "    def load_state_dict(self, state):\n"
        "        pass\n\n\n"
        "def train(ctx):\n"
        "    model = ctx.parallelize(torch.nn.Linear(2, 2))\n"
        "    ctx.track(model=model, slow=Slow(ctx.run_dir / 'logs'))\n"
        "    for step in ctx.steps(100000):\n"
        "        time.sleep(0.05)\n"
    )
    project.submit("--cluster", "slurm", *ON_ONE_NODE, "checkpoint.every=100000", "checkpoint.memory=off")
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 20, run)
    done = project.jobkit("cancel", run.name)
    assert "get 0:10:00 to write a checkpoint" in done.stderr
    last = status(run)
    assert (last["state"], last["checkpoint"]) == ("cancelled", last["step"])
    assert last["step"] >= 20
    wait_for("an empty queue", lambda: not queue(slurm, project), run)


def test_a_cancel_leaves_the_job_of_whoever_has_continued_the_run_since(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *LONG)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 20, run)
    monkeypatch.setattr(os, "environ", project.env)
    continued = []

    def another_command() -> None:
        wait_for("its end", lambda: status(run)["state"] == "cancelled", run)
        continued.append(project.submit("--cluster", "slurm", *LONG).stdout)

    seen = cancel.cancel(RunDir(run), on_wait=another_command)
    assert seen is not None and continued
    assert (seen.cancel_requested, status(run)["state"] in ("queued", "running")) == (False, True)
    assert len(queue(slurm, project)) == 1
    project.jobkit("cancel", run.name, "--no-grace")


def test_a_cancel_ends_no_job_of_another_run(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *HELD)
    (run,) = project.runs
    project.submit("--cluster", "slurm", *HELD, "+params.lr=2")
    (second,) = set(project.runs) - {run}
    mine, others = status(run)["job_id"], status(second)["job_id"]
    slurm.command("scancel", mine)
    journal = run / "events.jsonl"  # as if Slurm had begun to count anew
    journal.write_text(journal.read_text().replace(f'"job_id": "{mine}"', f'"job_id": "{others}"'))
    RunDir(run).write_status()
    project.jobkit("cancel", run.name)
    assert status(run)["state"] == "interrupted" and "(lost)" in status(run)["error"]
    assert slurm.command("squeue", "-h", "-o%i").split() == [others]
    project.jobkit("cancel", second.name)


def test_a_run_that_trains_is_cancelled_while_the_controller_is_away(tmp_path: Path, short_dir: Path) -> None:
    with Cluster(short_dir, nodes=1, **QUICK, **NO_ANSWER) as cluster:
        project = Project(tmp_path, cluster.env)
        project.submit("--cluster", "slurm", *LONG)
        (run,) = project.runs
        wait_for("some steps", lambda: step(run) >= 5, run)
        cluster.stop_controller()
        done = project.jobkit("cancel", run.name)
        assert "cancelled at step" in done.stdout and "through its directory" in done.stderr
        assert status(run)["checkpoint"] == status(run)["step"]
        cluster.start_controller()
        wait_for("an empty queue", lambda: not queue(cluster, project), run)


def test_a_cancel_that_was_cut_off_is_carried_out_by_the_next_submission(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *HELD)
    (run,) = project.runs
    first = status(run)["job_id"]
    RunDir(run).record(Event.CANCEL_REQUESTED, grace=600.0)  # and Slurm gave no answer
    assert "cancelling: its job ends when it starts" in project.jobkit("status", run.name).stdout
    project.submit("--cluster", "slurm", *HELD)
    assert names(run)[-4:] == ["cancel_requested", "cancelled", "submitting", "submitted"]
    assert queue(slurm, project) == [status(run)["job_id"]] != [first]
    project.jobkit("cancel", run.name)


def test_a_cancel_that_was_cut_off_is_carried_out_in_a_run_that_trains(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *LONG)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    killed = (
        "import os, signal, sys\n"
        "from jobkit.cli.main import main\n"
        "from jobkit.run import records\n"
        "records.write = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(['cancel', 'toy'])\n"
    )
    cut_off = subprocess.run([sys.executable, "-c", killed], cwd=project.path, env=project.env)
    assert cut_off.returncode == -signal.SIGKILL and names(run)[-1] == "cancel_requested"
    told = project.submit("--cluster", "slurm", *LONG, expect=1).stderr
    assert "is being cancelled" in told and "was cut off, and is carried out now" in told
    wait_for("its end", lambda: status(run)["state"] == "cancelled", run)
    assert status(run)["checkpoint"] == status(run)["step"]


def test_ranks_that_cannot_be_asked_to_stop_are_signalled(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *LONG)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    (run / "logs/1/notice.json").mkdir()  # a request cannot be written, as on a full disk
    done = project.jobkit("cancel", run.name)
    assert "signalled instead" in done.stderr and "cancelled at step" in done.stdout


def test_a_cancel_of_a_run_that_was_moved_while_it_trains_is_refused(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *LONG)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    number = status(run)["job_id"]
    run.parent.rename(tmp_path / "old")
    said = project.jobkit("cancel", "toy", "--runs-dir", "old", expect=1)
    assert f"job {number} was submitted as {run}; move it back, or scancel {number}" in said.stderr
    moved = tmp_path / "old" / run.name
    assert status(moved)["state"] == "running" and "cancel_requested" not in names(moved)
    assert slurm.job(number)["JobState"] == "RUNNING"
    moved.parent.rename(run.parent)
    assert "cancelled at step" in project.jobkit("cancel", "toy").stdout
    wait_for("an empty queue", lambda: not queue(slurm, project), run)


def test_a_cancel_leaves_the_teardown_of_a_run_that_has_finished_since_its_time(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    (project.path / "mytask.py").write_text(
        "import pathlib\nimport time\n\n\n"
        "def train(ctx):\n"
        "    for _ in ctx.steps(5):\n"
        "        pass\n"
        "    (ctx.run_dir / 'loop-done').touch()\n"
        "    while '\"cancel_requested\"' not in (ctx.run_dir / 'events.jsonl').read_text():\n"
        "        time.sleep(0.1)\n"
    )
    teardown = f"until [ -e {tmp_path}/told ]; do sleep 0.2; done; touch {tmp_path}/copied"
    project.submit("--cluster", "slurm", *ON_ONE_NODE, f"clusters.slurm.teardown=['{teardown}']")
    (run,) = project.runs
    wait_for("the end of the loop", (run / "loop-done").exists, run)
    said = project.jobkit("cancel", run.name)
    assert "finished at step 5/5, before it could be cancelled" in said.stdout
    (tmp_path / "told").touch()
    wait_for("an empty queue", lambda: not queue(slurm, project), run)
    assert (tmp_path / "copied").exists() and status(run)["state"] == "finished"


def test_a_job_that_was_cancelled_from_elsewhere_does_not_revive_the_run_that_has_failed_there(
    tmp_path: Path, slurm: Cluster, other: Cluster
) -> None:
    here, there = Project(tmp_path, slurm.env), Project(tmp_path, other.env)
    here.submit("--cluster", "slurm", *HELD)
    (run,) = here.runs
    number = status(run)["job_id"]
    there.jobkit("cancel", run.name)
    (tmp_path / "orders.py").write_text("def at_step(ctx, step):\n    raise ValueError\n")
    there.submit("--cluster", "slurm", *ON_ONE_NODE, "retry.crash=0")
    wait_for("its failure", lambda: status(run)["state"] == "failed", run)
    before = names(run)
    slurm.command("scontrol", "release", number)
    wait_until(lambda: slurm.job(number)["JobState"] == "COMPLETED", "the end of the first job")
    assert names(run) == before


def test_many_are_cancelled_with_few_questions(tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *LONG)
    (running,) = project.runs
    in_process.jobkit(project, "submit", "toy.yaml", "--cluster", "slurm", *HELD)
    in_process.jobkit(
        project, "submit", "toy.yaml", "--cluster", "slurm", *HELD, "params.steps=7", "--sweep", "seed=1,2,3"
    )
    wait_for("some steps", lambda: step(running) >= 20, running)
    bystander = slurm.command("sbatch", "--parsable", "--hold", "--wrap=sleep 1", "--output=/dev/null").strip()

    asked: list[str] = []
    command = slurm_commands.command

    def counted(*arguments: str, **options: object) -> str:
        asked.append(arguments[0])
        return command(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(slurm_commands, "command", counted)
    queued = [run.name for run in project.runs if run != running]
    done = in_process.jobkit(project, "cancel", *queued, "-y")
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == sorted(queued)
    assert {status(run)["state"] for run in project.runs if run != running} == {"cancelled"}

    done = in_process.jobkit(project, "cancel", "toy*", "-y")
    assert done.stdout.count("is cancelled already") == 4
    assert f"{running.name} cancelled at step" in done.stdout
    assert status(running)["checkpoint"] == status(running)["step"] >= 20
    wait_for("an empty queue", lambda: slurm.command("squeue", "-h", "-o", "%i").split() == [bystander], running)
    again = in_process.jobkit(project, "resume", queued[0], queued[1], "-y")
    assert again.stdout.count("run directory") == 2
    assert {status(project.path / "runs" / name)["state"] for name in queued[:2]} <= {"queued", "held"}


def test_the_job_of_a_run_whose_directory_is_removed_ends(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *LONG)
    (run,) = project.runs
    wait_for("some steps", lambda: step(run) >= 20, run)
    job_id = status(run)["job_id"]
    shutil.rmtree(run.rename(tmp_path / "aside"))
    wait_until(lambda: not slurm.command("squeue", "--noheader"), "an empty queue")
    record = slurm.command("scontrol", "--oneliner", "show", "job", job_id)
    assert "JobState=FAILED" in record, record
    assert "Restarts=0" in record, record
    assert f"Comment=jobkit: {run} was removed" in record
    assert not run.exists()
    project.submit("--cluster", "slurm", *LONG, "clusters.slurm.hold=true")
    assert [path.name for path in project.runs] == [run.name], "the same config begins anew"
