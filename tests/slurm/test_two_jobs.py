"""Two jobs of one run, and none: tokens decide, not resemblance."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from harness.runs import Launch, Project, is_alive, wait_until
from slurmbox import Cluster

from jobkit.run.rundir import RunDir


def test_a_submission_killed_between_sbatch_and_its_answer_is_not_made_twice(
    slurm: Cluster, on_slurm: Callable[..., Project], tmp_path: Path
) -> None:
    """sbatch queues the job; the submission dies before it hears of it. The same command names that job."""
    project = on_slurm(slurm)
    binary = tmp_path / "bin"
    binary.mkdir()
    sbatch = shutil.which("sbatch")
    (binary / "sbatch").write_text(f'#!/bin/sh\n{sbatch} "$@" >{tmp_path}/answer\nkill -9 $PPID\nsleep 1\n')
    (binary / "sbatch").chmod(0o755)
    usual = dict(project.environment)
    project.environment["PATH"] = f"{binary}:{usual['PATH']}"
    killed = project.jobkit("submit", str(project.yaml), "--cluster", "slurm", "params.steps=100000", check=False)
    assert killed.returncode == -signal.SIGKILL

    project.environment = usual
    again = project.jobkit("submit", str(project.yaml), "--cluster", "slurm", "params.steps=100000", check=False)
    (folder,) = (project.folder / "runs").glob("scripted-*")
    launch = Launch(project, RunDir(folder)).wait_for_step(1).end_training().wait_until_over()
    job = (tmp_path / "answer").read_text().split(";")[0].strip()
    assert again.returncode == 0
    assert job in again.stdout + again.stderr
    assert [attempt.began.job_id for attempt in launch.status.attempts] == [job]
    assert launch.status.state == "finished"
    assert jobs_of(slurm, project) == [job]


def jobs_of(cluster: Cluster, project: Project) -> list[str]:
    """Return all jobs that were ever queued from a project's folder, by Slurm's record."""
    lines = cluster.command("squeue", "--noheader", "--states=all", "--format=%i %Z").splitlines()
    return [job for job, folder in map(str.split, lines) if Path(folder) == project.folder]


def test_two_submissions_at_once_make_one_job(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    project = on_slurm(slurm)
    both = [project.start("submit", str(project.yaml), "--cluster", "slurm", "params.steps=50") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (folder,) = (project.folder / "runs").glob("scripted-*")
    launch = Launch(project, RunDir(folder)).wait_until_over()
    assert len(launch.status.attempts) == 1
    assert jobs_of(slurm, project) == [launch.status.job_id]
    assert launch.status.submitted is not None
    assert launch.status.submitted.number == 1


def test_a_job_with_an_older_token_begins_nothing(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    """A copy of the job that somebody submits by hand, with the comment of the first submission."""
    project = on_slurm(slurm)
    launch = project.submit("--cluster", "slurm", steps=100_000)
    launch.wait_for_step(10)
    token = launch.status.token
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    project.jobkit("resume", launch.run.name)
    launch.wait_for_attempt(2)

    rank = launch.rank_pid(0)
    copy = slurm.command("sbatch", "--parsable", f"--comment={token}", str(launch.run.batch_script))
    wait_until(lambda: slurm.job(copy)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), "the copy to end")
    assert [attempt.began.job_id for attempt in launch.status.attempts].count(copy) == 0
    assert launch.status.state == "running" and launch.rank_pid(0) == rank and is_alive(rank)
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()


def test_a_moved_run_directory_continues_at_its_new_place(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    project = on_slurm(slurm)
    launch = project.submit("--cluster", "slurm", steps=100_000)
    launch.wait_for_step(10)
    project.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    job = str(launch.status.job_id)
    wait_until(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), "the job to end")
    (project.folder / "runs").rename(project.folder / "elsewhere")
    moved = Launch(project, RunDir(project.folder / "elsewhere" / launch.run.name))
    project.jobkit("resume", str(moved.run.path))
    moved.wait_for_attempt(2)
    project.jobkit("cancel", "-y", str(moved.run.path))
    moved.wait_until_over().assert_repeated("none")
