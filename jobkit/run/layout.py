"""How the ranks of a run divide the work: copies of the model, its shards, tensor and pipeline parts. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jobkit.run.config import ALL, CommConfig, Config, ParallelConfig, Resources

SHARDED = ("zero2", "zero3", "hsdp")
"""Kinds of data parallelism whose parameters are sharded (torch's fully_shard)."""


@dataclass(frozen=True)
class Layout:
    """The axes of the ranks, outermost first; rank 0 is the first of each. Their product is the world size."""

    pipeline: int = 1
    """Stages, each on other ranks."""
    replicas: int = 1
    """Copies of a whole, possibly sharded, model."""
    shards: int = 1
    """Ranks that share one copy's parameters, gradients and optimizer state."""
    tensor: int = 1
    """Ranks that compute each layer together."""

    @property
    def data(self) -> int:
        """Ranks, or groups of ranks, that work on samples of their own."""
        return self.replicas * self.shards

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def data_rank(self, rank: int) -> int:
        """Which share of a global batch a rank works on: the same for the ranks that compute it together."""
        return rank // self.tensor % self.data

    def stage(self, rank: int) -> int:
        """Which stage of the pipeline a rank has."""
        return rank // (self.tensor * self.data)


def factor(parallel: ParallelConfig, world_size: int, tasks_per_node: int) -> Layout:
    """The Layout of a world; ValueError, with what to change, where the world does not divide that way."""
    tensor = world_size if parallel.tensor == ALL else int(parallel.tensor)
    pipeline = world_size // math.gcd(world_size, tensor) if parallel.pipeline == ALL else int(parallel.pipeline)
    together = tensor * pipeline
    if world_size % together:
        parts = f"tensor {tensor} x pipeline {pipeline}" if min(tensor, pipeline) > 1 else f"{together}"
        which = "tensor x pipeline" if min(tensor, pipeline) > 1 else "tensor" if tensor > 1 else "pipeline"
        raise ValueError(f"{world_size} rank(s) do not divide by {which} = {parts}")
    data = world_size // together
    if parallel.data == "hsdp":
        shards = max(1, min(data, tasks_per_node // tensor)) if parallel.shards == "auto" else int(parallel.shards)
        if data % shards:
            raise ValueError(f"{data} data-parallel rank(s) do not divide by shards = {shards}")
        return Layout(pipeline, data // shards, shards, tensor)
    sharded = parallel.data in SHARDED
    return Layout(pipeline, 1 if sharded else data, data if sharded else 1, tensor)


def is_plain_ddp(parallel: ParallelConfig) -> bool:
    """Whether each rank has the whole state of the model and its optimizer."""
    return parallel.data == "ddp" and (parallel.tensor, parallel.pipeline) == (1, 1)


def check(parallel: ParallelConfig, comm: CommConfig, resources: Resources, precision: str = "fp32") -> Layout:
    """The Layout of a config; ValueError naming key and reason for a product that cannot work."""
    layout = factor(parallel, resources.world_size, resources.ranks_per_node)
    if parallel.shards != "auto" and parallel.data != "hsdp":
        raise ValueError(f"shards is for data: hsdp; {parallel.data} has one way to divide its ranks")
    if parallel.microbatches != "auto" and layout.pipeline == 1:
        raise ValueError("microbatches is for a pipeline; for accumulation pass micro_batch_size to ctx.backward")
    if parallel.offload:
        _check_offload(parallel, layout)
    if parallel.data == "zero1" and layout.tensor > 1:
        raise ValueError("zero1 x tensor: ZeroRedundancyOptimizer takes no DTensors; use zero2 or ddp with tensor")
    if layout.tensor > resources.ranks_per_node:
        raise ValueError(
            f"tensor = {layout.tensor} spans nodes of {resources.ranks_per_node} task(s): every layer would wait for "
            "the network; at most resources.tasks_per_node"
        )
    _check_comm(parallel, comm, layout, resources, precision)
    return layout


def _check_offload(parallel: ParallelConfig, layout: Layout) -> None:
    if parallel.data not in SHARDED or layout.tensor > 1 or layout.pipeline > 1:
        found = _name(parallel, layout) or parallel.data
        typed = "" if layout.tensor > 1 or layout.pipeline > 1 else "; type 'parallel={data: zero2, offload: true}'"
        raise ValueError(f"offload is for {', '.join(SHARDED)}, without tensor and pipeline; found {found}{typed}")


def check_verification(config: Config) -> None:
    """ValueError, with why, where `verify_every` cannot compare what a rank computes by itself."""
    parallel = config.parallel
    if not config.verify_every:
        return
    if parallel.data not in ("ddp", "zero1") or (parallel.tensor, parallel.pipeline) != (1, 1):
        raise ValueError("found a number of steps, but ranks that share a model out compute nothing alone")
    if config.resources.devices_per_rank and config.deterministic is not True:
        raise ValueError("found a number of steps, but a GPU computes other bits each time without deterministic: true")


def _check_comm(
    parallel: ParallelConfig, comm: CommConfig, layout: Layout, resources: Resources, precision: str
) -> None:
    in_ddp = parallel.data in ("ddp", "zero1") and layout.tensor == 1
    if comm.hook != "none" and not in_ddp:
        raise ValueError(
            f"comm.hook = {comm.hook} compresses DDP's gradients; {_name(parallel, layout)} does not use DDP"
        )
    if comm.hook == "bf16" and resources.devices_per_rank == 0:
        raise ValueError("comm.hook = bf16 needs a GPU backend: gloo cannot add bfloat16; use fp16 or powersgd")
    if comm.hook == "powersgd" and layout.pipeline > 1:
        raise ValueError(
            "comm.hook = powersgd keeps a memory that a pipeline's schedule would disturb; use fp16 or bf16"
        )
    if comm.hook == "powersgd" and precision == "fp16":
        raise ValueError(
            "comm.hook = powersgd keeps what it has not sent, also of a step that overflowed in fp16; use bf16 or fp32"
        )
    if comm.local_sgd > 1:
        if parallel.data != "ddp" or layout.tensor > 1 or layout.pipeline > 1:
            raise ValueError(
                f"comm.local_sgd lets whole replicas drift apart: only with ddp, not with {_name(parallel, layout)}"
            )
        if comm.hook != "none":
            raise ValueError("comm.local_sgd exchanges no gradients, so there is nothing for comm.hook to compress")


def _name(parallel: ParallelConfig, layout: Layout) -> str:
    parts: list[str] = [parallel.data] if layout.data > 1 or parallel.data != "ddp" else []
    parts += ["tensor"] if layout.tensor > 1 else []
    parts += ["pipeline"] if layout.pipeline > 1 else []
    return " x ".join(parts)
