"""The user's shell reaches the job: its functions and variables, and a PATH that hides Slurm's commands."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.runs import Project, wait_until
from slurmbox import Cluster

SLURM = ("sbatch", "scancel", "scontrol", "sdiag", "sinfo", "squeue", "srun")

GREETS = """\
name: greets
command: [bash, -c, 'greet "$(printenv dotted.name)" >greeting-$SLURM_JOB_ID']
"""


@pytest.mark.parametrize("container", [None, {"prefix": ["env"]}], ids=["plain", "container"])
def test_functions_and_dotted_variables_reach_the_ranks(
    slurm: Cluster, on_slurm: Callable[..., Project], container: dict[str, list[str]] | None
) -> None:
    project = on_slurm(slurm, f"{GREETS}container: {json.dumps(container)}\n")
    project.environment |= {"BASH_FUNC_greet%%": "() {  echo hello\n  echo $1\n}", "dotted.name": "dotted value"}
    for where in ("--local", "--cluster=slurm"):
        launch = project.submit(where, f"name=greets{where[2:7]}").wait_until_over()
        assert launch.status.state == "finished", launch.status
    greetings = [file.read_text() for file in project.folder.glob("greeting-*")]
    assert greetings == ["hello\ndotted value\n"] * 2


WITHOUT_SLURM = """\
name: hides
command: [bash, -c, 'for i in $(seq 600); do [ -e enough ] && type scontrol >found && exit; sleep 0.1; done; exit 1']
clusters: {slurm: {setup: ["export PATH=$PWD/programs"]}}
"""


@pytest.fixture
def hides(on_slurm: Callable[..., Project]) -> Callable[..., Project]:
    """A function that makes a project with `programs`: links to all programs but Slurm's."""

    def make(cluster: Cluster, yaml: str = WITHOUT_SLURM) -> Project:
        project = on_slurm(cluster, yaml)
        (project.folder / "programs").mkdir()
        for path in (file for folder in ("/usr/local/bin", "/usr/bin", "/bin") for file in Path(folder).iterdir()):
            link = project.folder / "programs" / path.name
            if path.name not in SLURM and not link.exists():
                link.symlink_to(path)
        return project

    return make


def test_a_setup_that_takes_slurm_off_path(make_slurm: Callable[..., Cluster], hides: Callable[..., Project]) -> None:
    slurm = make_slurm(cred_expire=5)
    project = hides(slurm)
    launch = project.submit("--cluster=slurm").wait_until(lambda me: me.status.attempts, "an attempt")
    slurm.preempt(str(launch.status.job_id))
    launch.wait_until(lambda me: me.causes, "the preemption")
    (project.folder / "enough").touch()
    launch.wait_until_over()
    assert (launch.status.state, launch.causes) == ("finished", ["preempted", "finished"])
    assert "scontrol is /" in (project.folder / "found").read_text()


def test_a_setup_that_hides_slurm_and_fails_goes_to_another_node(slurm: Cluster, hides: Callable[..., Project]) -> None:
    line = "echo here >>tried; export PATH=$PWD/programs; [ $(wc -l <tried) -gt 1 ]"
    project = hides(slurm, f"name: fails\ncommand: [date]\nclusters: {json.dumps({'slurm': {'setup': [line]}})}\n")
    launch = project.submit("--cluster=slurm").wait_until_over()
    assert launch.status.state == "finished"
    assert slurm.job(str(launch.status.job_id))["Restarts"] == "1"


def test_a_node_without_slurms_commands_ends_the_job_with_a_line(slurm: Cluster, hides: Callable[..., Project]) -> None:
    project = hides(slurm, "name: nowhere\ncommand: [date]\nclusters: {slurm: {hold: true}}\n")
    client = project.folder / "client"
    client.mkdir()
    for name in SLURM:
        (client / name).symlink_to(f"/usr/bin/{name}")
    project.environment["PATH"] = f"{project.folder}/programs:{client}"
    launch = project.submit("--cluster=slurm")
    client.rename(project.folder / "gone")
    (job,) = slurm.command("squeue", "--noheader", f"--name={launch.run.name}", "--format=%i").split()
    slurm.command("scontrol", "release", job)
    wait_until(lambda: slurm.job(job)["JobState"] == "FAILED", "the job to give its node back")
    words = launch.run.job_log.read_text()
    assert "no scontrol and srun on PATH of node" in words
    assert "Traceback" not in words
    (project.folder / "gone").rename(client)
    assert "no scontrol and srun on PATH of node" in project.jobkit("status", launch.run.name).stdout


NO_UTF8 = "caf\udce9"
"""As Python has the name `café` of a disk whose names are Latin-1."""


def test_a_folder_whose_name_is_no_utf8_has_code_and_no_runs(
    slurm: Cluster, on_slurm: Callable[..., Project], tmp_path: Path
) -> None:
    project = on_slurm(slurm, folder=NO_UTF8)
    for where in ("--local", "--cluster=slurm"):
        refused = project.jobkit("submit", str(project.yaml), where, check=False)
        assert (refused.returncode, list(project.folder.glob("runs/*-*"))) == (2, [])
        assert refused.stderr.startswith("error: --runs-dir: its path is no UTF-8; found '/"), refused.stderr
    project.environment["JOBKIT_RUNS"] = str(tmp_path / "runs")
    for where in ("--local", "--cluster=slurm"):
        words = (where, f"name=here{where[2:7]}", "--notify", f"touch {NO_UTF8}{where[2:7]}")
        launch = project.submit(*words, steps=5).wait_until_over()
        assert launch.status.state == "finished"
        wait_until((project.folder / f"{NO_UTF8}{where[2:7]}").exists, "the command of --notify")
    project.jobkit("report", "here*", "-o", "report.html")
    assert "here" in (project.folder / "report.html").read_text(encoding="utf-8")


def test_a_small_limit_of_open_files_is_raised_for_ranks(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    project = on_slurm(slurm)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    project.account = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))}
    for where in (["--local", "--detach"], ["--cluster=slurm"]):
        launch = project.submit(*where, f"name=files{len(where)}", steps=100_000).wait_for_step(2)
        for pid in (launch.supervisor_pid, launch.rank_pid(0)):
            limits = Path(f"/proc/{pid}/limits").read_text()
            (line,) = (line.split() for line in limits.splitlines() if line.startswith("Max open files"))
            assert int(line[3]) > 64, (where, line)
        launch.end_training().wait_until_over()

    project.account = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))}
    done = project.jobkit("submit", str(project.yaml), "--local", "params.steps=5")
    assert done.stderr.count("jobkit: at most 64 open files") == 1
