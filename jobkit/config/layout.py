"""How the ranks of a run divide the work: copies of the model, shards of it, parts of a layer, stages. Without torch.

    config.parallel, world size --factor--> Layout(pipeline, replicas, shards, tensor)

The submission checks a YAML by `check`, the supervisor asks on how many nodes the ranks fit, and each rank makes its
meshes from the Layout (parallel/parallelizer.py).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from jobkit.config.schema import ALL, AUTO, Config
from jobkit.errors import InputError

SHARDED = ("zero2", "zero3", "hsdp")
"""Kinds of data parallelism that shard parameters, by torch's fully_shard."""


@dataclass(frozen=True)
class Layout:
    """The axes of the ranks, outermost first; their product is the world size.

    Layout(pipeline=2, replicas=2, tensor=2).data_rank(5)      # 0
    """

    pipeline: int = 1
    """Stages, each on other ranks."""
    replicas: int = 1
    """Copies of a whole, possibly sharded, model."""
    shards: int = 1
    """Ranks that share the parameters, gradients and optimizer state of a copy."""
    tensor: int = 1
    """Ranks that compute each layer together."""

    @property
    def data(self) -> int:
        """Ranks, or groups of ranks, that work on samples of their own."""
        return self.replicas * self.shards

    def data_rank(self, rank: int) -> int:
        """Return the number of the rank's share of a global batch: the same for ranks that compute it together."""
        return rank // self.tensor % self.data

    def stage(self, rank: int) -> int:
        """Return the stage of the pipeline that a rank has."""
        return rank // (self.tensor * self.data)


def factor(config: Config, world_size: int, ranks_per_node: int) -> Layout:
    """Return the Layout of so many ranks. Raises InputError where they do not divide that way."""
    parallel = config.parallel
    tensor = world_size if parallel.tensor == ALL else int(parallel.tensor)
    pipeline = world_size // math.gcd(world_size, tensor) if parallel.pipeline == ALL else int(parallel.pipeline)
    if world_size % (tensor * pipeline):
        key = "parallel.tensor" if pipeline == 1 else "parallel.pipeline"
        raise InputError(
            f"{world_size} rank(s) do not divide by tensor x pipeline = {tensor} x {pipeline}",
            key=key,
            hint="choose resources.nodes and resources.tasks_per_node to fit",
        )
    data = world_size // (tensor * pipeline)
    if parallel.data != "hsdp":
        is_sharded = parallel.data in SHARDED
        return Layout(pipeline, 1 if is_sharded else data, data if is_sharded else 1, tensor)
    shards = max(1, min(data, ranks_per_node // tensor)) if parallel.shards == AUTO else int(parallel.shards)
    if data % shards:
        raise InputError(f"{data} data-parallel rank(s) do not divide by it", key="parallel.shards", found=shards)
    return Layout(pipeline, data // shards, shards, tensor)


def check(config: Config, world_size: int, ranks_per_node: int) -> Layout:
    """Return the Layout of a config. Raises InputError, with the key, for a product that cannot work."""
    parallel, comm = config.parallel, config.comm
    layout = factor(config, world_size, ranks_per_node)
    is_ddp = parallel.data in ("ddp", "zero1") and layout.tensor == 1
    is_plain = parallel.data == "ddp" and layout.tensor == 1 and layout.pipeline == 1
    for key, is_wrong, words in (
        ("parallel.shards", parallel.shards != AUTO and parallel.data != "hsdp", "is for data: hsdp"),
        (
            "parallel.microbatches",
            parallel.microbatches != AUTO and parallel.pipeline == 1,
            "is for a pipeline; ctx.backward(..., micro_batch_size=...) accumulates gradients",
        ),
        (
            "parallel.offload",
            parallel.offload and (parallel.data not in SHARDED or layout.tensor > 1 or layout.pipeline > 1),
            f"is for data: {', '.join(SHARDED)}, without tensor and pipeline",
        ),
        (
            "parallel.data",
            parallel.data == "zero1" and layout.tensor > 1,
            "does not go with tensor: ZeroRedundancyOptimizer takes no DTensors; use zero2 or ddp",
        ),
        (
            "parallel.tensor",
            layout.tensor > ranks_per_node,
            f"spans nodes of {ranks_per_node} rank(s): every layer would wait for the network",
        ),
        ("comm.hook", comm.hook != "none" and not is_ddp, "compresses DDP's gradients: use ddp or zero1"),
        (
            "comm.hook",
            comm.hook == "bf16" and config.resources.devices_per_rank == 0,
            "needs a GPU: gloo cannot add bfloat16; use fp16 or powersgd",
        ),
        (
            "comm.hook",
            comm.hook == "powersgd" and (layout.pipeline > 1 or config.precision == "fp16"),
            "keeps what it has not sent: neither a pipeline nor an overflow of fp16 may disturb that; use hook: fp16",
        ),
        ("comm.local_sgd", comm.local_sgd > 1 and not is_plain, "is for ddp alone"),
        (
            "comm.local_sgd",
            comm.local_sgd > 1 and comm.hook != "none",
            "exchanges no gradients: leave comm.hook out",
        ),
    ):
        if is_wrong:
            raise InputError(words, key=key, found=operator.attrgetter(key)(config))
    return layout
