"""What README and docs/clusters.md show of Slurm runs as it is shown."""

from __future__ import annotations

from pathlib import Path

from harness.documents import README, Shell, block
from harness.project import status, wait_for
from slurm_cluster import Cluster


def shell_with_the_example(path: Path, cluster: Cluster) -> Shell:
    shell = Shell(path / "jobkit", cluster.env)
    yaml = block(README, "task: mytask:train").replace("steps: 400", "steps: 4")
    (shell.path / "toy.yaml").write_text(yaml.replace("tasks_per_node: 2", "tasks_per_node: 1"))
    (shell.path / "mytask.py").write_text(block(README, "def train(ctx)"))
    return shell


def finish(shell: Shell, printed: str) -> None:
    run = Path(printed.split("run directory ")[1].splitlines()[0])
    wait_for("the end", lambda: status(run).get("state") == "finished", run)


def test_the_example_on_slurm(tmp_path: Path, slurm: Cluster) -> None:
    shell = shell_with_the_example(tmp_path, slurm)
    assert "#SBATCH --partition=low" in shell.type("python -m jobkit.submit toy.yaml --cluster slurm --dry-run")
    finish(shell, shell.type("python -m jobkit.submit toy.yaml --cluster slurm params.lr=3e-4 resources.nodes=1"))


def test_a_cluster_of_the_users_own(tmp_path: Path, slurm: Cluster) -> None:
    """One that is in the user's config file and not in the YAML."""
    shell = shell_with_the_example(tmp_path, slurm)
    yaml = shell.path / "toy.yaml"
    yaml.write_text("".join(line for line in yaml.open() if not line.startswith("clusters:")))
    (shell.path / "config.yaml").write_text("clusters: {h100: {partition: low, setup: ['true']}}\n")
    assert "h100 (slurm)" in shell.type("python -m jobkit.submit toy.yaml --cluster h100 --dry-run")
    assert "low is UP" in shell.type("python -m jobkit doctor --cluster h100 --nodes 2 --no-probe")
    finish(shell, shell.type("python -m jobkit.submit toy.yaml --cluster h100"))
