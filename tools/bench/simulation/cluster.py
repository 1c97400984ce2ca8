"""The machines that a simulated run is on: how often what happens to it, and what each thing costs.

Of each number it is said where it is from. *Measured*: in docs/evidence.md or docs/guarantees.md, on one machine.
*Read*: Kokolis and others, "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", 2024, arXiv
2410.21680, or the table of interruptions in "The Llama 3 Herd of Models", 2024. *Assumed*: neither; change it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

HOUR = 3600.0
DAY = 24 * HOUR

MTTF_HOURS = {8: 47.7 * 24, 1024: 7.9, 16384: 1.8}
"""Mean time to a failure of a job on so many GPUs (read; the last is the paper's own projection)."""


def mttf(gpus: int) -> float:
    """Seconds between two failures of a job: MTTF_HOURS, and a power law between and beyond its points."""
    points = [math.log(size) for size in MTTF_HOURS], [math.log(hours) for hours in MTTF_HOURS.values()]
    sizes, hours = (list(one) for one in points)
    right = next((at for at, size in enumerate(sizes[1:], start=1) if math.log(gpus) <= size), len(sizes) - 1)
    slope = (hours[right] - hours[right - 1]) / (sizes[right] - sizes[right - 1])
    return math.exp(hours[right] + slope * (math.log(gpus) - sizes[right])) * HOUR


CAUSES = {"rank": 0.45, "gpu": 0.20, "node": 0.20, "hang": 0.15}
"""Shares of all failures (assumed; in Llama 3's table hardware has three quarters and software an eighth, most of it
such that the processes die first). `rank`: a process dies, and its node is as good as before. `gpu`: a process dies,
and so does each that is started on that node, until it is repaired. `node`: it is gone. `hang`: nobody dies."""

PREEMPTED = "preempted"
"""The cause in a trace that is nobody's failure: the job is told to stop, and has the grace to save."""

LEMONS = 0.012
"""Of all nodes, how many fail again and again (read: 1.2 % of the fleet)."""

LEMON_SHARE = 0.3
"""Of all failures, how many are those nodes' (assumed)."""


@dataclass(frozen=True)
class Cluster:
    """A job's size and what surrounds it; times in seconds."""

    gpus: int
    queue: float = HOUR
    """What each job waits in the queue, the first one not counted."""
    gpus_per_node: int = 8
    mttf: float | None = None
    """None for what `mttf()` says of so many GPUs."""
    causes: dict[str, float] = field(default_factory=lambda: dict(CAUSES))
    lemon_share: float = LEMON_SHARE
    preempted_every: float = 7 * DAY
    """Mean time between two preemptions (assumed)."""
    time_limit: float = DAY
    """Of each job: `resources.time` (assumed)."""
    person: float = 4 * HOUR
    """Until somebody sees that a run has failed, and submits it again (assumed: a night is longer)."""
    repair: float = DAY
    """Until a node that is gone, or has a broken GPU, can be used again (assumed)."""

    stall: float = 1.0
    """For how long the loop stands still for a checkpoint, or a snapshot in memory: one copy of the state (measured:
    0.84 to 1.03 of a plain copy; 2 GB for each GPU at 2 GB/s assumed)."""
    durable: float = 30.0
    """Until a checkpoint is on the disk, and as long to read one (assumed)."""
    step: float = 5.0
    """What a step takes; only the watchdog and whole steps depend on it (assumed)."""

    notice_death: float = 0.5
    """Until the supervisor knows that a rank has died, and has ended the others (measured: 0.2)."""
    notice_node: float = 14.0
    """The same of a node (measured: 14 without power)."""
    batch_node: float = 20.0
    """Until another node of the job has requeued it, where the node of the batch script dies (measured)."""
    slurmd_timeout: float = 300.0
    """Until Slurm notices that (Slurm's default)."""
    credential: float = 121.0
    """What Slurm lets each requeued job wait before it even queues (measured; Slurm's default)."""

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def mean_time_to_failure(self) -> float:
        return self.mttf if self.mttf is not None else mttf(self.gpus)

    @property
    def restart_in_place(self) -> float:
        """From forked ranks to the first step, without reading a checkpoint: measured are 0.4 s for 4 ranks and 12 s
        for 64 on two cores. Assumed: devices and groups take 3 s, and 2 s for each doubling of the ranks."""
        return 3.0 + 2.0 * math.log2(self.gpus)

    @property
    def start(self) -> float:
        """From a job's start to the first step: `setup`, imports from a shared disk, groups. Assumed, about the 5
        minutes that the paper reckons with for large jobs: a minute, and 20 s for each doubling of the ranks."""
        return 60.0 + 20.0 * math.log2(self.gpus)

    @property
    def fleet(self) -> int:
        """How many nodes the job may get some of."""
        return self.nodes + max(16, self.nodes // 20)


@dataclass(frozen=True)
class Trace:
    """What happens, in order: when (seconds), what, and to which node of the fleet. The same for all policies."""

    times: list[float]
    causes: list[str]
    nodes: list[int]


def draw_trace(cluster: Cluster, horizon: float, seed: int) -> Trace:
    """A trace of `horizon` seconds: Poisson processes of all nodes of the fleet, some of which are lemons."""
    random = np.random.default_rng([seed, cluster.gpus])
    rate = 1.0 / (cluster.mean_time_to_failure * cluster.nodes)
    rates = np.full(cluster.fleet, rate * (1.0 - cluster.lemon_share))
    rates[random.random(cluster.fleet) < LEMONS] += rate * cluster.lemon_share / LEMONS
    counts = random.poisson(rates * horizon)
    nodes = np.repeat(np.arange(cluster.fleet), counts)
    causes = random.choice(list(cluster.causes), size=len(nodes), p=list(cluster.causes.values()))
    preemptions = random.poisson(horizon / cluster.preempted_every)
    times = random.random(len(nodes) + preemptions) * horizon
    nodes = np.concatenate([nodes, np.zeros(preemptions, dtype=nodes.dtype)])
    causes = np.concatenate([causes.astype(object), np.full(preemptions, PREEMPTED, dtype=object)])
    order = np.argsort(times)
    return Trace(times[order].tolist(), causes[order].tolist(), nodes[order].tolist())
