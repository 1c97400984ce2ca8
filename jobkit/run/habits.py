"""What other programs call a key or a value of the YAML, and what it is here; what is only spelt otherwise is found by
`jobkit.errors.closest`."""

from __future__ import annotations

_OF_SLURM = (
    "partition", "account", "qos", "gres", "constraint", "nodelist", "exclude", "exclusive", "reservation", "mem",
    "mem_per_cpu", "mem_per_gpu", "gpus_per_node", "cpus_per_gpu", "mail_user", "mail_type", "licenses", "setup",
    "comment", "begin", "nice", "export", "time_min", "prefer", "switches", "oversubscribe",
)  # fmt: skip

KEYS = {
    **{name: f"clusters.slurm.{name}" for name in _OF_SLURM},
    **{name: f"params.{name}" for name in ("epochs", "max_epochs", "num_epochs", "max_steps", "batch_size")},
    **dict.fromkeys(("interval", "frequency", "save_every", "save_interval", "save_steps"), "checkpoint.every"),
    **dict.fromkeys(("keep_last", "max_to_keep", "save_total_limit", "save_top_k"), "checkpoint.keep"),
    **dict.fromkeys(("nproc_per_node", "ntasks_per_node", "devices"), "resources.tasks_per_node"),
    **dict.fromkeys(("gpus", "num_gpus", "ngpus", "n_gpus", "gpu_count"), "resources.tasks_per_node"),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "resources.nodes"),
    **dict.fromkeys(("cpus", "num_cpus"), "resources.cpus_per_task"),
    **dict.fromkeys(("walltime", "timeout"), "resources.time"),
    **dict.fromkeys(("job_name", "run_name", "experiment_name"), "name"),
    "max_restarts": "retry.crash",
}
"""The dotted key for a name that is none of a config's, nor of its params."""

_OF_DEEPSPEED = (
    "zero_optimization", "zero_stage", "deepspeed", "gradient_clipping", "activation_checkpointing",
    "gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu",
)  # fmt: skip

_OF_LAUNCHERS = (
    "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "node_rank", "machine_rank",
    "main_process_ip", "main_process_port", "standalone", "hostfile",
)  # fmt: skip

TEXTS = {
    **dict.fromkeys(
        ("ntasks", "num_processes", "np", "nprocs", "world_size"),
        "the number of ranks is resources.nodes times resources.tasks_per_node",
    ),
    **dict.fromkeys(
        ("gpu", "gpu_id", "gpu_ids"),
        "how many: resources.tasks_per_node; which: CUDA_VISIBLE_DEVICES=... before the command",
    ),
    **dict.fromkeys(_OF_LAUNCHERS, "jobkit starts the ranks and sets it; docs/launchers.md has other launchers"),
    **dict.fromkeys(
        ("resume", "auto_resume", "resume_from_checkpoint", "ckpt_path"),
        "the same command continues a run; to begin with another one's checkpoint: --from RUN@STEP",
    ),
    "requeue": "always on",
    "array": "several runs are a sweep: --sweep key=v1,v2",
    "dependency": "to start when another run is finished: --after RUN",
    **dict.fromkeys(
        ("output", "error", "output_dir", "log_dir", "logging_dir", "default_root_dir"),
        "a run has its own directory for all of it, in --runs-dir DIR",
    ),
    "signal": "jobkit asks Slurm for it; how long before the end: clusters.slurm.signal_delay_s",
    "wrap": "command: of the YAML is what is run",
    **dict.fromkeys(("config", "config_file", "config_name", "config_path"), "the YAML is the first word"),
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

SHORT = {
    "N": "nodes", "n": "ntasks", "p": "partition", "t": "time", "c": "cpus_per_task", "G": "gpus", "A": "account",
    "q": "qos", "J": "job_name", "C": "constraint", "w": "nodelist", "x": "exclude", "d": "dependency", "a": "array",
    "o": "output", "e": "error",
}  # fmt: skip
"""The long name of an option that sbatch, and in part mpirun, takes as one letter."""

DEVICES = {"gpu": "cuda", "nvidia": "cuda", "rocm": "cuda", "hip": "cuda", "ascend": "npu", "metal": "mps"}
"""torch's name of a device."""


def elsewhere(key: str) -> str | None:
    """The hint for a dotted key that there is not, as it stands in an error; None where it is nobody's habit."""
    name = key.rpartition(".")[2].replace("-", "_")
    if name in TEXTS:
        return f"; {TEXTS[name]}"
    return f"; did you mean {KEYS[name]!r}?" if name in KEYS and KEYS[name] != key else None
