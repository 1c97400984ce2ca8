"""What an event and a status of a run cost by the length of its journal, and what reading all of it once costs.

Long and short journals alternate within one run, so that a busy machine slows both:
    python tools/bench/journal.py --checkpoints 86400 864000
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jobkit.run.events import Event
from jobkit.run.journal import encode
from jobkit.run.rundir import RunDir

READ_ALL = """
import resource, sys, time
from jobkit.run.rundir import RunDir
run = RunDir(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.perf_counter()
run.status()
print(time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def make(path: Path, checkpoints: int) -> RunDir:
    """A run that trains and has made so many checkpoints."""
    run = RunDir(path)
    path.mkdir()
    with run.journal.path.open("wb") as file:
        file.write(encode({"time": 1.0, "event": "submitting", "cluster": "slurm", "scheduler": "slurm"}))
        file.write(encode({"time": 2.0, "event": "started", "attempt": 1, "job_id": "7", "host": "n1"}))
        file.write(encode({"time": 3.0, "event": "resumed", "attempt": 1, "step": 0, "total_steps": 10**8}))
        for number in range(checkpoints):
            event = {"event": "checkpoint", "attempt": 1, "step": 100 * number, "seconds": 1.234, "stall": 0.012}
            file.write(encode({"time": 4.0 + number, **event, "bytes": 1234567890}))
    return run


def seconds(work: Callable[[], object]) -> float:
    """What a call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def reading_all(run: RunDir) -> tuple[float, float]:
    """Seconds, and MiB of memory, that a process needs which finds nothing kept of the journal."""
    run.fold_file.unlink(missing_ok=True)
    command = [sys.executable, "-c", READ_ALL, str(run.path)]
    took, kilobytes = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout.split()
    return float(took), int(kilobytes) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[86_400])
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="jobkit-bench-") as folder:
        runs = {
            length: make(Path(folder) / str(length), length) for length in [arguments.short, *arguments.checkpoints]
        }
        read = {length: reading_all(run) for length, run in runs.items()}
        times: dict[str, dict[int, list[float]]] = {
            what: {length: [] for length in runs} for what in ("event", "status")
        }
        for length, run in runs.items():
            run.write_status()  # keeps what it has read
            print(json.dumps({"checkpoints": length, "read_all_s": round(read[length][0], 4), "mib": read[length][1]}))
        for step in range(arguments.repeats):
            for length, run in runs.items():
                event = {"attempt": 1, "step": 10**8 + step, "seconds": 1.2}
                times["event"][length].append(
                    seconds(lambda run=run, event=event: run.record(Event.CHECKPOINT, **event))
                )
                times["status"][length].append(seconds(run.status))
        for what, found in times.items():
            median = {length: statistics.median(values) for length, values in found.items()}
            for length in arguments.checkpoints:
                ratio = round(median[length] / median[arguments.short], 2)
                print(json.dumps({f"{what}_ms": round(median[length] * 1e3, 2), "checkpoints": length, "ratio": ratio}))


if __name__ == "__main__":
    main()
