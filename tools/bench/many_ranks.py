"""64 ranks against 16, per rank: start, agree on a stop, write a checkpoint, restart in place.

All on one machine, on nodes of a private Slurm: 8 nodes x 8 tasks, then 2 x 8. What a rank costs should not grow with
their number. 64 ranks take about 10 GiB of memory; with less than --least-memory left it does not begin:
    python tools/bench/many_ranks.py
    python tools/bench/many_ranks.py --many 2x2 --few 1x2     # in small
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from measured import Row, missing, ratios, tell
from slurm_cluster import Cluster, wait_until
from slurm_run import Run, write_project

LEAN = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Little memory a process."""

START, STOP, CHECKPOINT, RESTART = "start", "agree on a stop", "checkpoint", "restart in place"


def measure(nodes: int, tasks: int, repeats: int, patience: float, folder: Path) -> dict[str, list[float]]:
    """Seconds of each part of a run with so many ranks."""
    project = folder / "project"
    write_project(project, nodes=nodes, tasks=tasks, pause=0.05)
    times: dict[str, list[float]] = {part: [] for part in (START, STOP, CHECKPOINT, RESTART)}
    # Patient daemons, as in tests/soak/sixty_four.py: so many processes on few cores keep everybody waiting.
    with Cluster(folder / "slurm", nodes=nodes, cpus=tasks, gpus=0, grace=120, kill_wait=60, cred_expire=5) as cluster:
        run = Run(project, cluster.env | LEAN, "checkpoint.every=5s", "watchdog=15min", patience=patience)
        times[START].append(run.seconds_of_start)
        for _ in range(repeats):  # after some checkpoints, and a snapshot
            times[RESTART].append(run.seconds_after(lambda: run.kill_rank(nodes * tasks - 1), after=15))
        time.sleep(15)
        times[CHECKPOINT] = [one["seconds"] for one in run.events("checkpoint")]
        known, began = len(times[CHECKPOINT]), time.time()
        run.jobkit("cancel", run.path.name)  # which saves, once all ranks have agreed
        wait_until(lambda: not cluster.command("squeue", "--noheader"), "the job to end", patience)
        last = run.events("checkpoint")[known:]
        if not last:
            raise SystemExit("the run was cancelled without a checkpoint")
        times[STOP].append(last[-1]["time"] - last[-1]["seconds"] - began)
    return times


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) / (1 << 20)


def shape(text: str) -> tuple[int, int]:
    nodes, _, tasks = text.partition("x")
    return int(nodes), int(tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--many", type=shape, default=(8, 8), metavar="NODESxTASKS", help="default: 8x8")
    parser.add_argument("--few", type=shape, default=(2, 8), metavar="NODESxTASKS", help="default: 2x8")
    parser.add_argument("--repeats", type=int, default=3, help="of the restart in place")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for each part of it (default: 900)")
    parser.add_argument("--least-memory", type=float, default=14.0, help="GiB for 64 ranks, in proportion for others")
    options = parser.parse_args()
    numbers = {size: size[0] * size[1] for size in (options.many, options.few)}
    many, few = numbers[options.many], numbers[options.few]
    what, against = f"{many} ranks ({options.many[0]} x {options.many[1]}), one machine", f"{few} ranks, per rank"
    if (left := available_gib()) < (needed := options.least_memory * many / 64):
        for part in (START, STOP, CHECKPOINT, RESTART):
            tell(missing(f"{what}: {part}", against, f"{left:.0f} GiB of memory left, {needed:.0f} needed", 1.3))
        return
    times = {}
    for size, ranks in numbers.items():
        with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
            times[ranks] = measure(*size, options.repeats, options.patience, Path(folder))
        print(f"{ranks} ranks: {times[ranks]}", flush=True)
    for part in (START, STOP, CHECKPOINT, RESTART):
        ours, theirs = (statistics.median(times[ranks][part]) for ranks in (many, few))
        repeats = min(len(times[many][part]), len(times[few][part]))
        values = [value * few / many for value in ratios(times[many][part][:repeats], times[few][part][:repeats])]
        note = f"{ours:.2f} s with {many} ranks, {theirs:.2f} s with {few}"
        tell(Row(f"{what}: {part}", against, values, 1.3, note=note))


if __name__ == "__main__":
    main()
