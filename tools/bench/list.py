"""How long `jobkit list` takes with thousands of runs, beside reading the same files and `ls -lR` of them.

The three take turns in one run, after all of it has been read once:
    python tools/bench/list.py --runs 10000
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from jobkit.run.files import write_json
from jobkit.run.journal import encode
from jobkit.run.rundir import RunDir

PLAIN = """
import os, sys
for entry in os.scandir(sys.argv[1]):
    for name in ("config.yaml", "events.jsonl"):
        os.stat(entry.path + "/" + name)
    with open(entry.path + "/status.json", "rb") as file:
        file.read()
"""


def make(runs: Path, number: int, checkpoints: int) -> None:
    """A run that has finished in one attempt."""
    run = RunDir(runs / f"bench-{number:08x}")
    for folder in (run.path, run.checkpoints, run.tensorboard, run.logs(1)):
        folder.mkdir(parents=True)
    run.config_file.write_text("name: bench\n", encoding="utf-8")
    own = {"attempt": 1, "job_id": str(number)}
    events = [{"event": "submitting", "cluster": "slurm", "scheduler": "slurm", "command": "python -m jobkit.submit x"}]
    events += [{"event": "submitted", "job_id": str(number)}, {"event": "started", "host": "n1", **own}]
    events += [{"event": "resumed", "step": 0, "total_steps": 1000, **own}]
    events += [{"event": "checkpoint", "step": 100 * one, "seconds": 1.2, **own} for one in range(checkpoints)]
    events += [{"event": "finished", "step": 1000, "result": {"loss": 0.5}, **own}]
    lines = [encode({"time": 1e9 + number + second, **event}) for second, event in enumerate(events)]
    run.journal.path.write_bytes(b"".join(lines))
    write_json(run.status_file, run.status().as_dict(), durable=False)


def seconds(command: Sequence[str]) -> tuple[float, float]:
    """What a command takes, and what of it it computes, its start included."""
    started, computed = time.perf_counter(), cpu()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started, cpu() - computed


def cpu() -> float:
    """Processor seconds of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=10, help="of each run")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
        for number in range(arguments.runs):
            make(Path(folder), number, arguments.checkpoints)
        commands = {
            "list": [sys.executable, "-m", "jobkit", "list", "--runs-dir", folder],
            "empty list": [sys.executable, "-m", "jobkit", "list", "--runs-dir", os.devnull],
            "status by name": [sys.executable, "-m", "jobkit", "status", f"bench-{1:08x}", "--runs-dir", folder],
            "status by job": [sys.executable, "-m", "jobkit", "status", "1", "--runs-dir", folder],
            "plain reading": [sys.executable, "-c", PLAIN, folder],
            "ls -lR": ["ls", "-lR", folder],
        }
        times = [{name: seconds(command) for name, command in commands.items()} for _ in range(arguments.repeats + 1)]
        for name in commands:
            wall, computed = (sorted(one[name][kind] for one in times[1:]) for kind in (0, 1))
            spread = [round(wall[0], 3), round(wall[-1], 3)]
            print(json.dumps({name: round(statistics.median(wall), 3), "spread": spread, "cpu": round(computed[0], 3)}))


if __name__ == "__main__":
    main()
