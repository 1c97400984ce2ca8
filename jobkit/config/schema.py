"""The keys of a YAML, with their types, defaults and checks: one frozen dataclass for each section.

    jobkit.config.load reads a YAML -> Config -> the submission, the supervisor and the ranks

A sentence under each field explains it; the manual is generated from these sentences.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jobkit.duration import FORMS, parse_seconds

AUTO = "auto"

UNLIMITED = "unlimited"
"""For a budget of `retry:`."""

ALL = "all"
"""For `tensor` and `pipeline` of `parallel:`, all remaining ranks; for `min_nodes`, all nodes."""

PARALLEL_WORDS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "pipeline")
"""The short forms of `parallel:`: `parallel: zero3` is `parallel: {data: zero3}`."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_TASK = r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)?"


def _field(allowed: str, is_allowed: Callable[[Any], bool], default: Any = dataclasses.MISSING) -> Any:
    """A field whose value is checked: an error says `allowed`."""
    return field(default=default, metadata={"allowed": allowed, "is_allowed": is_allowed})


def _at_least(minimum: int, default: int) -> Any:
    return _field(f"{minimum} or more", lambda value: value >= minimum, default)


def _count_or(word: str, minimum: int, default: str | int, unit: str = "") -> Any:
    def is_allowed(value: str | int) -> bool:
        return value == word or (isinstance(value, int) and value >= minimum)

    return _field(f"{word}, or a number{unit}, {minimum} or more", is_allowed, default)


def _is_duration(value: str | int | bool) -> bool:
    try:
        return not isinstance(value, bool) and parse_seconds(value) > 0
    except ValueError:
        return False


def _interval(example: str, *, or_off: bool = False) -> Any:
    """A field that is `auto`, a number of steps or a time. "500" in quotes would be 500 minutes."""

    def is_allowed(value: str | int | bool) -> bool:
        if value == AUTO or (or_off and _is_off(value)):
            return True
        if isinstance(value, str):
            return not value.isdigit() and _is_duration(value)
        return value > 0 and not isinstance(value, bool)

    allowed = f"auto, {'off, ' if or_off else ''}a number of steps above 0, or a time like {example}"
    return _field(allowed, is_allowed, AUTO)


def _is_off(value: str | int | bool) -> bool:
    return value is False or value == "off"  # YAML reads a bare `off` as false


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The share of a machine or cluster that an attempt gets. It is not part of the run's hash: a run may move between
    machines and world sizes."""

    nodes: int = _at_least(1, 1)
    """Machines. With `--local` they are simulated on this one."""
    tasks_per_node: str | int = _count_or(AUTO, 1, 1)
    """Processes (ranks) on each node, usually one for each GPU. `auto` is one for each GPU of this machine, on Slurm of
    the `gpus_per_node` in the cluster's entry; it is 1 without a GPU."""
    gpus_per_task: str | int = _count_or(AUTO, 0, 0)
    """GPUs of each rank; 0 trains on the CPU. `auto` is 1 on a machine with GPUs, with no more ranks than GPUs, else 0;
    it is the default beside `tasks_per_node: auto`. Each rank sees all GPUs of its node: its own GPUs begin at number
    LOCAL_RANK x `gpus_per_task`."""
    cpus_per_task: int = _at_least(1, 1)
    """CPU cores of each rank, the workers of its data loader included."""
    time: str | int = _field(f"auto, or {FORMS}", lambda value: value == AUTO or _is_duration(value), AUTO)
    """Time limit of an attempt, not of the run: a job that reaches it is requeued and continues. `auto` is one hour on
    Slurm, and no limit on this machine."""
    spares: int = _at_least(0, 0)
    """On Slurm: nodes that the job gets beyond `nodes`. They stand by, and one of them replaces a node that is lost."""
    min_nodes: str | int = _count_or(ALL, 1, ALL, " of nodes")
    """On Slurm: the number of nodes with which an attempt may continue after nodes are lost and no spare remains; `all`
    is `nodes`. Samples and their order stay the same; sums are taken in another order."""

    @property
    def fewest_nodes(self) -> int:
        """`min_nodes` as a number."""
        return self.nodes if self.min_nodes == ALL else min(int(self.min_nodes), self.nodes)

    @property
    def ranks_per_node(self) -> int:
        """`tasks_per_node` as a number, after `machine.with_counts`."""
        return int(self.tasks_per_node)

    @property
    def devices_per_rank(self) -> int:
        """`gpus_per_task` as a number, after `machine.with_counts`."""
        return int(self.gpus_per_task)

    @property
    def world_size(self) -> int:
        """The number of ranks, after `machine.with_counts`."""
        return self.nodes * self.ranks_per_node

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds; None for `auto`."""
        return None if self.time == AUTO else parse_seconds(self.time)


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    """The metric that names the best checkpoint."""

    metric: str
    """A name in the dict that a function of `every=` returns, as `validation/loss`."""
    mode: Literal["min", "max"]
    """`min` if a smaller value is better, else `max`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept. A stop and the end of the run always write one."""

    every: str | int = _interval("10min")
    """A number of steps, a time, or `auto`: Young's interval, from the measured cost of a checkpoint and the time
    between failures; at most half an hour, unless checkpoints would then take more than 1 % of the time."""
    memory: str | int | bool = _interval("30s", or_off=True)
    """How often a snapshot is taken in host memory, which needs no disk and outlives a rank that dies: a number of
    steps, a time, `off`, or `auto`: as often as snapshots hold up the training for at most 1 % of the time, and each
    two seconds at most. Two snapshots take at most a quarter of the free memory of a node, else there are none."""
    keep: int = _at_least(1, 3)
    """How many of the newest checkpoints are kept. An older one is deleted only after a newer one is on the disk."""
    best: BestConfig | None = None
    """Also keep the checkpoint with the best value of a metric: `{metric: validation/loss, mode: min}`."""
    weights: Literal["all", "trainable"] = "all"
    """Which parameters of a model are in checkpoints and in `final/`: `all`, or `trainable`, as for a LoRA: of a
    model that trains a part of its parameters, the other parameters are left out until they require gradients.
    `verify` names a model whose other parameters change all the same, as an average does. Buffers are always
    included."""


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """How often, and how long, a run is started again that makes no progress.

    The counts start again with every newer state, and when a person submits the run again.
    """

    preemption: str | int = _count_or(UNLIMITED, 0, UNLIMITED, " of attempts")
    """Slurm preempted the job, or another user or program sent a signal."""
    time_limit: str | int = _count_or(UNLIMITED, 0, 3, " of attempts")
    """The attempt reached `resources.time`. For a `command:` without `jobkit.init`, which reports no progress, that is
    no failure: only 0 ends its run."""
    node_failure: str | int = _count_or(UNLIMITED, 0, 10, " of attempts")
    """A node died, or nothing could be started on it."""
    crash: str | int = _count_or(UNLIMITED, 0, 3, " of attempts")
    """An error of a programmer's type, as TypeError, or out of memory; a `command:` without `jobkit.init`. The same
    error in the same step ends the run at its second time, except with `unlimited`. 0: no death is tried again."""
    patience: str | int = _field(
        f"{UNLIMITED}, or {FORMS}", lambda value: value == UNLIMITED or _is_duration(value), "1h"
    )
    """How long a run that dies without progress is tried again, with pauses of up to 5 minutes; then it is interrupted,
    and the same command continues it. Time in the queue does not count. A shorter patience shortens the pauses too."""

    @property
    def patience_seconds(self) -> float:
        """Infinity for `unlimited`."""
        return math.inf if self.patience == UNLIMITED else float(parse_seconds(self.patience))


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How `ctx.parallelize` distributes a model over the ranks."""

    data: Literal["ddp", "zero1", "zero2", "zero3", "hsdp"] = "ddp"
    """What the data-parallel ranks share. `ddp`: nothing, each has a copy. `zero1`: optimizer state. `zero2`: gradients
    and parameters too, gathered from forward to the end of backward. `zero3`: the same, gathered block by block.
    `hsdp`: zero3 within groups of `shards` ranks, and copies between the groups."""
    tensor: str | int = _count_or(ALL, 1, 1, " of ranks")
    """Ranks that compute each layer together, after the model's `tensor_plan()`; `all` is every rank."""
    pipeline: str | int = _count_or(ALL, 1, 1, " of ranks")
    """Stages that the model's blocks are divided into; `all` is every rank that `tensor` leaves."""
    microbatches: str | int = _count_or(AUTO, 1, AUTO)
    """For a pipeline: micro-batches in flight; `auto` is up to four for each stage."""
    shards: str | int = _count_or(AUTO, 1, AUTO)
    """For `hsdp`: ranks that share a copy of the model; `auto` is the ranks of a node."""
    offload: bool = False
    """For `zero2`, `zero3` and `hsdp`: parameters, gradients and optimizer state stay in host memory between uses, and
    the optimizer steps there (fully_shard's CPUOffloadPolicy); it works on a single rank, too."""


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How the ranks send gradients: for a network that is slow compared with the GPUs."""

    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """How DDP compresses gradients. The error that PowerSGD feeds back is part of the checkpoint."""
    powersgd_rank: int = _at_least(1, 1)
    """Rank of PowerSGD's approximation: a higher rank is more exact and sends more."""
    bucket_cap_mb: int = _at_least(1, 25)
    """Megabytes of gradients in each all-reduce of DDP, which overlaps with backward."""
    local_sgd: int = _at_least(0, 0)
    """Average parameters every this many steps, instead of gradients at every step; 0 is off."""


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """A container for the ranks, and for the agent of each node that starts them."""

    prefix: list[str] = field(default_factory=list)
    """The words before the command: `[apptainer, exec, --nv, image.sif]`. Empty where `srun_args` of the cluster's
    entry name the image (pyxis)."""
    python: str = ""
    """The Python in the container, as `/opt/conda/bin/python`, with torch and jobkit's other requirements; jobkit
    itself comes along. Empty is the path of the submission's Python."""

    @property
    def is_none(self) -> bool:
        """Whether it is `{}`, which takes away the container of the YAML."""
        return not (self.prefix or self.python)


@dataclass(frozen=True, kw_only=True)
class WandbMirror:
    """A copy of the curves at Weights & Biases, as a run whose id is the run's name. `{}` takes the defaults."""

    project: str = ""
    """Its project; empty is the run's `name`."""
    entity: str = ""
    """The account or team; empty is your own, or `$WANDB_ENTITY`."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `wandb/` in the run's directory, for `wandb sync`."""


@dataclass(frozen=True, kw_only=True)
class MlflowMirror:
    """A copy of the curves at MLflow, as a run with the tag `jobkit.run`. `{}` takes the defaults."""

    uri: str = ""
    """Its server, as `https://mlflow.example.org`, or a folder, as `file:///data/mlruns`; empty is
    `$MLFLOW_TRACKING_URI`, else MLflow's default."""
    experiment: str = ""
    """Its experiment; empty is the run's `name`."""


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """Services to which the scalars of `ctx.log` are copied. Not part of the run's hash."""

    wandb: WandbMirror | None = None
    """Weights & Biases: `{}`, or a mapping of `project`, `entity` and `mode`."""
    mlflow: MlflowMirror | None = None
    """MLflow: `{}`, or a mapping of `uri` and `experiment`."""


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """The code snapshot, which a run executes: what git does not ignore; without git, source files. Not part of the
    run's hash."""

    exclude: list[str] = field(default_factory=list)
    """Files and folders that stay out of it: patterns relative to the folder of the command, as `[data, "*.csv"]`. `*`
    stands for any characters, `/` included; a folder's name leaves out all below it."""


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Changes of the config for `python -m jobkit verify` alone."""

    params: dict[str, Any] = field(default_factory=dict)
    """Merged over `params`, to bring late events forward: `{validate_every: 5, warmup: 3}`."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """An experiment: the values of a YAML after demo, overrides and interpolation.

    Example:
        config = load(Path("toy.yaml"), ["params.lr=1e-3"]).config
        config.params["lr"], config.resources.nodes
    """

    name: str = _field(
        "letters, digits, '.', '_' and '-', at most 100 (it names the run directory and the job)",
        lambda value: re.fullmatch(_NAME, value) is not None,
    )
    """First part of the run directory's name, `<name>-<hash>`, which is also the job's."""
    task: str = _field("module:callable, as in mytask:train", lambda value: re.fullmatch(_TASK, value) is not None, "")
    """The training function, importable from the folder of the command; called with a jobkit.Context. Required, unless
    there is a `command`."""
    command: list[str] = field(default_factory=list)
    """Instead of `task`: a program that every rank runs, as `[python, train.py]`, with RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and JOBKIT_RUN, the run directory, set. `${run_dir}` is that directory
    too: `[python, train.py, "--out=${run_dir}/outputs"]`."""
    params: dict[str, Any] = field(default_factory=dict)
    """The training function's own values, with any keys: `ctx.params`. `${run_dir}` in a text is the run directory. A
    secret belongs in the environment: `${oc.env:HF_TOKEN}` is never written to the disk."""
    inputs: list[str] = field(default_factory=list)
    """Files and folders that must exist before anything is queued, as `["${params.data}"]`."""
    seed: int | str | None = _field(
        "a whole number, null or auto", lambda value: not isinstance(value, str) or value == AUTO, AUTO
    )
    """Decides initial weights, sample order and all random numbers. `auto` is `params.seed`, where that is a whole
    number, else 0. Seeds that the program sets itself count too. `null` seeds nothing: the program does it, or
    nobody."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type in which `ctx.autocast()` and `ctx.backward` compute; fp16 uses a loss scale, which is part of the
    checkpoint."""
    deterministic: bool | str = _field(
        "true, false or warn", lambda value: isinstance(value, bool) or value == "warn", False
    )
    """Whether torch, cuDNN and cuBLAS compute the same bits from the same values each time, which may be slower. With
    `true` the run fails at an operation that has no such form; `warn` goes on, and says so. A `command:` has the
    variables (`CUBLAS_WORKSPACE_CONFIG`, `NCCL_NVLS_ENABLE`), and torch's switches where it calls `jobkit.init`."""
    device: Literal["auto", "cuda", "npu", "xpu", "mps", "cpu"] = "auto"
    """Where tensors live; `auto` is the machine's accelerator if `gpus_per_task` is above 0, else the CPU."""
    backend: str = "auto"
    """The backend of torch.distributed; `auto` is the device's: nccl, hccl, xccl or gloo."""
    preload: list[str] = field(default_factory=list)
    """Modules that are imported once a node, before ranks are forked, as `[transformers]`: a restart in place then does
    not import them again."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    resources: Resources = field(default_factory=Resources)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    watchdog: str | int | bool = _field(
        "auto, off, or a time like 10min",
        lambda value: value == AUTO or _is_off(value) or _is_duration(value),
        AUTO,
    )
    """How long a step may take until the ranks count as hung. `auto`: 20 times the slowest step so far, at least 5
    minutes; outside of steps, as before the first or in a validation between two epochs, at least 30 minutes."""
    on_nan: Literal["stop", "ignore"] = "stop"
    """The reaction to a loss that is not a finite number: `stop` ends the run as failed, with the step and its samples;
    `ignore` goes on."""
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Where the run may go, by name: `h100: {partition: h100, constraint: ib}`. An entry holds options of sbatch, keys
    of `resources`, and `container`; an option that is false or null is left out. jobkit's own
    options are refused, false too."""
    container: ContainerConfig | None = None
    """A container for the ranks: `{prefix: [apptainer, exec, --nv, image.sif], python: /opt/conda/bin/python}`. In an
    entry of `clusters:` it holds there, and `{}` means none."""
    mirror: MirrorConfig = field(default_factory=MirrorConfig)
    code: CodeConfig = field(default_factory=CodeConfig)
    after: list[str] = field(default_factory=list)
    """Names of runs that must be finished before this one starts; `--after` adds more."""
    verify: VerifyConfig = field(default_factory=VerifyConfig)

    @property
    def deterministic_variables(self) -> dict[str, str]:
        """The variables that `deterministic` sets where nobody has, for libraries beside torch."""
        # cuBLAS reads the first when it makes its first handle. Sums in NVLink's switch come in any order
        # (github.com/NVIDIA/nccl/issues/1497).
        return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"} if self.deterministic else {}

    @property
    def random_seed(self) -> int | None:
        """`seed` as a number; None for null."""
        return seed_of(self.params) if isinstance(self.seed, str) else self.seed


def seed_of(params: Any) -> int:
    """The number that `seed: auto` means."""
    seed = params.get("seed") if isinstance(params, Mapping) else None
    return seed if type(seed) is int else 0


SECTIONS: dict[str, list[str]] = {
    section.name: [inner.name for inner in dataclasses.fields(section.default_factory)]
    if dataclasses.is_dataclass(section.default_factory)
    else []
    for section in dataclasses.fields(Config)
}
"""The top-level keys, each with the keys below it; empty for a key with free keys or a plain value."""


DROPPED = {
    "check": "check inputs at the start of the training function; `inputs:` still names files that must exist",
    "verify_every": "`jobkit verify` compares an interrupted run with an uninterrupted one",
    "pipeline": "submit each stage as a run of its own, with `after: [RUN]`",
    "notify": "type --notify COMMAND at the submission; the run keeps it",
    "start_from": "type --from RUN[@STEP] at the submission",
    "checkpoint.mtbf": "`checkpoint.every: auto` measures the time between failures; or give steps or a time",
    "retry.exclude_after": "a node is given up after two deaths without progress in between, or three within an hour",
    "retry.in_place": "a failed attempt always starts again on the nodes of the job as long as they can be used",
    "comm.powersgd_start": "PowerSGD begins as soon as torch allows it",
}
"""Keys of the second edition, and their replacements."""
