"""Submissions on a real Slurm: the script that --dry-run shows, and a controller that gives no answer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from harness.runs import Project, wait_until
from slurmbox import Cluster

from jobkit.run.journal import read_status
from jobkit.run.rundir import RunDir
from jobkit.slurm.jobs import parse_job

HELD = ("--cluster", "slurm", "+clusters.slurm.hold=true")


def test_slurm_takes_the_script_of_a_dry_run(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    yaml = (
        "name: scripted\ntask: scripted_rank:train\nparams: {steps: 5}\nresources: {nodes: 2, tasks_per_node: 2}\n"
        "clusters: {box: {partition: low, nice: 5, begin: now+1hour, setup: [echo 'a  b'], exclusive: true}}\n"
    )
    project = on_slurm(slurm, yaml)
    shown = project.jobkit("submit", str(project.yaml), "--cluster", "box", "--dry-run").stdout
    script = "#!/bin/bash" + shown.partition("#!/bin/bash")[2]
    subprocess.run(["sbatch", "--test-only"], input=script, env=project.environment, text=True, check=True)
    assert not (project.folder / "runs").exists()


def test_a_job_is_found_whose_sbatch_had_no_answer(
    make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]
) -> None:
    """The controller is stopped while sbatch talks to it: it queues the job later, once."""
    cluster = make_slurm(nodes=1)
    project = on_slurm(cluster)
    project.jobkit("submit", str(project.yaml), *HELD)
    (folder,) = (project.folder / "runs").glob("scripted-*")
    journal = RunDir(folder).journal_file
    before = journal.read_text()
    cluster.command("scancel", "--me")
    wait_until(lambda: not cluster.command("squeue", "-h"), "an empty queue")

    # The sign that the next question to the controller is sbatch's.
    binary = project.folder / "bin"
    binary.mkdir()
    sbatch = shutil.which("sbatch")
    (binary / "sbatch").write_text(
        f'#!/bin/sh\ntouch {binary}/called\nuntil [ -e {binary}/go ]; do sleep 0.1; done\nexec {sbatch} "$@"\n'
    )
    (binary / "sbatch").chmod(0o755)
    project.environment["PATH"] = f"{binary}:{project.environment['PATH']}"
    submission = project.start("submit", str(project.yaml), *HELD)
    wait_until((binary / "called").exists, "sbatch")
    cluster.pause_controller()
    (binary / "go").touch()
    assert submission.stdout is not None
    wait_until(lambda: "Socket timed out" in submission.stdout.readline(), "the silence of sbatch")
    cluster.resume_controller()
    output, _ = submission.communicate()
    assert submission.returncode == 0, output
    assert journal.read_text() != before
    jobs = [parse_job(line) for line in cluster.command("scontrol", "-o", "show", "job").splitlines()]
    waiting = [job for job in jobs if not job.ended]
    assert [job.comment for job in waiting] == [read_status(RunDir(folder)).token]
    assert f"job {waiting[0].job_id}" in output
