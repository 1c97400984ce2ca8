"""Clusters and users that share a directory of runs."""

from __future__ import annotations

import json
import os
import pickle
import pwd
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.runs import YAML, Launch, Project, wait_until
from slurmbox import Cluster
from slurmbox.pytest_plugin import GROUP

import jobkit
from jobkit.errors import EXIT_BAD_INPUT

ON_SLURM = ("--cluster", "slurm")
HELD = (*ON_SLURM, "clusters.slurm.hold=true")


def test_a_run_of_another_cluster_is_left_alone(
    slurm: Cluster, make_slurm: Callable[..., Cluster], tmp_path: Path
) -> None:
    """Two clusters share the disk, and give the same job ids: only a run's own cluster can say how its job is."""
    other = make_slurm(name="other", nodes=1)
    here, elsewhere = (Project(tmp_path / "project", cluster.env) for cluster in (slurm, other))
    launch = here.submit(*ON_SLURM, steps=100_000)
    queued = here.submit(*HELD, steps=7)
    launch.wait_for_step(10)
    job_id = int(str(launch.status.job_id))
    while int(other.command("sbatch", "--parsable", "--hold", "-o/dev/null", "--wrap=true")) < job_id:
        pass  # until the other cluster has a job of that id

    for run, state in ((launch, "running"), (queued, "queued")):
        assert json.loads(elsewhere.jobkit("status", run.run.name, "--json").stdout)["state"] == state
        assert "slurmbox" in elsewhere.jobkit("status", run.run.name).stdout
    jobs = other.command("squeue", "-h")
    again = elsewhere.jobkit("submit", str(elsewhere.yaml), *ON_SLURM, "params.steps=100000", check=False)
    assert again.returncode == EXIT_BAD_INPUT
    assert other.command("squeue", "-h") == jobs

    refused = elsewhere.jobkit("cancel", "-y", queued.run.name, check=False)
    assert refused.returncode != 0
    assert "slurmbox" in refused.stdout + refused.stderr
    assert queued.status.state == "queued"
    elsewhere.jobkit("cancel", "-y", launch.run.name)  # its supervisor reads the request from the disk
    launch.wait_until_over()
    assert launch.causes == ["cancelled"]
    here.jobkit("cancel", "-y", queued.run.name)
    assert queued.status.state == "cancelled"


@pytest.fixture
def group_folder(slurm_users: tuple[str, str]) -> Iterator[Path]:
    """A directory that the group of both users shares; not in pytest's, which only its user enters."""
    with tempfile.TemporaryDirectory(prefix="jobkit-users-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        shared = Path(folder, "shared")
        shared.mkdir()
        shutil.chown(shared, group=GROUP)
        shared.chmod(0o2775)
        yield shared


def project_of(user: str, cluster: Cluster, shared: Path) -> Project:
    """Return a project of a user's own, whose runs are in the shared directory."""
    environment = {
        **cluster.as_user(user)["env"],
        "JOBKIT_RUNS": str(shared / "runs"),
        "PYTHONPATH": os.pathsep.join([str(Path(jobkit.__file__).parents[1]), *site.getsitepackages()]),
    }
    project = Project(shared.parent / user, environment)
    project.environment["JOBKIT_RUNS"] = environment["JOBKIT_RUNS"]
    account = cluster.as_user(user)
    project.account = {key: account[key] for key in ("user", "group", "extra_groups")} | {"umask": 0o002}
    # The tests' own Python may be where only their user can read.
    project.python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (project.folder, *project.folder.iterdir()):
        shutil.chown(path, user)
    probe = [project.python, "-c", "import jobkit, submitit, yaml"]
    if shutil.which(project.python) is None or subprocess.run(probe, **project._options()).returncode:
        pytest.skip("other users cannot read this Python or this checkout")
    return project


def test_a_group_shares_its_runs_and_nobody_runs_what_another_user_wrote(
    make_slurm: Callable[..., Cluster], slurm_users: tuple[str, str], group_folder: Path
) -> None:
    cluster = make_slurm(nodes=2)
    ours, theirs = (project_of(user, cluster, group_folder) for user in slurm_users)
    runs = group_folder / "runs"

    launch = ours.submit(*ON_SLURM, steps=100_000)
    second = theirs.submit(*ON_SLURM, steps=20).wait_until_over()
    assert second.status.state == "finished"
    launch.wait_for_step(10)
    rows = json.loads(theirs.jobkit("list", "--json").stdout)
    assert {(row["name"], row["state"]) for row in rows} == {
        (launch.run.name, "running"),
        (second.run.name, "finished"),
    }
    for run, user in ((launch, slurm_users[0]), (second, slurm_users[1])):
        assert pwd.getpwuid(run.run.code.stat().st_uid).pw_name == user, "code is a user's own"
    for folder in (runs, runs / ".locks", runs / ".code"):
        assert folder.stat().st_mode & 0o2070 == 0o2070, folder

    ours.jobkit("cancel", "-y", launch.run.name)
    launch.wait_until_over()
    marker = group_folder / "marker"
    for number, replace in enumerate((config, code, worker), start=1):
        held = ours.submit(*HELD, steps=number)
        replace(theirs, held, marker)
        (job_id,) = queued(cluster, held)
        cluster.command("scontrol", "release", job_id)
        wait_until(lambda held=held: not queued(cluster, held), "the job to end")
        assert (marker.exists(), held.status.result) == (False, None), f"{replace.__name__} was executed"

    # While the run trains: the next attempt in place executes nothing of it.
    launch = ours.submit(*ON_SLURM, steps=100_001).wait_for_step(10)
    code(theirs, launch, marker)
    launch.kill_rank(0)
    launch.wait_until_over()
    assert (marker.exists(), launch.status.state) == (False, "interrupted")
    assert "submit the run again" in launch.status.reason


def put(project: Project, target: Path, content: bytes) -> None:
    """Replace a file of a run by one of the project's user."""
    new = str(target.with_name("mine"))
    script = f"import os; open({new!r}, 'wb').write({content!r}); os.replace({new!r}, {str(target)!r})"
    subprocess.run([project.python, "-c", script], **project._options(), check=True)


def config(project: Project, launch: Launch, marker: Path) -> None:
    """Another config.yaml: its command is the other user's."""
    words = json.dumps(["touch", str(marker)])
    put(project, launch.run.config_file, YAML.replace("task: scripted_rank:train", f"command: {words}").encode())


def code(project: Project, launch: Launch, marker: Path) -> None:
    """`code` leads to a folder of the other user's."""
    project.write("scripted_rank.py", f"open({str(marker)!r}, 'w')\n")
    new = str(launch.run.path / "mine")
    script = f"import os; os.symlink({str(project.folder)!r}, {new!r}); os.replace({new!r}, {str(launch.run.code)!r})"
    subprocess.run([project.python, "-c", script], **project._options(), check=True)


class Touch:
    """Its pickle makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def worker(project: Project, launch: Launch, marker: Path) -> None:
    """Another pickle."""
    put(project, launch.run.pickle_file, pickle.dumps(Touch(marker)))


def queued(cluster: Cluster, launch: Launch) -> list[str]:
    return cluster.command("squeue", "-h", "-o%i", f"--name={launch.run.name}").split()


def test_a_controller_that_moves_is_the_same_cluster(make_slurm: Callable[..., Cluster], tmp_path: Path) -> None:
    """slurmctld goes on on a host of another name, with the same state; a run lives on, and one ends meanwhile."""
    if subprocess.run(["unshare", "--uts", "true"], check=False).returncode:
        pytest.skip("nothing here may have another host name")
    cluster = make_slurm(nodes=1)
    project = Project(tmp_path / "project", cluster.env)
    launch = project.submit(*ON_SLURM, steps=100_000).wait_for_step(10)
    gone = project.submit(*HELD, steps=7)
    cluster.command("scancel", *queued(cluster, gone))
    cluster.stop_controller()
    text = cluster.conf.read_text(encoding="utf-8")
    cluster.conf.write_text(re.sub("SlurmctldHost=.*", "SlurmctldHost=moved(127.0.0.1)", text), encoding="utf-8")
    there, program = tmp_path / "slurmctld", shutil.which("slurmctld", path=cluster.env["PATH"])
    there.write_text(f"#!/bin/sh\nexec unshare --uts sh -c 'hostname moved; exec {program} -D'\n")
    there.chmod(0o755)
    cluster.env["PATH"] = f"{tmp_path}:{cluster.env['PATH']}"
    cluster.start_controller()
    assert "= moved(127.0.0.1)" in cluster.command("scontrol", "show", "config")

    for run, state in ((launch, "running"), (gone, "lost")):
        assert json.loads(project.jobkit("status", run.run.name, "--json").stdout)["state"] == state
    project.jobkit("cancel", "-y", launch.run.name)
    assert launch.wait_until_over().causes == ["cancelled"]
    cluster.stop_controller()  # and once Slurm has forgotten the job, which says that the cluster is here
    for file in (cluster.dir / "state").glob("job_state*"):
        file.unlink()
    cluster.start_controller()
    assert cluster.command("squeue", "--states=all", "--noheader") == ""
    again = project.jobkit("status", gone.run.name, "--json")
    assert json.loads(again.stdout)["state"] == "lost"
