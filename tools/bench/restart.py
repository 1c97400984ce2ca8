"""What a death costs: from the kill of a rank, or of a node, to the first new step, part by part.

In place, beside a requeue of the same job and a plain srun of the same function from nothing, 2 nodes x 2 ranks. And
what a preemption costs, without the wait in the queue: from the signal until the job has asked to be requeued, and from
the prolog of its next start to the first new step.
Starts a private Slurm for itself, with the times that Slurm has by default:
    python tools/bench/restart.py --repeats 5
    python tools/bench/restart.py --repeats 5 --cred-expire 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from measured import Row, absolute, tell
from slurm_cluster import Cluster, wait_until
from slurm_run import Run, read, write_project

PLAIN = """\
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(32, 64)).square().mean().backward()
optimizer.step()
if rank == 0:
    Path(sys.argv[2]).write_text(str(time.time()))
dist.barrier()
os._exit(0)  # torch aborts now and then in its own teardown
"""

PARTS = ("notice", "kill", "start", "load", "step")


def seconds_of_a_preemption(run: Run, cluster: Cluster, starts: Path) -> float:
    """From the loss of its nodes to a job of higher priority until the first new step, without the queue."""
    time.sleep(2.5)
    job_id = run.status()["job_id"]
    cluster.preempt(job_id)
    signalled = time.time()
    run.attempt += 1
    first_step = run.first_step(run.attempt)
    requeued = max(one["time"] for one in run.events("requeued"))
    begun = [
        float(when) for job, when in map(str.split, starts.read_text(encoding="utf-8").splitlines()) if job == job_id
    ]
    return requeued - signalled + first_step - min(when for when in begun if when > requeued)


def parts_of(run: Run) -> list[dict[str, float]]:
    """What each restart took, part by part."""
    time.sleep(1.0)  # the journal gets the first step's event within that
    return [one["restart"] for one in run.status()["attempts"] if one["restart"]]


def plain(project: Path, environment: dict[str, str], repeat: int) -> float:
    """A plain srun of the same steps, from nothing to the first one."""
    started = time.time()
    command = ["srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, "plain.py"]
    files = [str(project / f"rendezvous_{repeat}"), str(project / f"plain_{repeat}")]
    subprocess.run([*command, *files], cwd=project, env=environment, check=True, capture_output=True)
    return float(read(project / f"plain_{repeat}")) - started


class Plain:
    """Plain sruns before and after a run, which has its nodes as long as it is: the machine may be slower by then."""

    def __init__(self, project: Path, environment: dict[str, str], repeats: int) -> None:
        self.project, self.environment, self.seconds = project, environment, list[float]()
        self.before, self.after = repeats - repeats // 2, max(1, repeats // 2)

    def measure(self, number: int) -> None:
        for _ in range(number):
            self.seconds.append(plain(self.project, self.environment, len(self.seconds)))

    def over(self, ours: list[float]) -> list[float]:
        """Ours, over what is in the middle of them."""
        return [one / statistics.median(self.seconds) for one in ours]


def report(name: str, seconds: list[float], parts: list[dict[str, Any]]) -> None:
    words = [
        f"{part} {statistics.median(known):.2f}"
        for part in PARTS
        if (known := [one[part] for one in parts if one.get(part) is not None])
    ]
    spread = f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}"
    print(f"{name:28} {spread}   {', '.join(words)}", flush=True)


PROLOG = """\
#!/bin/sh
echo $SLURM_JOB_ID $(date +%s.%N) >> {starts}
"""


def preempted(project: Path, folder: Path, repeats: int) -> None:
    """What the queue waits for is taken out, so a requeued job need not wait for two minutes here."""
    prolog, starts = folder / "prolog", folder / "starts"
    prolog.write_text(PROLOG.format(starts=starts), encoding="utf-8")
    prolog.chmod(0o755)
    with Cluster(folder / "slurm", nodes=2, cred_expire=5, prolog=str(prolog)) as cluster:
        environment = {**os.environ, **cluster.env, "OMP_NUM_THREADS": "1"}
        bare = Plain(project, environment, repeats)
        bare.measure(bare.before)
        run = Run(project, environment)
        seconds = [seconds_of_a_preemption(run, cluster, starts) for _ in range(repeats)]
        run.jobkit("cancel", run.path.name)
        wait_until(lambda: not cluster.command("squeue", "--noheader"), "the queue to be empty")
        bare.measure(bare.after)
    report("preempted, without the queue", seconds, [])
    report("plain srun, from nothing", bare.seconds, [])
    note = absolute(seconds, bare.seconds)
    tell(Row("preempted to next step, queue taken out", PLAIN_SRUN, bare.over(seconds), 1.2, note=note))


PLAIN_SRUN = "plain srun of the same function, from nothing"


def deaths(project: Path, folder: Path, repeats: int, cred_expire: int) -> None:
    with Cluster(folder / "slurm", nodes=3, cred_expire=cred_expire) as cluster:
        environment = {**os.environ, **cluster.env, "OMP_NUM_THREADS": "1"}
        bare = Plain(project, environment, repeats)
        bare.measure(bare.before)
        run = Run(project, environment, "resources.spares=1")
        in_place = [run.seconds_after(lambda: run.kill_rank(3)) for _ in range(repeats)]
        parts = parts_of(run)
        report("a rank, in place", in_place, parts)
        lost = run.seconds_after(lambda: cluster.kill_node("node2"))
        report("a node, with a spare", [lost], parts_of(run)[repeats:])
        restarts = int(cluster.job(run.status()["job_id"])["Restarts"])
        run.jobkit("cancel", run.path.name)
        cluster.restart_node("node2")
        bare.measure(bare.after)
        report("plain srun, from nothing", bare.seconds, [])
        note = f"{absolute(in_place, bare.seconds)}; the job was requeued {restarts} times"
        tell(Row("dead rank to next step", PLAIN_SRUN, bare.over(in_place), 0.5, note=note))
        tell(Row("lost node to next step, with a spare", PLAIN_SRUN, bare.over([lost]), note=f"{lost:.2f} s"))
        run = Run(project, environment, "retry.in_place=false")
        requeued = run.seconds_after(lambda: run.kill_rank(3))
        report("a rank, requeued", [requeued], parts_of(run))
        run.jobkit("cancel", run.path.name)
        note = f"{requeued:.1f} s with cred_expire={cred_expire}"
        tell(
            Row("dead rank to next step by a requeue", "in place", [requeued / statistics.median(in_place)], note=note)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["deaths", "preempted"], help="default: both")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cred-expire", type=int, default=120, help="where ranks and nodes die")
    options = parser.parse_args()
    for part in [options.part] if options.part else ["deaths", "preempted"]:
        with tempfile.TemporaryDirectory(prefix="jobkit-bench-", dir="/tmp") as folder:
            project = Path(folder) / "project"
            write_project(project, nodes=2, tasks=2, pause=0.02)
            (project / "plain.py").write_text(PLAIN, encoding="utf-8")
            if part == "deaths":
                deaths(project, Path(folder), options.repeats, options.cred_expire)
            else:
                preempted(project, Path(folder), options.repeats)


if __name__ == "__main__":
    main()
