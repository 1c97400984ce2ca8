"""Clusters and shells as they are: two clusters over one disk, other variables, prologs, controllers that are mute."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from harness import in_process
from harness.other_user import NOBODY, as_nobody, only_root, open_folder
from harness.project import Project, names, queue, status, step, wait_for
from harness.quick_slurm import QUICK
from slurm_cluster import Cluster, wait_until

from jobkit import slurm as scheduler
from jobkit.errors import EXIT_RESUMABLE
from jobkit.run.locks import is_free
from jobkit.run.rundir import RunDir
from jobkit.submission import observer

ON_ONE_NODE = ("resources.nodes=1", "resources.tasks_per_node=1")
LONG = (*ON_ONE_NODE, "params.steps=4000", "params.sleep=0.05")
HELD = (*ON_ONE_NODE, "clusters.slurm.hold=true")


def listed(project: Project, run: Path) -> str:
    return next(line for line in project.jobkit("list").stdout.splitlines() if line.startswith(run.name))


def test_another_cluster_is_not_asked_about_a_run_and_starts_no_second_job(
    tmp_path: Path, slurm: Cluster, other: Cluster
) -> None:
    here, there = Project(tmp_path, slurm.env), Project(tmp_path, other.env)
    here.submit("--cluster", "slurm", *LONG)
    (run,) = here.runs
    wait_for("some steps", lambda: step(run) >= 5, run)
    there.jobkit("list")
    assert "probably" not in listed(there, run) and "running" in listed(there, run)
    there.jobkit("status", run.name)
    told = there.submit("--cluster", "slurm", *LONG)
    assert "already running" in told.stdout and "cannot be asked from here" in told.stderr
    assert not other.command("squeue", "-h")
    assert [one for one in names(run) if one not in ("checkpoint", "checkpoint_interval")] == [
        *("submitting", "submitted", "started", "placed", "resumed", "stepped")
    ]
    # The same id on the other cluster is somebody else's job.
    number = status(run)["job_id"]
    while int(other.command("sbatch", "--parsable", "-o/dev/null", "--wrap=true")) < int(number):
        pass
    wait_until(lambda: not other.command("squeue", "-h"), "an empty queue")
    there.jobkit("list")
    assert status(run)["state"] == "running"
    # A person may end it from there: its supervisor finds the request on the disk.
    assert "cancelled at step" in there.jobkit("cancel", run.name).stdout
    wait_for("an empty queue", lambda: not queue(slurm, here), run)


def test_a_lost_job_is_only_told_until_a_submission_decides(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *HELD)
    (run,) = project.runs
    text = (run / "events.jsonl").read_text()
    number = status(run)["job_id"]
    slurm.command("scancel", number)
    (run / "events.jsonl").write_text(text.replace(f'"job_id": "{number}"', '"job_id": "999999"'))  # Slurm forgot it
    RunDir(run).write_status()
    before = names(run)
    assert "probably lost" in listed(project, run)
    assert "probably lost" in project.jobkit("status", run.name).stdout
    project.jobkit("logs", run.name)
    assert names(run) == before
    project.submit("--cluster", "slurm", *HELD)
    assert names(run) == [*before, "requeue_failed", "submitting", "submitted"]
    project.jobkit("cancel", run.name)


def test_the_same_yaml_in_two_folders_is_two_jobs(tmp_path: Path, slurm: Cluster) -> None:
    one, two = Project(tmp_path / "one", slurm.env), Project(tmp_path / "two", slurm.env)
    one.submit("--cluster", "slurm", *HELD)
    two.submit("--cluster", "slurm", *HELD)
    (run,), (second,) = one.runs, two.runs
    assert run.name == second.name
    first_job, lost_job = status(run)["job_id"], status(second)["job_id"]
    slurm.command("scancel", lost_job)
    journal = second / "events.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))  # cut off between sbatch and it
    two.submit("--cluster", "slurm", *HELD)
    assert status(second)["job_id"] not in (first_job, lost_job)
    two.jobkit("cancel", second.name)
    assert slurm.command("squeue", "-h", "-o%i").split() == [first_job]
    one.jobkit("cancel", run.name)


def test_a_shells_own_slurm_variables_reach_neither_the_job_nor_what_is_asked(tmp_path: Path, slurm: Cluster) -> None:
    shell = {
        "SBATCH_JOB_NAME": "mine",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_HOLD": "1",
        "SLURM_MEM_PER_CPU": "99999999",
        "SLURM_JOB_ID": "4711",
        "SLURM_TIME_FORMAT": "relative",
        "SQUEUE_FORMAT": "%A",
        "SRUN_CPUS_PER_TASK": "999",
        "SLURM_NTASKS": "77",
    }
    project = Project(tmp_path, {**slurm.env, **shell})
    project.submit("--cluster", "slurm", "params.steps=5", *ON_ONE_NODE, "--follow")
    (run,) = project.runs
    assert (status(run)["state"], len(status(run)["attempts"])) == ("finished", 1)
    job = slurm.job(status(run)["job_id"])
    assert (job["JobName"], job["TimeLimit"]) == (run.name, "00:05:00")


def test_a_job_that_exports_nothing_trains(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    # Slurm takes the environment of a login shell then: it does not know where this test's Python finds jobkit.
    where = f"export OMP_NUM_THREADS=1 SLURM_CONF={slurm.conf} PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
    none = (f"clusters.slurm.setup=['{where}']", "clusters.slurm.export=NONE")
    project.submit("--cluster", "slurm", "params.steps=5", *ON_ONE_NODE, *none, "--follow")
    (run,) = project.runs
    assert status(run)["state"] == "finished"


@pytest.fixture
def with_prolog(short_dir: Path) -> Iterator[Cluster]:
    """A cluster whose prolog does what the file `prolog` beside it says."""
    script = short_dir.parent / "prolog.sh"
    script.write_text(f"#!/bin/sh\n[ ! -e {short_dir.parent}/prolog ] || . {short_dir.parent}/prolog\n")
    script.chmod(0o755)
    with Cluster(short_dir, nodes=1, prolog=str(script), **QUICK) as cluster:
        yield cluster


def test_a_job_that_slurm_holds_is_held_and_the_same_command_releases_it(tmp_path: Path, with_prolog: Cluster) -> None:
    cluster, project = with_prolog, Project(tmp_path, with_prolog.env)
    orders = cluster.dir.parent / "prolog"
    orders.write_text("exit 1\n")
    small = ("--cluster", "slurm", "params.steps=5", *ON_ONE_NODE)
    project.submit(*small)
    (run,) = project.runs
    number = status(run)["job_id"]
    wait_until(lambda: "held" in cluster.job(number).get("Reason", ""), "a job that is held")
    assert "held" in listed(project, run)
    told = project.jobkit("status", run.name).stdout
    assert "launch_failed_requeued_held" in told.lower().replace(" ", "_")
    orders.unlink()
    cluster.command("scontrol", "update", "NodeName=node1", "State=resume")
    again = project.submit(*small)
    assert "already queued" in again.stdout and "released" in again.stderr
    wait_for("the end", lambda: status(run)["state"] == "finished", run)


def test_a_prologs_time_counts_against_the_limit(tmp_path: Path, with_prolog: Cluster) -> None:
    cluster, project = with_prolog, Project(tmp_path, with_prolog.env)
    (cluster.dir.parent / "prolog").write_text("sleep 25\n")
    project.submit("--cluster", "slurm", *LONG, 'resources.time="0:01:00"', "params.sleep=0.1")
    (run,) = project.runs
    wait_for("the stop", lambda: "interrupted" in names(run), run)
    project.jobkit("cancel", run.name)
    first = status(run)["attempts"][0]
    assert (first["cause"], first["failure"]) == ("timeout", None)
    assert first["durable_step"] == first["last_step"]
    began = datetime.fromisoformat(cluster.job(first["job_id"])["StartTime"]).timestamp()
    assert first["ended"] < began + 60, "by its own margin, before Slurm's TERM at the limit"


def test_a_job_that_does_not_complete_is_succeeded(tmp_path: Path, short_dir: Path) -> None:
    with Cluster(short_dir, nodes=2, slurmd_timeout=300, cred_expire=5) as cluster:
        project = Project(tmp_path, cluster.env)
        project.submit("--cluster", "slurm", *LONG)
        (run,) = project.runs
        wait_for("some steps", lambda: step(run) >= 5, run)
        number = status(run)["job_id"]
        node = cluster.job(number)["NodeList"]
        slurmd = cluster.daemons()[node]
        slurmd.send(signal.SIGSTOP)  # it never says that the job's processes are gone
        project.jobkit("cancel", run.name)
        assert "COMPLETING" in cluster.job(number)["JobState"]
        again = project.submit("--cluster", "slurm", *LONG)
        assert "still completing" in again.stderr
        wait_for("the next attempt", lambda: len(status(run)["attempts"]) == 2, run)
        slurmd.send(signal.SIGCONT)
        project.jobkit("cancel", run.name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_submission_that_waits_for_the_controller(
    tmp_path: Path, other: Cluster, number: signal.Signals
) -> None:
    project = Project(tmp_path, other.env)
    other.stop_controller()
    process = project.start("submit", "toy.yaml", "--cluster", "slurm")
    assert process.stderr is not None
    while "trying again" not in (line := process.stderr.readline()):
        assert line, "it ended"
    process.send_signal(number)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode == EXIT_RESUMABLE, printed
    assert "nothing was started" in printed and "Traceback" not in printed
    assert project.runs == []


def asking(project: Project, folder: Path) -> Path:
    """Let a project's commands write down which of Slurm's they call; returns the file."""
    said = folder / "asked"
    said.touch()
    for program in ("squeue", "scontrol", "sinfo", "sbatch", "scancel", "sdiag"):
        shim = folder / program
        shim.write_text(f'#!/bin/sh\necho {program} "$@" >>{said}\nexec {shutil.which(program)} "$@"\n')
        shim.chmod(0o755)
    project.env["PATH"] = f"{folder}:{project.env['PATH']}"
    return said


def with_three_runs(path: Path, cluster: Cluster) -> tuple[Project, Path]:
    """A project with runs that are held, and the file in which each further question to Slurm is a line."""
    project = Project(path, cluster.env)
    for lr in ("1", "2", "3"):
        project.submit("--cluster", "slurm", *HELD, f"+params.lr={lr}")
    (path / "bin").mkdir()
    return project, asking(project, path / "bin")


def test_a_list_of_many_runs_asks_slurm_once(tmp_path: Path, slurm: Cluster) -> None:
    project, said = with_three_runs(tmp_path, slurm)
    printed = project.jobkit("list").stdout
    assert printed.count(" held ") == 3
    assert [line.split()[0] for line in said.read_text().splitlines()] == ["scontrol", "squeue"]
    for run in project.runs:
        project.jobkit("cancel", run.name)


def test_a_controller_that_is_mute_delays_a_list_once(tmp_path: Path, other: Cluster) -> None:
    project, said = with_three_runs(tmp_path, other)
    controller = other.daemons()["slurmctld"]
    controller.send(signal.SIGSTOP)
    try:
        done = project.jobkit("list")
    finally:
        controller.send(signal.SIGCONT)
    assert done.stdout.count(" queued ") == 3 and f"no answer in {observer.LIST_SECONDS:g} s" in done.stderr
    assert len(said.read_text().splitlines()) == 1


def test_a_run_that_is_watched_is_asked_about_once_in_ten_seconds(
    tmp_path: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *HELD)
    (run,) = project.runs
    (tmp_path / "bin").mkdir()
    said = asking(project, tmp_path / "bin")
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, project.env[name])
    watch = observer.Observer(RunDir(run))
    looks = [watch.look() for _ in range(20)]
    assert {one.state for one in looks} == {"held"}
    assert sum("show job" in line for line in said.read_text().splitlines()) == 1
    monkeypatch.setattr(observer, "ASK_SECONDS", 0.0)
    watch = observer.Observer(RunDir(run))
    project.jobkit("cancel", run.name)
    assert watch.look().state == "cancelled" and watch.is_over


def test_json_of_a_held_run_names_its_state(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *HELD)
    (run,) = project.runs
    seen = json.loads(project.jobkit("status", run.name, "--json").stdout)
    assert (seen["state"], seen["waits_for"], seen["probably"]) == ("held", "JobHeldUser", None)
    told = project.submit("--cluster", "slurm", *HELD)  # the YAML wants it so
    assert "scontrol release" in told.stderr
    project.jobkit("cancel", run.name)


def test_a_ctrl_c_during_sbatch_starts_the_job_and_writes_it_down(tmp_path: Path, other: Cluster) -> None:
    project = Project(tmp_path, other.env)
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin/sbatch"
    slow.write_text(f'#!/bin/sh\ntouch {tmp_path}/called\nsleep 2\nexec {shutil.which("sbatch")} "$@"\n')
    slow.chmod(0o755)
    project.env["PATH"] = f"{tmp_path / 'bin'}:{project.env['PATH']}"
    words = [sys.executable, "-m", "jobkit", "submit", "toy.yaml", "--cluster", "slurm", *HELD]
    process = subprocess.Popen(words, cwd=tmp_path, env=project.env, start_new_session=True)
    wait_until((tmp_path / "called").exists, "sbatch")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(60) == 0
    (run,) = project.runs
    assert queue(other, project) == [status(run)["job_id"]]
    project.jobkit("cancel", run.name)


def test_a_banner_that_is_no_utf_8_hides_no_job(tmp_path: Path, slurm: Cluster) -> None:
    (tmp_path / "bin").mkdir()
    banner = b"#!/bin/sh\nprintf 'Willkommen in T\\374bingen\\n'\nprintf 'T\\374bingen\\n' >&2\n"
    for program in ("sbatch", "squeue"):
        shim = tmp_path / "bin" / program
        shim.write_bytes(banner + f'exec {shutil.which(program)} "$@"\n'.encode())
        shim.chmod(0o755)
    project = Project(tmp_path, {**slurm.env, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    project.submit("--cluster", "slurm", *HELD)
    (run,) = project.runs
    assert queue(slurm, project) == [status(run)["job_id"]]
    assert "held" in listed(project, run)
    said = project.submit("--cluster", "slurm", *HELD, "+params.lr=2", "clusters.slurm.partition=none", expect=2)
    assert "T\ufffdbingen; " in said.stderr and "invalid partition" in said.stderr
    project.jobkit("cancel", run.name)


def test_a_run_that_is_removed_while_slurm_is_asked_fails_no_list(tmp_path: Path, slurm: Cluster) -> None:
    project = Project(tmp_path, slurm.env)
    project.submit("--cluster", "slurm", *HELD)
    (run,) = project.runs
    project.submit("--cluster", "slurm", *HELD, "+params.lr=2")
    (second,) = set(project.runs) - {run}
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin/scontrol"
    shim.write_text(f'#!/bin/sh\nrm -rf {run}\nexec {shutil.which("scontrol")} "$@"\n')
    shim.chmod(0o755)
    project.env["PATH"] = f"{tmp_path / 'bin'}:{project.env['PATH']}"
    assert " held " in listed(project, second)
    assert not run.exists()


@only_root
@pytest.mark.usefixtures("short_dir")  # which says what is missing where there is no Slurm
def test_jobs_of_a_hidden_partition_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_folder() as folder, Cluster(folder / "s", nodes=1, **QUICK) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        cluster.command("scontrol", "update", "PartitionName=low", "Hidden=YES")
        script = folder / "submission.sh"
        script.write_text("#!/bin/sh\nsrun sleep 600\n")
        as_user = (f"--uid={NOBODY}", f"--gid={NOBODY}", "--chdir=/", "--output=/dev/null")
        number = cluster.command("sbatch", "--parsable", *as_user, str(script))
        wait_until(lambda: f"{number}.0" in cluster.command("squeue", "-h", "--steps"), "its step", seconds=60)

        def seen() -> list[object]:
            listed = [one.job_id for one in scheduler.jobs_of(["nobody"])]
            return [listed, scheduler.jobs_with(script), scheduler.steps(number)]

        assert as_nobody(seen) == [[number], [number], [f"{number}.0"]]


@pytest.fixture
def cut_off(tmp_path: Path, slurm: Cluster) -> Iterator[Project]:
    """A project with a submission that was killed while its sbatch waits for the file `go`, as if Slurm was busy."""
    project = Project(tmp_path, slurm.env)
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin/sbatch"
    wait = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done"
    slow.write_text(f'#!/bin/sh\necho $$ >{tmp_path}/pid\n{wait}\nexec {shutil.which("sbatch")} "$@"\n')
    slow.chmod(0o755)
    project.env["PATH"] = f"{tmp_path / 'bin'}:{project.env['PATH']}"
    process = project.start("submit", "toy.yaml", "--cluster", "slurm", *HELD)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "sbatch")
    process.kill()
    process.communicate()
    yield project
    (tmp_path / "go").touch()  # for an sbatch that still waits


def lock_of(project: Project) -> Path:
    (lock,) = project.path.glob("runs/.locks/*.submit")
    return lock


def test_a_submission_that_was_killed_before_its_sbatch_has_ended_is_not_made_twice(
    cut_off: Project, slurm: Cluster
) -> None:
    (run,) = cut_off.runs
    assert not is_free(lock_of(cut_off)), "sbatch may make the job yet"
    assert " queued " in listed(cut_off, run)
    (cut_off.path / "go").touch()
    assert "already queued" in cut_off.submit("--cluster", "slurm", *HELD).stdout
    assert queue(slurm, cut_off) == [status(run)["job_id"]]
    cut_off.jobkit("cancel", run.name)


def test_a_submission_that_was_killed_with_its_sbatch_is_told_as_lost_until_it_is_made(
    cut_off: Project, slurm: Cluster
) -> None:
    (run,) = cut_off.runs
    os.kill(int((cut_off.path / "pid").read_text()), signal.SIGKILL)
    wait_until(lambda: is_free(lock_of(cut_off)), "the end of sbatch and of what it has started")
    assert "probably lost" in listed(cut_off, run)
    assert "its submission was cut off; the same command completes it" in cut_off.jobkit("status", run.name).stdout
    cut_off.jobkit("logs", "-f", run.name, expect=75)  # it ends
    assert names(run) == ["submitting"]
    (cut_off.path / "go").touch()
    cut_off.submit("--cluster", "slurm", *HELD)
    assert queue(slurm, cut_off) == [status(run)["job_id"]]
    cut_off.jobkit("cancel", run.name)


def test_a_job_whose_id_another_one_has_got_is_lost(tmp_path: Path, slurm: Cluster) -> None:
    """A slurmctld that is killed forgets the jobs of its last seconds, and gives their ids again."""
    project = Project(tmp_path, slurm.env)
    held = ("--cluster", "slurm", "clusters.slurm.hold=true")
    runs = [project.run_of(f"seed={seed}") for seed in (0, 1)]
    for seed in (0, 1):
        in_process.jobkit(project, "submit", "toy.yaml", *held, f"seed={seed}")
    lost, other = (status(run)["job_id"] for run in runs)
    slurm.command("scancel", lost)
    journal = runs[0] / "events.jsonl"
    journal.write_text(journal.read_text().replace(f'"job_id": "{lost}"', f'"job_id": "{other}"'))
    assert "probably lost" in in_process.jobkit(project, "status", runs[0].name).stdout
    again = in_process.jobkit(project, "submit", "toy.yaml", *held, "seed=0")
    assert "already" not in again.stdout
    assert status(runs[0])["job_id"] not in (lost, other)
    assert slurm.job(other)["JobState"] == "PENDING"
    in_process.jobkit(project, "cancel", "-y", *(run.name for run in runs))
