"""What a YAML may say: the keys with their types, defaults and checks, and a resolved Config as a file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jobkit.errors import nearest
from jobkit.run import device_kinds, secrets
from jobkit.run.duration import FORMS, parse_seconds
from jobkit.run.files import write_atomic
from jobkit.run.habits import DEVICES
from jobkit.run.places import Places
from jobkit.run.strict import build
from jobkit.run.yamlfile import dump, read_yaml

UNLIMITED = "unlimited"
"""For a budget of `retry:`."""

AUTO = "auto"

ALL = "all"
"""For `tensor` and `pipeline` of `parallel:`: as many ranks as there are left."""


def _at_least(minimum: int) -> Callable[[int], None]:
    def check(value: int) -> None:
        if value < minimum:
            raise ValueError(f"{minimum} or more")

    return check


def _count_or(word: str, minimum: int, allowed: str) -> Callable[[str | int], None]:
    def check(value: str | int) -> None:
        if value != word and (isinstance(value, str) or value < minimum):
            raise ValueError(allowed)

    return check


def _check_seconds(value: str | int, allowed: str, words: tuple[str, ...] = ("auto",)) -> None:
    if value in words:
        return
    try:
        parse_seconds(value)
    except ValueError:
        raise ValueError(allowed) from None


def _check_name(value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise ValueError("letters, digits, '.', '_' and '-', at most 100 (it names the run directory and the job)")


def _check_task(value: str) -> None:
    if value and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):  # empty where there is a command
        raise ValueError("module:callable, as in mytask:train")


def _check_every(value: str | int) -> None:
    allowed = "auto, a number of steps above 0, or a time like 10min"
    if isinstance(value, int) or value.isdigit():  # "500" in quotes would be 500 minutes
        if not (isinstance(value, int) and value > 0):
            raise ValueError(allowed)
    else:
        _check_seconds(value, allowed)


def _check_memory(value: str | int | bool) -> None:
    if value is False or value == "off":  # YAML reads a bare `off` as false
        return
    try:
        if value is True:
            raise ValueError
        _check_every(value)
    except ValueError:
        raise ValueError("auto, off, a number of steps above 0, or a time like 30s") from None


def _check_watchdog(value: str | int | bool) -> None:
    if value is not False:  # YAML reads a bare `off` as false
        _check_seconds(value, "auto, off, or a time like 10min", ("auto", "off"))


def _check_on_nan(value: str | bool) -> None:
    if value is not False and value not in ("stop", "rerun", "skip", "off"):  # YAML reads a bare `off` as false
        raise ValueError("stop, rerun, skip or off")


def _check_deterministic(value: bool | str) -> None:
    if isinstance(value, str) and value != "warn":
        raise ValueError("true, false or warn")


def _check_device(value: str) -> None:
    if value != device_kinds.AUTO and device_kinds.kind(value) is None:
        allowed = [device_kinds.AUTO, *device_kinds.names()]
        raise ValueError(f"one of {', '.join(allowed)}{nearest(DEVICES.get(value, value), allowed)}")


_check_mtbf = partial(_check_seconds, allowed="auto, or a time like 8h")
_check_time = partial(_check_seconds, allowed=FORMS)
_check_budget = _count_or(UNLIMITED, 0, f"{UNLIMITED}, or a number of attempts, 0 or more")
_check_degree = _count_or(ALL, 1, f"1 or more ranks, or {ALL}")
_check_auto_or_count = _count_or("auto", 1, "auto, or 1 or more")


PARALLEL_WORDS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "pipeline")
"""What `parallel:` may be in a word."""


def _field(check: Callable[[Any], object], default: Any = dataclasses.MISSING) -> Any:
    if default is dataclasses.MISSING:
        return field(metadata={"check": check})
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one attempt gets. None of it is part of the run's hash: a run moves between machines and world sizes."""

    nodes: int = _field(_at_least(1), 1)
    """Machines. With `--local` they are simulated on this one."""
    tasks_per_node: str | int = _field(_check_auto_or_count, 1)
    """Processes (ranks) on each node; usually one for each GPU. `auto` is as many as there are GPUs for, and 1 where
    there is none: of those that this machine shows, or on Slurm of the `gpus_per_node` in the cluster's entry."""
    gpus_per_task: str | int = _field(_count_or("auto", 0, "auto, or 0 or more"), 0)
    """GPUs of each rank; 0 trains on the CPU. `auto` is one each where there are any, with no more ranks than GPUs,
    else 0; it is the default beside `tasks_per_node: auto`. Each rank sees all GPUs of its node: its own begin with
    number LOCAL_RANK x `gpus_per_task`."""
    cpus_per_task: int = _field(_at_least(1), 1)
    """CPU cores of each rank, data loader workers included."""
    time: str | int = _field(_check_time, "auto")
    """Time limit of one attempt, not of the run: a job that reaches it is requeued and continues. `auto` is one hour on
    Slurm, and no limit on this machine."""

    spares: int = _field(_at_least(0), 0)
    """On Slurm: nodes that the job gets beyond `nodes` and that stand by. One takes the place of a node that is lost.
    """
    min_nodes: str | int = _field(_count_or(ALL, 1, f"1 or more nodes, or {ALL}"), ALL)
    """On Slurm: with how many nodes an attempt may go on where nodes are lost and no spare is left; `all` is `nodes`.
    Samples and their order stay the same, sums are taken in another order."""

    @property
    def fewest_nodes(self) -> int:
        """`min_nodes` in numbers."""
        return self.nodes if self.min_nodes == ALL else min(int(self.min_nodes), self.nodes)

    @property
    def ranks_per_node(self) -> int:
        """`tasks_per_node` in numbers, once it is known where the run goes."""
        return int(self.tasks_per_node)

    @property
    def devices_per_rank(self) -> int:
        """`gpus_per_task` in numbers, once it is known where the run goes."""
        return int(self.gpus_per_task)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def seconds(self) -> int:
        """The time limit in seconds, as Slurm gets it."""
        return 3600 if self.time == "auto" else parse_seconds(self.time)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept. One is always written at a stop and at the end of the run."""

    every: str | int = _field(_check_every, "auto")
    """A number of steps, a time, or `auto`: Young's interval, from the measured cost of a checkpoint and the time
    between failures; at most half an hour, unless checkpoints would then take more than 1 % of the time."""
    memory: str | int | bool = _field(_check_memory, "auto")
    """How often a snapshot is taken in host memory, which goes to no disk and outlives a rank that dies: a number of
    steps, a time, `off`, or `auto`: as often as snapshots hold up the training for at most 1 % of the time, and less
    often the longer the run lives for each of its failures. Two of them take at most a quarter of the memory that is
    free on a node, else there are none."""
    weights: Literal["all", "trainable"] = "all"
    """Which parameters of a model are in checkpoints and in `final/`: `all`, or `trainable`, as for a LoRA: not those
    that require no gradient and are as they were at `ctx.track`, for the function builds them again. Buffers always."""
    keep: int = _field(_at_least(1), 3)
    """How many of the newest checkpoints are kept. An older one is deleted only after a newer one is on the disk."""
    mtbf: str | int = _field(_check_mtbf, "auto")
    """For `every: auto`: the mean time between failures; `auto` starts at 8 hours and adds what the run has seen."""


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """How many attempts in a row may end without a newer checkpoint, by what ended them; then the run has failed.

    The count starts again with every new checkpoint, with more samples of an evaluation that was broken off and goes
    on, and when a person submits the run again.
    """

    preemption: str | int = _field(_check_budget, UNLIMITED)
    """Preempted, or sent a signal by another user or program."""
    time_limit: str | int = _field(_check_budget, 3)
    """The time limit `resources.time` was reached. For a `command:` without `jobkit.init`, which reports no progress,
    that is no failure: only 0 ends its run."""
    node_failure: str | int = _field(_check_budget, 10)
    """A node died, or nothing could be started on it."""
    crash: str | int = _field(_check_budget, 3)
    """An exception, a killed rank, out of memory, a hang. It is also how often one step may fail in total. In a job of
    8 nodes or more, what a node did that is excluded since counts for `node_failure`, unless the same rank has crashed
    on another node too, or there was too little memory."""
    exclude_after: int = _field(_at_least(1), 2)
    """After this many failures on one node the run excludes it (`ExcNodeList`)."""
    in_place: bool = True
    """Whether ranks that have failed start again on the nodes that the job has, as long as those can be used. `false`
    gives them back and requeues the job each time."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How `ctx.parallelize` distributes a model over the ranks; [training.md](training.md) explains each kind."""

    data: Literal["ddp", "zero1", "zero2", "zero3", "hsdp"] = "ddp"
    """What the data-parallel ranks share. `ddp`: nothing, a copy each. `zero1`: optimizer state. `zero2`: gradients and
    parameters too, gathered from forward to the end of backward. `zero3`: the same, gathered block by block. `hsdp`:
    zero3 within groups of `shards` ranks, copies between the groups."""
    offload: bool = False
    """For `zero2`, `zero3` and `hsdp`: parameters, gradients and optimizer state stay in host memory between uses, and
    the optimizer steps there (fully_shard's CPUOffloadPolicy); on one rank, too."""
    shards: str | int = _field(_check_auto_or_count, "auto")
    """For `hsdp`: ranks that share one copy of the model; `auto` is the ranks of one node."""
    tensor: str | int = _field(_check_degree, 1)
    """Ranks that compute each layer together, after the model's `tensor_plan()`; `all` is every rank."""
    pipeline: str | int = _field(_check_degree, 1)
    """Stages that the model's blocks are divided into; `all` is every rank that `tensor` leaves."""
    microbatches: str | int = _field(_check_auto_or_count, "auto")
    """For a pipeline: micro-batches in flight; `auto` is up to four for each stage."""


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """What the ranks send each other: for a network that is slow compared with the GPUs."""

    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """How DDP compresses gradients. The error that PowerSGD feeds back is part of the checkpoint."""
    powersgd_rank: int = _field(_at_least(1), 1)
    """Rank of PowerSGD's approximation: a higher one is more exact and sends more."""
    powersgd_start: int = _field(_at_least(2), 100)
    """Steps with uncompressed gradients before PowerSGD begins: early gradients change too fast to be approximated."""
    bucket_cap_mb: int = _field(_at_least(1), 25)
    """Megabytes of gradients in one of DDP's all-reduces, which overlap with backward; the first one has 1 by default.
    """
    local_sgd: int = _field(_at_least(0), 0)
    """Average parameters every this many steps, instead of gradients at every step; 0 is off."""


def _check_parent(value: str) -> None:
    if value:
        _check_name(value)


@dataclass(frozen=True, kw_only=True)
class StartFrom:
    """The checkpoint of another run that this one starts from; `jobkit submit --from RUN@STEP` fills it in."""

    run: str = _field(_check_parent, "")
    """The full name of that run, in the same runs directory; empty for a run that begins at step 0."""
    step: int = _field(_at_least(0), 0)
    """Which of its checkpoints: how many steps were done."""
    weights_only: bool = False
    """Whether only the weights and buffers of models are taken, and the run begins at step 0 with them."""

    def __str__(self) -> str:
        return f"{'the weights of ' if self.weights_only else ''}step {self.step} of {self.run}"


@dataclass(frozen=True, kw_only=True)
class WandbMirror:
    """A copy of the curves at Weights & Biases, as a run whose id is the run's name. `{}` takes the defaults."""

    project: str = ""
    """Its project; empty is the run's `name`."""
    entity: str = ""
    """Whose project; empty is your own, or `$WANDB_ENTITY`."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `wandb/` in the run's directory, for `wandb sync --append`."""


@dataclass(frozen=True, kw_only=True)
class MlflowMirror:
    """A copy of the curves at MLflow, as a run with the tag `jobkit.run`. `{}` takes the defaults."""

    uri: str = ""
    """Its server, as `https://mlflow.example.org`, or a folder, as `file:///data/mlruns`; empty is
    `$MLFLOW_TRACKING_URI`, else MLflow's own default."""
    experiment: str = ""
    """Its experiment; empty is the run's `name`."""


@dataclass(frozen=True, kw_only=True)
class MirrorConfig:
    """Services to which the scalars that `ctx.log` writes are copied; see
    [many-runs.md](many-runs.md#tensorboard-and-mirrors). Not part of the run's hash."""

    wandb: WandbMirror | None = None
    """Weights & Biases: `{}`, or a mapping of `project` (default: the run's `name`), `entity` and `mode`, `online` or
    `offline`: in files in the run's directory, for `wandb sync --append`."""
    mlflow: MlflowMirror | None = None
    """MLflow: `{}`, or a mapping of `uri`, a server or a folder (default: `$MLFLOW_TRACKING_URI`, else MLflow's own),
    and `experiment` (default: the run's `name`)."""

    @property
    def chosen(self) -> list[str]:
        """The services, by the names of their packages."""
        return [name for name in ("wandb", "mlflow") if getattr(self, name) is not None]


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment, resolved: no interpolation, demo or override is left in it."""

    name: str = _field(_check_name)
    """First part of the run directory's name, `<name>-<hash>`, which is also the job's."""
    task: str = _field(_check_task, "")
    """The training function, importable from where the command is typed; called with a jobkit.Context. Required, unless
    there is a `command`."""
    command: list[str] = field(default_factory=list)
    """Instead of `task`: a program that every rank runs, as in `[python, train.py]`, with RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and JOBKIT_RUN, the run directory, set. `${run_dir}` is that directory
    too: `[python, train.py, "--out=${run_dir}/outputs"]`."""
    params: dict[str, Any] = field(default_factory=dict)
    """The training function's own values, with any keys: `ctx.params`. A text whose name has the word token, key,
    password, secret or credential is masked in what others can read (`***`), and kept in a file of its own.
    `${run_dir}` in a text is the run directory, in the job; the run's hash has it as it is written."""
    inputs: list[str] = field(default_factory=list)
    """Files and folders that must exist before anything is queued, as in `["${params.data}"]`."""
    check: str = _field(_check_task, "")
    """A function, `module:callable`, that is called with `params`, a plain mapping, before anything is queued, in a
    process of its own: for what must be right in `inputs`, as a file's format. What it raises is the refusal, at the
    key that a `jobkit.errors.InvalidValue(key, problem)` names. It may take a minute, for each point of a sweep; its
    module should import no torch, and nothing that only a cluster's `setup` brings; `jobkit.run.array_files` has what
    arrays are in a file without it. Not called where values come from other runs."""
    seed: int | None = 0
    """Decides initial weights, sample order and all random numbers. `null` leaves the training function's own random
    numbers alone: it seeds them itself, or not at all; they go on where they were, as they do with a seed."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What `ctx.autocast()` and `ctx.backward` compute in; fp16 uses a loss scale, which is part of the checkpoint."""
    deterministic: bool | str = _field(_check_deterministic, False)
    """Whether torch, cuDNN and cuBLAS compute the same bits from the same values each time, which may be slower. With
    `true` the run fails at an operation that has no such form; `warn` goes on, and says so. A `command:` gets the
    variables (`CUBLAS_WORKSPACE_CONFIG`, `NCCL_NVLS_ENABLE`), and torch's switches where it calls `jobkit.init`."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    device: str = _field(_check_device, device_kinds.AUTO)
    """Where tensors live; `auto` is the machine's accelerator if `gpus_per_task` is above 0, else the CPU."""
    backend: str = "auto"
    """torch.distributed's backend; `auto` is the device's: nccl, hccl, xccl or gloo."""
    resources: Resources = field(default_factory=Resources)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    watchdog: str | int | bool = _field(_check_watchdog, "auto")
    """How long a step may take until the ranks count as hung. `auto`: 20 times the slowest step so far, at least 5
    minutes, doubled for each attempt that ended as hung (up to 8 times) until the run has come past that step, and at
    least twice what a step took in attempts before. Before the first step and after the last it is at least 30 minutes,
    and twice what the start of an attempt before took."""
    clusters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Where the run may go, by name: `h100: {partition: h100, constraint: ib}`. See [below](#clusters)."""

    start_from: StartFrom = field(default_factory=StartFrom)
    """Where the run begins, instead of at step 0; part of its hash. See
    [many-runs.md](many-runs.md#starting-from-another-run)."""
    mirror: MirrorConfig = field(default_factory=MirrorConfig)

    on_nan: str | bool = _field(_check_on_nan, "stop")
    """What happens at a loss that is not a finite number: `stop` ends the run as failed, with the step and its samples;
    `rerun` repeats the steps up to it first, and goes on without the node where that has another result; `skip` leaves
    the batch out; `off` goes on. See [many-runs.md](many-runs.md#a-loss-that-is-not-a-number)."""
    after: list[str] = field(default_factory=list)
    """Runs that must be finished before this one starts, by their names; `--after` adds more. It is the runs that
    count: through requeues, restarts and when somebody continues them. See [chains](many-runs.md#chains)."""

    verify_every: int = _field(_at_least(0), 0)
    """Every so many steps each rank computes its gradients twice more and compares the bits; 0 is never. For loops with
    `ctx.backward`, `parallel: ddp` or `zero1`, and on a GPU with `deterministic: true`."""

    def to_yaml(self) -> str:
        """The config as YAML that `load` reads back to an equal one."""
        return dump(dataclasses.asdict(self))

    def told(self) -> dict[str, Any]:
        """What a submission journals of it, for lists of runs: name, seed and params, masked."""
        return {"name": self.name, "seed": self.seed, "params": secrets.masked(self.params)}

    def masked_yaml(self) -> str:
        """The same as others may see it: values with secret names are not in it."""
        return dump(secrets.masked(dataclasses.asdict(self)))


SECTIONS: dict[str, list[str]] = {
    one.name: [inner.name for inner in dataclasses.fields(one.default_factory)]
    if dataclasses.is_dataclass(one.default_factory)
    else []
    for one in dataclasses.fields(Config)
}
"""The names of all top-level keys, each with those of the keys below it; none for those whose keys are free."""


def read_resolved(path: Path) -> Config:
    """The Config that `write_resolved` wrote; what it has masked is there for its owner alone."""
    values, lines = read_yaml(path)
    with Places(path=path, lines=lines).locating_errors():
        return build(Config, secrets.with_hidden(secrets.file_beside(path), values))


def write_resolved(path: Path, config: Config) -> None:
    """Write a Config for `read_resolved`: what is secret in it into a file of its own. Raises OSError."""
    values, file = dataclasses.asdict(config), secrets.file_beside(path)
    has_secrets = bool(secrets.hidden_in(values))
    if has_secrets:  # first: without them the config would be of another run
        secrets.write_hidden(file, values)
    write_atomic(path, config.masked_yaml())
    if not has_secrets:
        file.unlink(missing_ok=True)
