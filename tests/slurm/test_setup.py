"""`setup` and `teardown` run as in the user's shell; a line that fails is named with the words that it printed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from harness.runs import Project, wait_until
from slurmbox import Cluster

YAML = """\
name: scripted
task: scripted_rank:train
params: {steps: 5}
clusters:
  local: {setup: [SETUP], teardown: [touch torn_down]}
  slurm: {setup: [SETUP], teardown: [touch torn_down]}
"""

PROFILE = """\
export FROM_PROFILE=yes
false
[ -f /nowhere/bashrc ] && source /nowhere/bashrc
"""


def with_setup(project: Project, lines: str) -> None:
    project.yaml.write_text(YAML.replace("SETUP", lines))
    project.write("profile.sh", PROFILE)


MISSING = "load_no_module cuda: load_no_module: command not found (exit code 127)"
SETS_WHAT_IT_NEEDS = "source profile.sh, 'test \"$FROM_PROFILE\" = yes', set -u, set -e"


def test_setup_here(project: Project) -> None:
    with_setup(project, SETS_WHAT_IT_NEEDS)
    assert project.jobkit("submit", str(project.yaml), "--local").returncode == os.EX_OK
    wait_until((project.folder / "torn_down").exists, "the teardown")

    with_setup(project, "load_no_module cuda")
    notify = ["--notify", 'echo "$JOBKIT_STATE $JOBKIT_ERROR" >told']
    failed = project.jobkit("submit", str(project.yaml), "--local", "params.steps=6", *notify, check=False)
    words = failed.stdout + failed.stderr
    assert (failed.returncode, MISSING in words, "Traceback" in words) == (1, True, False)
    assert (project.folder / "told").read_text() == f"failed {MISSING}\n"


@pytest.mark.parametrize("grace", [[], ["--no-grace"]], ids=["", "no grace"])
def test_cancel_ends_setup_lines_that_hang(slurm: Cluster, on_slurm: Callable[..., Project], grace: list[str]) -> None:
    project = on_slurm(slurm)
    for where in ("local", "slurm"):
        with_setup(project, f"touch begun-{where}, sleep 1000")
        launch = project.submit("--cluster", where, *([] if where == "slurm" else ["--detach"]), f"name=hangs-{where}")
        wait_until((project.folder / f"begun-{where}").exists, "the setup")
        project.jobkit("cancel", "-y", *grace, launch.run.name)
        assert launch.status.state == "cancelled"
    wait_until(lambda: not slurm.command("squeue", "-h", "--name", launch.run.name), "the end of the job")


def test_setup_on_slurm(make_slurm: Callable[..., Cluster], on_slurm: Callable[..., Project]) -> None:
    cluster = make_slurm(nodes=2, cred_expire=5)
    project = on_slurm(cluster)
    with_setup(project, SETS_WHAT_IT_NEEDS)
    followed = project.jobkit("submit", str(project.yaml), "--cluster", "slurm", "--follow")
    assert "step 5/5" in followed.stderr  # it stayed to the end, which its exit code says
    wait_until((project.folder / "torn_down").exists, "the teardown")

    with_setup(project, "echo $SLURMD_NODENAME >>tried, '[ $(wc -l <tried) -gt 1 ]'")
    launch = project.submit("--cluster", "slurm", steps=7).wait_until_over()
    bad, good = project.folder.joinpath("tried").read_text().split()
    record = cluster.job(str(launch.status.job_id))
    assert (record["ExcNodeList"], record["NodeList"], record["Restarts"]) == (bad, good, "1")
    assert (launch.causes, good != bad) == (["setup", "finished"], True)

    with_setup(project, "echo $SLURMD_NODENAME >>failed, load_no_module cuda")
    launch = project.submit("--cluster", "slurm", steps=6).wait_until_over()
    assert len(set(project.folder.joinpath("failed").read_text().split())) == 2, "each node once"
    assert (launch.status.state, launch.causes) == ("failed", ["setup", "setup"])
    for verb, code in {"status": 0, "list": 0, "wait": 1, "logs": 0}.items():
        shown = project.jobkit(verb, launch.run.name, check=False)
        assert (shown.returncode, MISSING in shown.stdout) == (code, True), verb
    job_id = str(launch.status.job_id)
    record = wait_until(lambda: (job := cluster.job(job_id))["JobState"] == "FAILED" and job, "Slurm's own word")
    assert (record["ExitCode"], record["Restarts"]) == ("1:0", "1")


def test_a_torch_that_loads_in_no_job_ends_the_run_at_once(slurm: Cluster, on_slurm: Callable[..., Project]) -> None:
    project = on_slurm(slurm, plain=False)
    (project.folder / "broken").mkdir()
    project.write("broken/torch.py", 'raise ImportError("libcudnn.so.9: no such file")\n')
    with_setup(project, f"export PYTHONPATH={project.folder}/broken")
    for name, where in {"here": ["--local", "--detach"], "there": ["--cluster", "slurm", "resources.nodes=2"]}.items():
        launch = project.submit(*where, f"name=no-torch-{name}").wait_until_over()
        assert (launch.status.state, launch.causes) == ("failed", ["crashed"])
        assert "libcudnn.so.9" in str(launch.ends[0].error)
