"""The commands of README and docs that take minutes, typed as they are shown."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.documents import README, RECIPES, ROOT, TRAINING, Shell, block, commands
from harness.project import status, step, wait_for

CLUSTERS, EVIDENCE = ROOT / "docs/clusters.md", ROOT / "docs/evidence.md"


@pytest.fixture
def place() -> Iterator[dict[str, str]]:
    """An environment in which tools/slurm_cluster.py has a directory of this test's own; a short one, for sockets."""
    if shutil.which("slurmctld", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("no Slurm on this machine")
    with tempfile.TemporaryDirectory(prefix="jobkit-", dir="/tmp") as folder:
        environment = {"XDG_RUNTIME_DIR": folder}
        try:
            yield environment
        finally:
            subprocess.run([ROOT / "tools/slurm_cluster.py", "down"], env=environment, check=False)


def test_the_first_screen_of_the_readme_in_a_fresh_clone(tmp_path: Path, place: dict[str, str]) -> None:
    environment = place | {"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb"}

    def type_in(folder: Path, *lines: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", "\n".join(lines)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    clone, local, on_slurm = commands(README)[:3]
    type_in(tmp_path, clone.replace("<this repository>", str(ROOT)))
    folder = tmp_path / "jobkit"
    printed = type_in(folder, local)
    for line in block(README, "IMAGENET_DIR is not set").splitlines()[:2]:
        assert line in printed
    assert "finished at step 400/400: {'validation_loss': 0.37" in printed
    assert "already finished" in type_in(folder, local)
    printed = type_in(folder, 'eval "$(tools/slurm_cluster.py up)"', f"{on_slurm} params.steps=20")
    (run,) = (Path(line.split()[-1]) for line in printed.splitlines() if line.startswith("run directory"))
    wait_for("the end", lambda: status(run).get("state") == "finished", run, seconds=600)


def test_a_preemption_on_the_private_cluster(tmp_path: Path, place: dict[str, str]) -> None:
    shell = Shell(tmp_path / "jobkit", place)
    start, submit, preempt, ask, show, down = commands(CLUSTERS)[-8:-2]
    shell.type(start, submit)
    (run,) = (file.parent for file in shell.path.glob("runs/*/config.yaml"))
    wait_for("some steps", lambda: step(run) > 50, run, seconds=600)
    shell.type(start, preempt)
    wait_for("the end", lambda: status(run).get("state") == "finished", run, seconds=900)
    printed = shell.type(start, ask)
    assert "attempt 1: preempted, steps 0 to" in printed
    assert "attempt 2: finished" in printed
    assert "steps repeated" not in printed
    assert "node4" in shell.type(start, show, down)


def test_private_clusters_that_differ(tmp_path: Path, place: dict[str, str]) -> None:
    shell = Shell(tmp_path / "jobkit", place)
    for line in commands(CLUSTERS)[-2:]:
        assert "export SLURM_CONF=" in shell.type(line)
        shell.type("tools/slurm_cluster.py down")


def test_chaos_and_benches(tmp_path: Path, place: dict[str, str]) -> None:
    shell = Shell(tmp_path / "jobkit", place)
    for line in commands(EVIDENCE):
        if not line.endswith(("--soak", "sixty_four.py")) and not line.startswith("tools/test cuda"):
            shell.type(line, timeout=4 * 3600 if line.endswith("bench/all.py") else 1800)


def test_sixty_four_ranks(tmp_path: Path, place: dict[str, str]) -> None:
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 20 << 30:
        pytest.skip("needs 20 GiB of memory")
    Shell(tmp_path / "jobkit", place).type("tests/soak/sixty_four.py", timeout=3600)


def test_the_small_recipes(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "jobkit")
    shell.type("tools/run experiments/imagenet64.yaml --local", timeout=1800)
    for line in commands(RECIPES):
        if line.startswith("tools/run") and "--local" in line and "..." not in line:  # else for data, or a cluster
            shell.type(line, timeout=1800)
    for experiment in ("cogvideo_sample", "minimind_generate", "imagenet64_sample"):
        assert list(shell.path.glob(f"runs/{experiment}-*/samples/*")), experiment


@pytest.mark.parametrize("override", ["parallel=zero3", "comm.local_sgd=4", "precision=bf16"])
def test_the_example_of_the_training_side_under_other_strategies(tmp_path: Path, override: str) -> None:
    shell = Shell(tmp_path / "jobkit")
    (shell.path / "toy.yaml").write_text(block(README, "task: mytask:train"))
    (shell.path / "mytask.py").write_text(block(TRAINING, "def mean_error"))
    shell.type(
        f"python -m jobkit.submit toy.yaml --local resources.nodes=1 'params={{steps: 20, lr: 1e-2}}' {override}"
    )
    (run,) = (file.parent for file in shell.path.glob("runs/*/config.yaml"))
    assert 0.2 < status(run)["result"]["validation_loss"] < 0.3  # of 1


def test_the_example_of_a_script_runs_under_torchrun(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "jobkit")
    (shell.path / "myscript.py").write_text(block(TRAINING, "jobkit.init(params="))
    shell.type("torchrun --nproc_per_node=2 myscript.py")
    (run,) = (file.parent for file in shell.path.glob("runs/*/config.yaml"))
    assert (status(run)["state"], status(run)["step"]) == ("finished", 20)
