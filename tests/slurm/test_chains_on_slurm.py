"""Runs that come after others on Slurm: their jobs follow the runs, from job to job."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from harness.in_process import jobkit
from harness.project import Project, describe, names, status, wait_for
from slurm_cluster import Cluster, ClusterError

GATE = "while test ! -e $0; do sleep 0.2; done; exit $(cat $0)"


@pytest.fixture
def project(tmp_path: Path, slurm: Cluster) -> Project:
    """Commands that end when a file of their name is there, with its text as exit code."""
    made = Project(tmp_path, slurm.env)
    (made.path / "gate.yaml").write_text(
        f"name: gate\ncommand: [sh, -c, '{GATE}', '${{name}}']\nretry: {{crash: 1, in_place: false}}\n"
        "clusters: {slurm: {partition: low}}\n"
    )
    return made


def submit(project: Project, name: str, *words: str) -> Path:
    done = jobkit(project, "submit", "gate.yaml", "--cluster", "slurm", f"name={name}", *words)
    return Path(done.stdout.split("run directory ")[1].strip())


def end(project: Project, run: Path, name: str, code: int = 0) -> None:
    (project.path / f"{name}.new").write_text(str(code))
    (project.path / f"{name}.new").rename(project.path / name)
    state = "failed" if code else "finished"
    wait_for(f"that it has {state}", lambda: status(run)["state"] == state, run)


def job(slurm: Cluster, run: Path) -> str:
    return str(slurm.command("squeue", "--noheader", f"--name={run.name}", "--format=%T %r %E")).strip()


def test_a_job_waits_for_the_run_whatever_becomes_of_the_jobs_of_that_run(project: Project, slurm: Cluster) -> None:
    first = submit(project, "a")
    second = submit(project, "b", "--after", "a")
    said = jobkit(project, "status", "b").stdout
    assert f"waiting for: {first.name} (" in said and "starts by itself when that is finished" in said
    wait_for("its start", lambda: status(first)["state"] == "running", first)
    slurm.command("scontrol", "requeue", status(first)["job_id"])
    wait_for("its second start", lambda: len(status(first)["attempts"]) == 2, first)
    assert "Dependency" in job(slurm, second), "a requeue of the other run's job does not start this one's"
    slurm.command("scontrol", "update", f"JobId={status(second)['job_id']}", "Dependency=")
    follows = f"PENDING Dependency afterany:{status(first)['job_id']}"
    wait_for("that it has gone back", lambda: job(slurm, second).startswith(follows), second)
    end(project, first, "a", code=3)
    wait_for("that it is held", lambda: "job requeued in held state" in job(slurm, second), second)
    said = f"{first.name} (failed); held until that is continued"
    wait_for("that it is told", lambda: said in jobkit(project, "status", "b").stdout, second)
    (project.path / "a").unlink()
    jobkit(project, "resume", "a")
    follows = f"PENDING Dependency afterany:{status(first)['job_id']}"
    wait_for("that it follows the new job", lambda: job(slurm, second).startswith(follows), second)
    (project.path / "b").write_text("0")
    end(project, first, "a")
    wait_for("its end", lambda: status(second)["state"] == "finished", second)
    assert len(status(second)["attempts"]) == 1, describe(second)


def test_what_a_job_waits_for_besides_stays(project: Project, slurm: Cluster) -> None:
    other = slurm.command("sbatch", "--parsable", "--hold", "--array=1-2", "--wrap=true", "--output=/dev/null").strip()
    first = submit(project, "a")
    second = submit(project, "b", "--after", "a", f"clusters.slurm.dependency=afterany:{other}")
    assert job(slurm, second).count("afterany") == 2
    end(project, first, "a")
    wait_for("that it is told", lambda: status(first)["job_id"] not in job(slurm, second).split()[-1], second)
    assert job(slurm, second).endswith(f" afterany:{other}_*(unfulfilled)")
    (project.path / "b").write_text("0")
    slurm.command("scancel", other)
    wait_for("its end", lambda: status(second)["state"] == "finished", second)


def test_what_waits_for_a_cancelled_run_is_told(project: Project, slurm: Cluster) -> None:
    first, other = submit(project, "a"), submit(project, "x")
    runs = [submit(project, "b", "--after", "a"), submit(project, "c", "--after", "b")]
    told = submit(project, "d", "--after", "x")
    wait_for("their start", lambda: {status(run)["state"] for run in (first, other)} == {"running"}, first)
    jobkit(project, "cancel", "a")
    assert [status(run)["state"] for run in runs] == ["cancelled", "cancelled"]
    slurm.command("scancel", status(other)["job_id"])
    wait_for("that it learns of it", lambda: status(told)["state"] == "cancelled", told)
    for run, before in ((runs[0], first), (runs[1], runs[0]), (told, other)):
        assert f"it comes after {before.name}, which was cancelled" in jobkit(project, "status", run.name).stdout
        assert "started" not in names(run)


def test_a_run_whose_other_one_has_failed_is_held_from_the_beginning(project: Project, slurm: Cluster) -> None:
    first = submit(project, "a")
    end(project, first, "a", code=1)
    second = submit(project, "b", "--after", "a")
    assert "JobHeldUser" in job(slurm, second)
    (project.path / "a").write_text("0")
    (project.path / "b").write_text("0")
    jobkit(project, "resume", "a")
    wait_for("its end", lambda: status(second)["state"] == "finished", second)
    assert status(first)["state"] == "finished"


def test_a_job_that_was_submitted_as_held_goes_on_in_another_job(project: Project, slurm: Cluster) -> None:
    first = submit(project, "a")
    end(project, first, "a", code=3)
    second = submit(project, "b", "--after", "a", "retry.crash=9")
    assert "JobHeldUser" in job(slurm, second), "nobody continues what it comes after"
    (project.path / "a").unlink()
    jobkit(project, "resume", "a")
    end(project, first, "a")
    job_id = status(second)["job_id"]
    listed = ("squeue", "--steps", "--noheader", f"--jobs={job_id}", "--format=%i")
    wait_for("its start", lambda: f"{job_id}.0" in str(slurm.command(*listed)), second)
    slurm.command("scontrol", "update", f"JobId={job_id}", "Requeue=0")

    def goes_on_in_another_job() -> bool:
        with contextlib.suppress(ClusterError):  # a step is listed before there is a process to be killed
            slurm.command("scancel", "--signal=KILL", f"{job_id}.0")
        return status(second)["job_id"] != job_id

    wait_for("another job", goes_on_in_another_job, second)
    assert "Held" not in job(slurm, second)
    (project.path / "b").write_text("0")
    wait_for("its end", lambda: status(second)["state"] == "finished", second)


def watched(project: Project, program: str, word: str, at_first: str) -> Path:
    """A file to which each `program` that the project's commands start adds its words; the first with `word` among them
    does what `at_first` says before that."""
    log, real = project.path / f"{program}.log", shutil.which(program, path=project.env["PATH"])
    folder = project.path / "bin"
    folder.mkdir()
    (folder / program).write_text(
        f'#!/bin/sh\nfirst=$(grep -c -w {word} {log} 2>/dev/null)\necho "$*" >>{log}\n'
        f'case " $* " in *" {word} "*) [ "${{first:-0}}" != 0 ] || {at_first};; esac\nexec {real} "$@"\n'
    )
    (folder / program).chmod(0o755)
    project.env["PATH"] = f"{folder}:{project.env['PATH']}"
    return log


def test_all_that_wait_are_told_by_one_command_and_by_the_next_where_that_is_killed(
    project: Project, slurm: Cluster
) -> None:
    first = submit(project, "a")
    end(project, first, "a", code=1)
    jobkit(project, "submit", "gate.yaml", "--cluster", "slurm", "name=b", "--after", "a", "--sweep", "seed=0,1,2")
    runs = [run for run in project.runs if run.name.startswith("b-")]
    ids = {status(run)["job_id"] for run in runs}
    (project.path / "a").unlink()
    (project.path / "b").write_text("0")
    log = watched(project, "scontrol", "release", "kill -9 $PPID")
    assert project.jobkit("resume", "a", expect=None).returncode == -9
    told = [line for line in log.read_text().splitlines() if "Dependency=" in line]
    assert len(told) == 1 and set(told[0].split()[1].removeprefix("JobId=").split(",")) == ids
    assert status(first)["state"] in ("queued", "running")
    end(project, first, "a")
    for run in runs:
        wait_for("its end", lambda run=run: status(run)["state"] == "finished", run)
    assert [len(status(run)["attempts"]) for run in runs] == [1, 1, 1]


def test_a_cancel_that_is_cut_off_is_finished_by_the_next(project: Project, slurm: Cluster) -> None:
    first = submit(project, "a", "clusters.slurm.hold=true")
    second = submit(project, "b", "--after", "a")
    log = watched(project, "scancel", str(status(second)["job_id"]), "kill -9 $PPID")
    assert project.jobkit("cancel", "a", expect=None).returncode == -9
    assert log.exists() and status(first)["state"] == "cancelled"
    jobkit(project, "cancel", "a")
    assert status(second)["state"] == "cancelled"
    assert slurm.job(status(second)["job_id"])["JobState"] == "CANCELLED"


def test_a_job_goes_back_into_the_queue_before_what_waits_for_it_is_told(project: Project, slurm: Cluster) -> None:
    """To tell a thousand takes longer than Slurm may leave the job."""
    first = submit(project, "a", "retry.crash=3")
    (first / "dependents").mkdir()
    os.mkfifo(first / "dependents" / "b")  # whoever reads what waits for it does not come to an end
    (project.path / "a").write_text("3")
    wait_for("that it goes back", lambda: slurm.job(status(first)["job_id"])["Restarts"] == "1", first, seconds=60)
    slurm.command("scancel", status(first)["job_id"])
