"""What is compared: jobkit with its defaults and with others, and what peers do when the same happens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from bench.simulation.cluster import DAY, Cluster

from jobkit.run.config import CheckpointConfig, Config, Resources, RetryConfig


@dataclass(frozen=True)
class Policy:
    """How a run is kept going."""

    name: str
    retry: RetryConfig | None = field(default_factory=RetryConfig)
    """What jobkit's decide() gets. None: what is in `survives` puts the job back into the queue, and anything else ends
    it until a person comes."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    spares: int = 0
    spare_share: float = 0.0
    """Of the nodes, how many `min_nodes` lets the run go on without."""
    survives: frozenset[str] = frozenset()
    saves_at: frozenset[str] = frozenset()
    """Causes for which a last checkpoint is written, without `retry`."""
    blocks: bool = False
    """Whether the loop stands still until a checkpoint is on the disk."""
    ideal: bool = False
    """Whether whatever fails is replaced at once, so that the job never loses its nodes by a failure."""
    hang_notice: float | None = None
    """Seconds until a hang is noticed; None for jobkit's watchdog."""

    def config(self, cluster: Cluster) -> Config:
        """The YAML of it."""
        fewest = max(1, math.floor(cluster.nodes * (1 - self.spare_share)))
        return Config(
            name="simulated",
            task="simulated:train",
            resources=Resources(
                nodes=cluster.nodes,
                tasks_per_node=min(cluster.gpus, cluster.gpus_per_node),
                spares=self.spares,
                min_nodes=fewest if fewest < cluster.nodes else "all",
                time=round(min(cluster.time_limit, 365 * DAY)),
            ),
        )


JOBKIT = Policy("jobkit, defaults")

NCCL_TIMEOUT = 600.0
"""After which PyTorch ends processes that wait for one another, without a watchdog (its default)."""


def jobkit(
    name: str, *, spares: int = 0, spare_share: float = 0.0, retry: dict[str, Any] | None = None, **checkpoint: Any
) -> Policy:
    """jobkit with other settings than its defaults: of `retry:` and of `checkpoint:`."""
    return Policy(
        f"jobkit, {name}",
        retry=RetryConfig(**(retry or {})),
        checkpoint=CheckpointConfig(**checkpoint),
        spares=spares,
        spare_share=spare_share,
    )


SPARES = {15: 0, 63: 1, 255: 2, 1023: 4, 10**9: 8}
"""Up to so many nodes -> spares: more than those are no use (`simulate.py --spares`)."""


def spares_for(nodes: int) -> int:
    """How many spares docs/clusters.md asks for."""
    return next(spares for most, spares in SPARES.items() if nodes <= most)


def young(cost: float, between: float) -> CheckpointConfig:
    """A fixed interval, by J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974."""
    return CheckpointConfig(every=f"{math.sqrt(2 * cost * between):.3f}s", memory="off")


def youngs_optimum(cluster: Cluster) -> Policy:
    """What checkpoints on the disk can reach at best: whatever fails is replaced at once, within the job, and their
    interval is Young's for a time between failures that is known beforehand."""
    checkpoint = young(cluster.stall, cluster.mean_time_to_failure)
    return Policy("Young's optimum", RetryConfig(), checkpoint, ideal=True, hang_notice=300.0)


def peers(cluster: Cluster) -> list[Policy]:
    """Submitit's and Lightning's own requeueing, as measured (the README's table), and both with the best interval for
    checkpoints that hold up the loop until they are on the disk.

    Submitit's continues from its last checkpoint after a preemption and at a time limit; that it may begin at step 0 is
    not held against it. Lightning's saves at the time limit; a preemption with grace ends the run. Of both a dead rank,
    a hang and a lost node end the run, except the node of the batch script, for which Slurm requeues the job.
    """
    unsaved = 1 / cluster.mean_time_to_failure + 1 / cluster.preempted_every
    own = Policy(
        "Submitit's pattern",
        retry=None,
        checkpoint=young(cluster.durable, 1 / (unsaved + 1 / cluster.time_limit)),
        survives=frozenset({"preempted", "timeout", "batch_node"}),
        blocks=True,
        hang_notice=NCCL_TIMEOUT,
    )
    lightning = replace(
        own,
        name="Lightning, auto_requeue",
        checkpoint=young(cluster.durable, 1 / unsaved),
        survives=frozenset({"timeout", "batch_node"}),
        saves_at=frozenset({"timeout"}),
    )
    return [own, lightning]
