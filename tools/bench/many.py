"""What jobkit takes for many runs: to list thousands, to cancel a hundred in the queue, to submit a thousand at once.

Each part by itself, or all; the last two start a private Slurm:
    python tools/bench/many.py list --runs 10000
    python tools/bench/many.py cancel --runs 100
    python tools/bench/many.py sweep --runs 1000 --bare 1000
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measured import Row, tell
from slurm_cluster import Cluster

from jobkit.run.config import Config
from jobkit.run.events import Event
from jobkit.run.journal import encode
from jobkit.run.rundir import RunDir

CHECKPOINTS = 10
"""Of each run that is listed."""


def seconds(command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None) -> float:
    """Wall time of a command that must succeed, its start included."""
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    return time.perf_counter() - started


def told(name: str, times: Sequence[float]) -> None:
    spread = [round(min(times), 3), round(max(times), 3)]
    print(json.dumps({name: round(statistics.median(times), 3), "spread": spread}), flush=True)


# The list


def make(runs: Path, number: int) -> None:
    """A run that has finished in one attempt, as jobkit writes one."""
    run = RunDir(runs / f"bench-{number:08x}")
    config = Config(name="bench", task="mytask:train", seed=number % 3, params={"lr": 0.001 * (number % 7), "width": 8})
    for folder in (run.path, run.checkpoints, run.tensorboard, run.logs(1)):
        folder.mkdir(parents=True)
    run.write_config(config)
    own = {"attempt": 1, "job_id": str(number)}
    events = [{"event": Event.SUBMITTING, "cluster": "slurm", "scheduler": "slurm", **config.told()}]
    events += [{"event": Event.SUBMITTED, "job_id": str(number)}, {"event": Event.STARTED, "host": "n1", **own}]
    events += [{"event": Event.RESUMED, "step": 0, "total_steps": 1000, **own}]
    events += [{"event": Event.CHECKPOINT, "step": 100 * one, "seconds": 1.2, **own} for one in range(CHECKPOINTS)]
    events += [{"event": Event.FINISHED, "step": 1000, "result": {"accuracy": number % 1000 / 1000}, **own}]
    lines = [encode({"time": 1e9 + number + second, **event}) for second, event in enumerate(events)]
    run.journal.path.write_bytes(b"".join(lines))  # at once: an fsync for each would take an hour
    run.write_status()


def bench_list(count: int, repeats: int) -> None:
    """The list without an index and with one, beside a Python that does nothing."""
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
        runs, cache = Path(folder) / "runs", Path(folder) / "cache"
        runs.mkdir()
        for number in range(count):
            make(runs, number)
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        jobkit = [sys.executable, "-m", "jobkit", "list", "--runs-dir", str(runs)]
        where = ["--where", "params.lr>=0.003", "--sort", "-accuracy"]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "list of nothing": [sys.executable, "-m", "jobkit", "list", "--runs-dir", os.devnull],
            "list, without an index": jobkit,
            "list, with the index": jobkit,
            "list --where --sort": [*jobkit, *where],
            "list --group-by": [*jobkit, "--group-by", "params.lr,seed"],
            "status of a job": [sys.executable, "-m", "jobkit", "status", "1", "--runs-dir", str(runs)],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        for repeat in range(repeats + 1):
            for name, command in commands.items():
                if "without" in name:
                    shutil.rmtree(cache, ignore_errors=True)
                taken = seconds(command, environment)
                if repeat:  # the first reads the disk
                    times[name].append(taken)
        for name, found in times.items():
            told(f"{count} runs: {name}", found)
        for name in ("without an index", "with the index"):
            tell(Row(f"`jobkit list` of {count:,} runs, {name}", "", times[f"list, {name}"], 1.0, "s"))


# Cancelling

TASK = "def train(ctx):\n    return None\n"

YAML = """\
name: bench
task: mytask:train
params: {number: 0}
resources: {nodes: 1, tasks_per_node: 1, time: "0:05:00"}
clusters: {slurm: {partition: low, hold: true}}
"""

SCRIPT = "#!/bin/bash\nsleep 60\n"


@contextmanager
def _cluster(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A private Slurm, and a project beside it."""
    project = folder / "project"
    project.mkdir()
    (project / "mytask.py").write_text(TASK, encoding="utf-8")
    (project / "bench.yaml").write_text(YAML, encoding="utf-8")
    (project / "bare.sh").write_text(SCRIPT, encoding="utf-8")
    with Cluster(folder / "slurm", nodes=1) as started:
        yield project, {**os.environ, **started.env}


BARE_CANCEL = """\
import sys
import submitit

for job_id in sys.argv[1:]:
    submitit.SlurmJob("logs", job_id).cancel()
"""


def bench_cancel(count: int, repeats: int) -> None:
    """So many runs in the queue cancelled by one command, beside Submitit, a loop of scancel, and one of all."""
    ours: list[float] = []
    others: dict[str, tuple[list[str], list[float]]] = {
        "Submitit": ([sys.executable, "-c", BARE_CANCEL], []),
        "a loop of scancel": (["bash", "-ec", 'for id in "$@"; do scancel $id; done', "bash"], []),
        "one scancel of all": (["scancel"], []),
    }
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder, _cluster(Path(folder)) as started:
        project, environment = started
        for repeat in range(repeats):
            submit = [sys.executable, "-m", "jobkit.submit", "bench.yaml", "--cluster", "slurm"]
            for number in range(count):
                seconds([*submit, f"params.number={repeat * count + number}"], environment, project)
            cancel = [sys.executable, "-m", "jobkit", "cancel", "bench*", "--state", "queued,held", "-y"]
            ours.append(seconds(cancel, environment, project))
            for command, times in others.values():
                ids = [_queued(environment, project) for _ in range(count)]
                times.append(seconds([*command, *ids], environment, project))
            left = subprocess.run(
                ["squeue", "--noheader"], env=environment, capture_output=True, encoding="utf-8"
            ).stdout
            if left.strip():
                raise SystemExit(f"still queued: {left}")
    told(f"{count} queued runs: jobkit cancel", ours)
    for name, (_, times) in others.items():
        told(f"{count} queued jobs: {name}", times)


def _queued(environment: Mapping[str, str], project: Path) -> str:
    command = ["sbatch", "--parsable", "--hold", "--partition=low", "--output=/dev/null", "bare.sh"]
    done = subprocess.run(command, env=environment, cwd=project, capture_output=True, check=True, encoding="utf-8")
    return done.stdout.strip()


# A sweep

BARE = """\
import sys
import submitit
from mytask import train

executor = submitit.SlurmExecutor(folder="logs")
executor.update_parameters(
    partition="low", time=5, nodes=1, ntasks_per_node=1, cpus_per_task=1, additional_parameters={"hold": True}
)
for _ in range(int(sys.argv[1])):
    executor.submit(train, None)
"""


def bench_sweep(count: int, bare: int) -> None:
    """So many runs put into the queue as a sweep, beside `bare` submissions of Submitit's and as many by sbatch."""
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder, _cluster(Path(folder)) as started:
        project, environment = started
        (project / "bare.py").write_text(BARE, encoding="utf-8")
        sweep = [sys.executable, "-m", "jobkit.submit", "bench.yaml", "--cluster", "slurm", "--sweep"]
        first = seconds([*sweep, f"params.number=range({count})"], environment, project)
        told(f"{count} runs as a sweep", [first])
        told(
            f"{count} runs, the sweep once more",
            [seconds([*sweep, f"params.number=range({count})"], environment, project)],
        )
        subprocess.run(["scancel", "--me"], env=environment, check=True)
        submitit = seconds([sys.executable, "bare.py", str(bare)], environment, project)
        told(f"{bare} submissions of Submitit", [submitit])
        subprocess.run(["scancel", "--me"], env=environment, check=True)
        options = "--parsable --hold --partition=low --output=/dev/null"
        loop = f"for i in $(seq {bare}); do sbatch {options} bare.sh; done"
        told(f"{bare} times sbatch", [seconds(["bash", "-ec", loop], environment, project)])
        subprocess.run(["scancel", "--me"], env=environment, check=True)
        of_submitit = [first / count / (submitit / bare)]
        note = f"{first:.1f} s against {submitit:.1f} s for {bare:,}"
        tell(Row(f"sweep of {count:,} runs", "as many submissions of Submitit", of_submitit, 0.1, note=note))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["list", "cancel", "sweep"], help="default: all")
    parser.add_argument("--runs", type=int, help="default: 10000 listed, 100 cancelled, 1000 of a sweep")
    parser.add_argument("--bare", type=int, default=1000, help="submissions of Submitit, and of sbatch (default: 1000)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"load of this machine, {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}", flush=True)
    if arguments.part in (None, "list"):
        bench_list(arguments.runs or 10_000, arguments.repeats)
    if arguments.part in (None, "cancel"):
        bench_cancel(arguments.runs or 100, arguments.repeats)
    if arguments.part in (None, "sweep"):
        bench_sweep(arguments.runs or 1000, arguments.bare)


if __name__ == "__main__":
    main()
