"""Spreading modules and optimizers over the ranks as a Layout says, whatever mixture of strategies that is."""

from __future__ import annotations

import fnmatch
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _random
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from jobkit.errors import UsageError
from jobkit.run.config import CommConfig, ParallelConfig
from jobkit.run.layout import SHARDED, Layout
from jobkit.train.accumulation import SUM, BatchSize, Loss, backward
from jobkit.train.data_parallel import OPTIONS, data_parallel, send_first, without_synchronisation
from jobkit.train.devices import AUTOCAST
from jobkit.train.gradient_compression import Compression
from jobkit.train.gradient_order import settle_stage
from jobkit.train.gradients import gradient_norm
from jobkit.train.hooks import uncompiled
from jobkit.train.nested import batch_size
from jobkit.train.pipeline import Pipeline, stage_of
from jobkit.train.sharding import shard
from jobkit.train.weights import Weights, materialise

AXES = ("pipeline", "replica", "shard", "tensor")

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""What torch's optimizers take: parameters, or groups of them."""

Axes = tuple[str, ...]
"""The axes of the mesh that a parameter is spread over; none for a plain tensor."""


class Parallel:
    """One rank's part in a Layout, made on all ranks together; so is all that it makes.

    `layout.check` has found that the layout works; where there are several ranks, or one with `offload`, their process
    group stands.
    """

    def __init__(
        self,
        layout: Layout,
        parallel: ParallelConfig,
        comm: CommConfig,
        device: torch.device,
        rank: int = 0,
        *,
        precision: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.layout, self.parallel, self.comm = layout, parallel, comm
        self.device = device
        self.rank = rank
        self._precision, self._seed = precision, seed
        self.data_rank = layout.data_rank(rank)
        self.compressions: list[Compression] = []
        self._mesh: DeviceMesh | None = None
        # Without a mesh DDP, or nothing, talks to the whole world. One rank has one of size 1 if it offloads.
        sharded = parallel.data in SHARDED and (layout.world_size > 1 or parallel.offload)
        plain = layout.world_size == layout.replicas and parallel.tensor == 1 and not sharded
        if not plain:
            sizes = (layout.pipeline, layout.replicas, layout.shards, layout.tensor)
            on = "cpu" if device.type == "meta" else device.type  # a model that is only looked at has no device
            self._mesh = init_device_mesh(on, sizes, mesh_dim_names=AXES)
            _keep_generators(self._mesh)
        self.data_group = self._data_group()
        self.stages = self._mesh["pipeline"].get_group() if self._mesh is not None and layout.pipeline > 1 else None

    @property
    def drifts(self) -> bool:
        """Whether replicas are different between two averages (local SGD)."""
        return self.comm.local_sgd > 1 and self.layout.data > 1

    @property
    def forward_is_collective(self) -> bool:
        """Whether ranks must take part in each other's forward passes."""
        sharded = self.parallel.data in SHARDED and self.layout.data > 1
        return sharded or self.layout.tensor > 1 or self.layout.pipeline > 1

    def spread(self, module: nn.Module, **options: bool) -> nn.Module:
        """`module` on the device and over the ranks, with rank 0's weights, or drawn ones for what is on meta.

        `options` are DDP's. One that torch.compile has wrapped is spread, and what comes of it is compiled with the
        same options. Raises UsageError for one that cannot be spread this way, and for options it cannot have so.
        """
        self.check(module, options)
        own = uncompiled(module)
        weights = Weights(own, self.device, self._seed, self.rank, self.layout.world_size)
        spread = self._with_weights(self.divided(own), weights, options)
        return spread if own is module else type(module)(spread, module.dynamo_ctx)

    def check(self, module: nn.Module, options: Mapping[str, bool]) -> None:
        """Raise UsageError for options of DDP that a module cannot have, and for a compiled one that is to be cut."""
        self._check_options(options)
        if uncompiled(module) is not module and self.layout.pipeline > 1:
            raise UsageError(
                "parallel.pipeline: a compiled model cannot be cut into stages: pass the model itself, with its blocks "
                "compiled in place (block.compile())"
            )

    def _with_weights(self, module: nn.Module, weights: Weights, options: Mapping[str, bool]) -> nn.Module:
        is_replicated = self._is_wrapped(module) and not self._is_sharded and not self.drifts
        materialise(module, self.device, torch.device("cpu") if self.parallel.offload else None)
        weights.fill(module, send=not is_replicated or self.data_group is not None)  # of all ranks, DDP sends them
        if is_replicated:
            module = self._replicated(module, options)
        if self.stages is None:
            return module
        microbatches = self.parallel.microbatches
        return Pipeline(module, self.stages, self.device, None if microbatches == "auto" else int(microbatches))

    def divided(self, module: nn.Module) -> nn.Module:
        """What this rank has of `module`: a stage, parts of its layers, a shard. Raises UsageError as `spread` does."""
        plan = _tensor_plan(module) if self.parallel.tensor != 1 else {}  # of the whole module: a stage has none
        if self.layout.pipeline > 1:
            try:
                module = stage_of(module, self.layout.stage(self.rank), self.layout.pipeline)
            except ValueError as error:
                raise UsageError(f"parallel.pipeline: {error}") from None
        if plan:
            assert self._mesh is not None
            _parallelize(module, self._mesh["tensor"], plan)
        if self._is_sharded and self._is_wrapped(module):
            assert self._mesh is not None
            hybrid = self.layout.replicas > 1 or self.parallel.data == "ddp"
            mesh = self._mesh["replica", "shard"] if hybrid else self._mesh["shard"]
            reshard_after_forward = self.parallel.data in ("zero3", "hsdp")
            shard(
                module,
                mesh,
                reshard_after_forward=reshard_after_forward,
                dtype=AUTOCAST.get(self._precision),
                offload=self.parallel.offload,
            )
        return module

    @property
    def _is_sharded(self) -> bool:
        # DDP takes no DTensors: with `tensor`, ddp is fully_shard over shards of one rank.
        return self.parallel.data in SHARDED or self.layout.tensor > 1

    def _is_wrapped(self, module: nn.Module) -> bool:
        """Whether DDP or fully_shard gets a module; fully_shard gets one rank's, too, to offload it."""
        is_needed = self.layout.data > 1 or self.parallel.offload
        return is_needed and any(parameter.requires_grad for parameter in module.parameters())

    def _replicated(self, module: nn.Module, options: Mapping[str, bool]) -> nn.Module:
        wrapped = data_parallel(module, self.device, self.data_group, self.comm.bucket_cap_mb, **options)
        if self.stages is not None:
            settle_stage(wrapped)
        if self.comm.hook != "none":
            self.compressions.append(
                Compression(wrapped, self.comm.hook, self.comm.powersgd_rank, self.comm.powersgd_start)
            )
        return wrapped

    def _check_options(self, options: Mapping[str, bool]) -> None:
        """Whether DDP, if this is to be DDP, takes these options: on one rank too, where there is none."""
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise UsageError(f"ctx.parallelize({unknown[0]}=...): it takes DDP's {', '.join(OPTIONS)}")
        for name in options:
            other: str = "local SGD" if self.comm.local_sgd > 1 else self.parallel.data
            if self.parallel.tensor != 1:
                other = "tensor"
            if other not in ("ddp", "zero1"):
                raise UsageError(f"ctx.parallelize({name}=...) is an option of DDP's, and {other} does without it")
            if name == "static_graph" and self.parallel.pipeline != 1 and options[name]:
                raise UsageError("ctx.parallelize(static_graph=True): a pipeline calls a stage several times a step")

    def _data_group(self) -> dist.ProcessGroup | None:
        """The ranks that work on samples of their own beside this one; None for all of them."""
        if self._mesh is None:
            return None
        if self.layout.shards == 1 or self.layout.replicas == 1:
            return self._mesh["replica" if self.layout.shards == 1 else "shard"].get_group()
        return self._mesh["replica", "shard"]._flatten("data").get_group()

    def optimizer(
        self, parameters: Parameters, make: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        """`make(parameters, **options)`; with zero1 each data-parallel rank keeps the state of a part of them."""
        listed: list[Any] = list(parameters)
        groups = divided_by_axes(listed, self._axes_of_all_stages(listed))
        if self.parallel.data == "zero1" and self.layout.data > 1:
            from jobkit.train.zero1 import Zero1  # here: its import takes 0.15 s

            return Zero1(groups, make, self.data_group, options)
        if len(groups) == 1 and groups[0].keys() == {"params"}:
            return make(groups[0]["params"], **options)
        return make(groups, **options)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give all copies of a spread module the first one's values of some tensors, in place."""
        send_first(tensors, self.data_group)

    def share_buffers(self, module: nn.Module) -> None:
        """Give all copies of a spread module the first one's buffers (BatchNorm's statistics), unless they may drift.

        Each copy goes on with statistics of its own samples; what is saved, evaluated and exported is one of them.
        """
        if self.layout.data > 1 and not self.drifts:
            self.share(unwrapped(module).buffers())

    def _axes_of_all_stages(self, parameters: Parameters) -> list[Axes]:
        """The axes that parameters of any stage are spread over, in one order on all stages."""
        found = [{_axes(parameter) for group in _groups(parameters) for parameter in group["params"]}]
        if self.stages is not None:
            found *= dist.get_world_size(self.stages)
            dist.all_gather_object(found, found[0], group=self.stages)
        return sorted({axes for of_a_stage in found for axes in of_a_stage})

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The 2-norm of all gradients of the model, on every rank."""
        return gradient_norm(parameters, self.stages)

    def backward(
        self,
        model: nn.Module,
        inputs: Any,
        loss: Loss,
        target: Any,
        *,
        global_batch_size: BatchSize,
        see: Callable[[Tensor], None] = lambda loss: None,
        **options: Any,
    ) -> Tensor:
        """See jobkit.train.accumulation.backward; a pipeline runs its schedule instead.

        With local SGD the mean is of this rank's share: its replicas wait for each other at an average only.
        """
        ranks, size = self.layout.data, batch_size(inputs)
        largest: int | None = None
        if global_batch_size == SUM:
            total, largest = self._add_up_shares(size)
        else:
            try:
                total = operator.index(global_batch_size)  # type: ignore[arg-type]
            except TypeError:
                raise UsageError(
                    f"ctx.backward: global_batch_size is {global_batch_size!r}: expected a whole number, or {SUM!r}"
                ) from None
        if not isinstance(model, Pipeline):
            return backward(
                model,
                inputs,
                loss,
                target,
                global_batch_size=total,
                largest_share=largest,
                data_ranks=ranks,
                unsynchronised=lambda: without_synchronisation(model),
                add_up=self._add_up if ranks > 1 and not self.drifts else None,
                see=see,
                **options,
            )
        if size * ranks != total:
            raise UsageError(
                f"parallel.pipeline: a share of {size} is not one of {ranks} equal ones of a global batch of {total}: "
                "the schedules of data-parallel ranks must have equally many micro-batches of one size"
            )
        scale = options.pop("scale", 1.0)
        mean = model.backward(inputs, loss, target, weight=scale, **options) / ranks
        if ranks > 1:
            dist.all_reduce(mean, group=self.data_group)
        see(mean)
        return mean

    def _add_up(self, value: Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.all_reduce(value, group=self.data_group, async_op=True)
        return work

    def _add_up_shares(self, size: int) -> tuple[int, int]:
        """The sum of the data-parallel ranks' shares, and the largest of them; waits for the device."""
        sizes = torch.zeros(self.layout.data, dtype=torch.int64, device=self.device)
        sizes[self.data_rank] = size
        if self.layout.data > 1:
            dist.all_reduce(sizes, group=self.data_group)
        return int(sizes.sum()), int(sizes.max())


def unwrapped(value: Any) -> Any:
    """The module inside DDP's, torch.compile's and a pipeline's, whose names are those of the user's own module."""
    while isinstance(value, nn.Module):
        inner = value.stage if isinstance(value, Pipeline) else uncompiled(value)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        if inner is value:
            break
        value = inner
    return value


def _keep_generators(mesh: DeviceMesh) -> None:
    """Let each rank draw what its DTensors need from its own generator as it stands; ranks that share samples have
    seeded theirs alike.

    At the first draw on a GPU torch would give every rank the generator of rank 0: ranks with other samples would draw
    the same numbers, a resumed run others than before it, and stages would wait for those that never draw.
    """
    if mesh.device_type != "cpu" and _random._rng_tracker is None and _random.is_rng_supported_mesh(mesh):
        _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)


def _tensor_plan(module: nn.Module) -> dict[str, ParallelStyle]:
    if not hasattr(module, "tensor_plan"):
        raise UsageError(
            f"parallel.tensor: {type(module).__name__} has no tensor_plan() that says how its layers are divided; "
            'return {"layer.name": ColwiseParallel(), ...} (torch.distributed.tensor.parallel), or use another strategy'
        )
    plan: dict[str, ParallelStyle] = module.tensor_plan()  # type: ignore[operator]
    return plan


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """torch's parallelize_module with the part of a plan that is about children that are here, on this stage."""
    children = [name for name, _ in module.named_children()]
    here = {key: style for key, style in plan.items() if fnmatch.filter(children, key.split(".")[0])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a path that names nothing is a mistake in the plan
        try:
            parallelize_module(module, mesh, here)
        except (UserWarning, ValueError, NotImplementedError) as error:
            raise UsageError(f"parallel.tensor: {type(module).__name__}.tensor_plan(): {error}") from None


def divided_by_axes(parameters: Parameters, axes: Iterable[Axes]) -> list[dict[str, Any]]:
    """Parameter groups, divided so that none mixes tensors with DTensors, nor DTensors of different meshes.

    torch's multi-tensor kernels take no mixture. Each of `axes` makes a group, whether there are such parameters or
    not: all stages of a pipeline have equally many groups, as one learning-rate schedule for all of them needs.
    """
    return [
        {**group, "params": [parameter for parameter in group["params"] if _axes(parameter) == one]}
        for group in _groups(parameters)
        for one in axes
    ]


def _groups(parameters: Parameters) -> list[dict[str, Any]]:
    listed: list[Any] = list(parameters)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def _axes(parameter: nn.Parameter) -> Axes:
    data = parameter.data
    return tuple(data.device_mesh.mesh_dim_names or ()) if isinstance(data, DTensor) else ()
