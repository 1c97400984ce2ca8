"""What other programs call a key or a value of the YAML, and what it is here; what is only spelt otherwise is found by
`jobkit.errors.closest`."""

from __future__ import annotations

_OF_SLURM = (
    "partition", "account", "qos", "gres", "constraint", "nodelist", "exclude", "exclusive", "reservation", "mem",
    "mem_per_cpu", "mem_per_gpu", "gpus_per_node", "mail_user", "mail_type", "licenses", "setup",
)  # fmt: skip

KEYS = {
    **{name: f"clusters.slurm.{name}" for name in _OF_SLURM},
    **{name: f"params.{name}" for name in ("epochs", "max_epochs", "num_epochs", "max_steps", "batch_size")},
    **dict.fromkeys(("interval", "frequency", "save_every", "save_interval", "save_steps"), "checkpoint.every"),
    **dict.fromkeys(("keep_last", "max_to_keep", "save_total_limit", "save_top_k"), "checkpoint.keep"),
    **dict.fromkeys(("nproc_per_node", "ntasks_per_node", "devices"), "resources.tasks_per_node"),
    **dict.fromkeys(("nnodes", "num_nodes"), "resources.nodes"),
    **dict.fromkeys(("walltime", "timeout"), "resources.time"),
}
"""The dotted key for a name that is none of a config's, nor of its params."""

_OF_DEEPSPEED = (
    "zero_optimization", "zero_stage", "deepspeed", "gradient_clipping", "activation_checkpointing",
    "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu",
)  # fmt: skip

TEXTS = {
    **dict.fromkeys(_OF_DEEPSPEED, "DeepSpeed's; docs/coming-from.md has what jobkit has for it"),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "amp"), "here it is precision: bf16, or fp16"),
    **dict.fromkeys(("fsdp", "fsdp_config", "strategy"), "here it is parallel: zero3, zero2, zero1, hsdp or ddp"),
}
"""What to say of a name that no one key stands for."""
TEXTS["zero_optimization"] = "DeepSpeed's; its stage 2 is parallel: zero2, and docs/coming-from.md has the rest"

STRATEGIES = {
    **dict.fromkeys(("fsdp", "fsdp2", "full_shard", "fully_shard", "stage3", "deepspeed_stage_3"), "zero3"),
    **dict.fromkeys(("shard_grad_op", "stage2", "deepspeed", "deepspeed_stage_2"), "zero2"),
    **dict.fromkeys(("hybrid_shard", "fsdp_hybrid"), "hsdp"),
    **dict.fromkeys(("stage1", "deepspeed_stage_1", "distributed_optimizer"), "zero1"),
}
"""A word of `parallel` for others' names of it."""

PRECISIONS = {
    **dict.fromkeys(("32", "32-true", "float32", "no"), "fp32"),
    **dict.fromkeys(("bf16-mixed", "bf16-true", "bfloat16"), "bf16"),
    **dict.fromkeys(("16", "16-mixed", "16-true", "float16", "half"), "fp16"),
}
"""A `precision` for others' names of it."""

VALUES = {"precision": PRECISIONS, "parallel": STRATEGIES, "parallel.data": STRATEGIES}
"""By dotted key, others' names of its values."""

DEVICES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "ascend": "npu", "metal": "mps"}
"""torch's name of a device."""


def elsewhere(key: str) -> str | None:
    """The hint for a dotted key that there is not, as it stands in an error; None where it is nobody's habit."""
    name = key.rpartition(".")[2].replace("-", "_")
    if name in TEXTS:
        return f"; {TEXTS[name]}"
    return f"; did you mean {KEYS[name]!r}?" if name in KEYS and KEYS[name] != key else None
