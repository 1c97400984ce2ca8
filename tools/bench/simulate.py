"""Goodput of runs on 8 to 16,384 GPUs, by discrete events: jobkit's own decisions against traces of failures.

What may happen and what each thing costs, and where those numbers are from, is in simulation/cluster.py; what is
compared in simulation/policy.py. Everything is drawn by --seed. About a minute on one core:
    python tools/bench/simulate.py
    python tools/bench/simulate.py --draw docs/goodput.png
    python tools/bench/simulate.py --settings          # what the defaults are chosen by
    python tools/bench/simulate.py --spares            # how many to ask for
    python tools/bench/simulate.py --table             # the row for tools/bench/all.py
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.simulation.cluster import DAY, HOUR, Cluster, draw_trace
from bench.simulation.policy import JOBKIT, Policy, jobkit, peers, spares_for, youngs_optimum
from bench.simulation.run import Run

SIZES = (8, 64, 256, 1024, 4096, 16384)
QUEUES = (0.0, 1.0, 6.0)

Policies = Callable[[Cluster], Sequence[Policy]]


@dataclass
class Played:
    """A policy on a cluster, over all traces."""

    gpus: int
    queue_hours: float
    policy: str
    goodputs: list[float]
    """One for each trace."""
    shares: dict[str, float]
    """Of the time, by what it went to: the mean."""
    attempts: float
    requeued: float
    resubmitted: float
    """How often a person had to."""
    nodes: int
    spares: int

    @property
    def goodput(self) -> float:
        return statistics.fmean(self.goodputs)

    @property
    def error(self) -> float:
        """Half of the 95 % confidence interval of the mean."""
        return 1.96 * statistics.stdev(self.goodputs) / len(self.goodputs) ** 0.5 if len(self.goodputs) > 1 else 0.0

    @property
    def per_node(self) -> float:
        """Goodput for each node that the job has, the spare ones counted."""
        return self.goodput * self.nodes / (self.nodes + self.spares)


def play(cluster: Cluster, policy: Policy, options: argparse.Namespace) -> Played:
    horizon = options.days * DAY
    runs = [
        Run(cluster, policy, draw_trace(cluster, horizon, options.seed + number), horizon)
        for number in range(options.traces)
    ]
    accounts = [asdict(run.play()) for run in runs]
    return Played(
        gpus=cluster.gpus,
        queue_hours=cluster.queue / HOUR,
        policy=policy.name,
        goodputs=[run.account.goodput for run in runs],
        shares={key: statistics.fmean(one[key] for one in accounts) / horizon for key in accounts[0]},
        attempts=statistics.fmean(len(run.attempts) for run in runs),
        requeued=statistics.fmean(run.requeued for run in runs),
        resubmitted=statistics.fmean(run.resubmitted for run in runs),
        nodes=cluster.nodes,
        spares=policy.spares,
    )


def compared(cluster: Cluster) -> list[Policy]:
    """The lines of the figure."""
    return [
        youngs_optimum(cluster),
        jobkit("spares", spares=spares_for(cluster.nodes)),
        JOBKIT,
        jobkit("without in_place", retry={"in_place": False}),
        *peers(cluster),
    ]


def settings(cluster: Cluster) -> list[Policy]:
    """What a default could be instead, each with the spares that docs/clusters.md asks for."""
    spares = spares_for(cluster.nodes)
    return [
        jobkit("defaults and spares", spares=spares),
        jobkit("memory: off", spares=spares, memory="off"),
        jobkit("memory: 1min", spares=spares, memory="1min"),
        *[jobkit(f"every: {every}", spares=spares, every=every) for every in ("5min", "30min", "2h")],
        *[jobkit(f"mtbf: {mtbf}", spares=spares, mtbf=mtbf) for mtbf in ("1h", "8h", "48h")],
        *[jobkit(f"exclude_after: {n}", spares=spares, retry={"exclude_after": n}) for n in (1, 3)],
        *[jobkit(f"node_failure: {n}", spares=spares, retry={"node_failure": n}) for n in (3, 100)],
        *[jobkit(f"crash: {n}", spares=spares, retry={"crash": n}) for n in (2, 10)],
    ]


def numbers_of_spares(cluster: Cluster) -> list[Policy]:
    """0 and more, and none with nodes that the run can do without."""
    some = [jobkit(f"spares: {n}", spares=n) for n in (0, 1, 2, 4, 8, 16)]
    return [*some, jobkit("min_nodes: 95 %", spare_share=0.05)]


def tell(played: Played) -> None:
    """A line for a person."""
    largest = sorted(played.shares.items(), key=lambda one: -one[1])
    lost = ", ".join(f"{name} {share:.1%}" for name, share in largest if name != "new" and share >= 0.0005)
    ends = f"{played.attempts:.0f} attempts, {played.requeued:.1f} requeued, {played.resubmitted:.1f} by a person"
    print(
        f"{played.gpus:6} GPUs  queue {played.queue_hours:g} h  {played.policy:30} "
        f"{played.goodput:.4f} +- {played.error:.4f}  for each node {played.per_node:.4f}  "
        f"{ends}  ({lost})",
        flush=True,
    )


def tell_rows(options: argparse.Namespace) -> None:
    """The row of tools/bench/all.py: 1,024 GPUs, and an hour in the queue."""
    cluster = Cluster(1024, 1 * HOUR)
    optimum, ours, defaults, *_, submitit, lightning = (play(cluster, policy, options) for policy in compared(cluster))
    row = "goodput, simulated: 1 h in the queue, 1,024 GPUs"
    for other, run, bound in ((optimum, ours, 0.97), (submitit, defaults, 1.0), (lightning, defaults, 1.0)):
        values = [round(mine / theirs, 4) for mine, theirs in zip(run.goodputs, other.goodputs, strict=True)]
        value = statistics.median(values)
        spares = f"with {run.spares} spares, {defaults.goodput:.3f} without" if run.spares else "with the defaults"
        told = {
            "row": row,
            "against": other.policy,
            "unit": "times",
            "value": value,
            "values": values,
            "bound": bound,
            "better": "higher",
            "met": value >= bound,
            "note": f"{run.goodput:.3f} ({spares}) against {other.goodput:.3f}; {options.traces} traces of "
            f"{options.days} days",
        }
        print(json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument("--queue", type=float, nargs="+", default=list(QUEUES), metavar="HOURS", help="of each requeue")
    parser.add_argument("--days", type=int, default=14, help="from the first start")
    parser.add_argument("--traces", type=int, default=10, help="of each size; more make the spread smaller")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stall", type=float, default=1.0, metavar="SECONDS", help="of the loop, for a checkpoint")
    parser.add_argument("--durable", type=float, default=30.0, metavar="SECONDS", help="until a checkpoint is written")
    parser.add_argument("--person", type=float, default=4.0, metavar="HOURS", help="until one submits a run again")
    parser.add_argument("--quick", action="store_true", help="two traces of four days: seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="a PNG; needs matplotlib")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--settings", action="store_true", help="compare values of `retry:` and `checkpoint:`")
    what.add_argument("--spares", action="store_true", help="compare numbers of spares")
    what.add_argument("--table", action="store_true", help="the row of tools/bench/all.py")
    options = parser.parse_args()
    if min(*options.gpus, options.days, options.traces) < 1 or min(*options.queue, options.person) < 0:
        parser.error("--gpus, --days and --traces are 1 or more, hours 0 or more")
    if options.stall <= 0 or options.durable < options.stall:
        parser.error("--stall is above 0, and --durable no shorter")
    if options.draw and importlib.util.find_spec("matplotlib") is None:
        parser.error("--draw needs matplotlib: pip install -e '.[bench]'")
    if options.quick:
        options.days, options.traces = min(options.days, 4), min(options.traces, 2)
    if options.table:
        tell_rows(options)
        return
    policies: Policies = settings if options.settings else numbers_of_spares if options.spares else compared
    played = []
    for gpus in options.gpus:
        for hours in options.queue:
            cluster = Cluster(
                gpus,
                hours * HOUR,
                stall=options.stall,
                durable=options.durable,
                person=options.person * HOUR,
            )
            for policy in policies(cluster):
                played.append(play(cluster, policy, options))
                tell(played[-1])
    if options.json:
        told = [{**asdict(one), "goodput": one.goodput, "error": one.error, "per_node": one.per_node} for one in played]
        options.json.write_text(
            json.dumps({"options": {**vars(options), "json": None, "draw": None}, "played": told}), encoding="utf-8"
        )
    if options.draw:
        from bench.simulation.draw import draw

        draw(played, options.draw)


if __name__ == "__main__":
    main()
