"""What a submission costs: `jobkit.submit` until the job id, against bare Submitit and `sbatch`; and `--help`.

Starts a private Slurm for itself:
    python tools/bench/submit.py --repeats 9
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measured import Row, absolute, ratios, tell
from slurm_cluster import Cluster

TASK = "def train(ctx):\n    return None\n"

YAML = """\
name: bench
task: mytask:train
params: {number: 0}
resources: {nodes: 2, tasks_per_node: 2, time: "0:05:00"}
clusters: {slurm: {partition: low, hold: true}}
"""

BARE = """\
import submitit

from mytask import train

executor = submitit.SlurmExecutor(folder="logs")
executor.update_parameters(
    partition="low", time=5, nodes=2, ntasks_per_node=2, cpus_per_task=1, additional_parameters={"hold": True}
)
print(executor.submit(train, None).job_id)
"""

SBATCH = ["sbatch", "--hold", "--partition=low", "--nodes=2", "--output=/dev/null", "--wrap=true"]


def seconds(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Wall time of a command that must succeed."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8")
    elapsed = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    python = sys.executable
    ours: list[float] = []
    bare: list[float] = []
    help_: list[float] = []
    sbatch: list[float] = []
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
        project = Path(folder) / "project"
        project.mkdir()
        (project / "mytask.py").write_text(TASK, encoding="utf-8")
        (project / "bare.py").write_text(BARE, encoding="utf-8")
        (project / "bench.yaml").write_text(YAML, encoding="utf-8")
        with Cluster(Path(folder) / "slurm", nodes=2) as cluster:
            environment = {**os.environ, **cluster.env}
            environment.pop("PYTHONDONTWRITEBYTECODE", None)  # with it jobkit is compiled anew at each start
            for repeat in range(repeats + 1):
                submit = [python, "-m", "jobkit.submit", "bench.yaml", "--cluster", "slurm", f"params.number={repeat}"]
                times = (
                    seconds(submit, project, environment),
                    seconds([python, "bare.py"], project, environment),
                    seconds([python, "-m", "jobkit.submit", "--help"], project, environment),
                    seconds(SBATCH, project, environment),
                )
                if repeat:  # the first warms the disk's cache
                    for values, value in zip((ours, bare, help_, sbatch), times, strict=True):
                        values.append(value)
    tell(Row("submission until the job id", "bare Submitit", ratios(ours, bare), 3.0, note=absolute(ours, bare)))
    tell(Row("submission until the job id", "sbatch alone", ratios(ours, sbatch), note=absolute(ours, sbatch)))
    tell(Row("submission until the job id", "", ours, 0.4, "s"))
    tell(Row("`jobkit submit --help`", "", help_, 0.1, "s"))


if __name__ == "__main__":
    main()
