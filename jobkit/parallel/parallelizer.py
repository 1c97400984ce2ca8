"""How the YAML's `parallel:` and `comm:` spread a model over the ranks.

    Layout --> mesh: pipeline x replica x shard x tensor
    module --stage, tensor_plan, fully_shard--> parts of it  --DDP, Pipeline--> the module that the function calls
           --weights.py--> rank 0's weights

context.py and step.py call this. On a single rank nothing is spread.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from jobkit.checkpoint.leaves import plain_module
from jobkit.config import layout
from jobkit.config.layout import SHARDED
from jobkit.config.schema import AUTO, Config
from jobkit.errors import UsageError
from jobkit.parallel.ddp import GradientOrder, members_of
from jobkit.parallel.devices import AUTOCAST, group_backend
from jobkit.parallel.gradients import gradient_norm
from jobkit.parallel.weights import broadcast, check_same_module, materialise
from jobkit.wire.group import RankGroup

if TYPE_CHECKING:
    from jobkit.parallel.compression import Compression

OPTIONS = ("find_unused_parameters", "static_graph", "broadcast_buffers", "gradient_as_bucket_view")
"""DDP's options that ctx.parallelize passes on."""

AXES = ("pipeline", "replica", "shard", "tensor")


class Parallelizer:
    """Spreads the models of one rank.

    spread = Parallelizer(config, torch.device("cpu"), RankGroup.of_world())
    model = spread.parallelize(Net())
    spread.data_rank, spread.data_size      # this rank's part of a global batch
    """

    def __init__(self, config: Config, device: torch.device, ranks: RankGroup, ranks_per_node: int = 0) -> None:
        self.layout = layout.check(config, ranks.world_size, ranks_per_node or ranks.world_size)
        self.device, self.ranks = device, ranks
        self.data_rank, self.data_size = self.layout.data_rank(ranks.rank), self.layout.data
        self.modules: list[nn.Module] = []
        """The modules that `parallelize` returned."""
        self._gathers: dict[FSDPModule, tuple[dict[str, Any], str, Any]] = {}
        """The parts of modules that fully_shard divides, and that a forward may leave gathered; of each the place of a
        parameter, and its shard."""
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers that `optimizer` returned."""
        self.orders = GradientOrders(ranks)
        """The order in which DDP's gradients become ready: a part of the state of a run on several ranks."""
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self.compressions: list[Compression] = []
        """The hooks of comm.hook: a part of the state of each rank."""
        self._config, self._seed = config, config.random_seed or 0
        self.is_local_sgd = config.comm.local_sgd > 1 and self.data_size > 1
        """True if replicas differ between two averages (local SGD)."""
        parallel = config.parallel
        # DDP takes no DTensors: with `tensor`, ddp is fully_shard over shards of a single rank.
        self._is_sharded = parallel.offload or (
            (parallel.data in SHARDED or self.layout.tensor > 1) and self.data_size > 1
        )
        self._mesh: DeviceMesh | None = None
        self.data_group: dist.ProcessGroup | None = None
        """The ranks with other samples, beside this one; None for all ranks."""
        self.stage_group: dist.ProcessGroup | None = None
        """The ranks with the stages of one copy of the model."""
        if parallel.offload and not dist.is_initialized():  # a single rank, whose mesh needs a group all the same
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(group_backend(device), store=store, rank=0, world_size=1)
        if self._is_sharded or self.layout.tensor > 1 or self.layout.pipeline > 1:
            shape = (self.layout.pipeline, self.layout.replicas, self.layout.shards, self.layout.tensor)
            self._mesh = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
            both = self.layout.replicas > 1 and self.layout.shards > 1
            data = self._mesh["replica", "shard"]._flatten("data") if both else None
            axis = "shard" if self.layout.replicas == 1 else "replica"
            self.data_group = (data if data is not None else self._mesh[axis]).get_group()
            if self.layout.pipeline > 1:
                self.stage_group = self._mesh["pipeline"].get_group()
        self.forward_is_collective = self._mesh is not None
        """True where all ranks make a forward together, as of sharded weights: they evaluate as many batches each."""

    def watch(self, value: Any) -> None:
        """Take note of what fully_shard divides in a tracked object, whoever called it."""
        if not isinstance(value, nn.Module) or (value in self.modules and not self._keeps_gathered):
            return
        parts: list[Any] = [part for part in plain_module(value).modules() if isinstance(part, FSDPModule)]
        self.forward_is_collective = self.forward_is_collective or bool(parts)
        for part in parts:
            part.reshard()
            holders = [module._parameters for module in _undivided(part)]
            places = ((holder, name, item) for holder in holders for name, item in holder.items() if item is not None)
            if (place := next(places, None)) is not None:
                self._gathers[part] = place

    def parallelize(self, module: nn.Module, **options: bool) -> nn.Module:
        """Return the module on this rank's device, with rank 0's weights, spread over the ranks. All ranks call it.

        Raises UsageError for a module that differs between ranks or cannot be spread so, and for options that are not
        DDP's.
        """
        if unknown := next((name for name in options if name not in OPTIONS), None):
            raise UsageError(f"ctx.parallelize takes no {unknown}; it takes {', '.join(OPTIONS)}")
        # A model that is sharded may be too large for a device: fully_shard puts the shards there.
        module = materialise(module, torch.device("cpu") if self._is_sharded else self.device, self._seed)
        if self.ranks.world_size > 1:
            check_same_module(module, self.ranks)
            broadcast(module, self.ranks)
        if self.ranks.world_size > 1 or self._is_sharded:
            module = self._spread(module, options)
        self.modules.append(module)
        return module

    def _spread(self, module: nn.Module, options: dict[str, bool]) -> nn.Module:
        inner = plain_module(module)
        plan = self._tensor_plan(inner) if self.layout.tensor > 1 else {}  # of the whole module: a stage has none
        if self.stage_group is not None:
            module = inner = self._stage_of(inner)
        if plan:
            self._divide_layers(inner, plan)
        has_gradients = any(parameter.requires_grad for parameter in inner.parameters())
        if self._is_sharded and has_gradients:
            self._shard(inner)
        elif self.data_size > 1 and not self._is_sharded and not self.is_local_sgd and has_gradients:
            module = self._ddp(module, options)
        else:
            module = module.to(self.device)
        if self.stage_group is None:
            return module
        from jobkit.parallel.pipeline import Pipeline

        microbatches = self._config.parallel.microbatches
        return Pipeline(module, self.stage_group, self.device, None if microbatches == AUTO else int(microbatches))

    def _stage_of(self, module: nn.Module) -> nn.Module:
        from jobkit.parallel.pipeline import stage_of  # here: few runs need torch's pipelining

        try:
            return stage_of(module, self.layout.stage(self.ranks.rank), self.layout.pipeline)
        except ValueError as error:
            raise UsageError(f"parallel.pipeline: {error}") from None

    def _ddp(self, module: nn.Module, options: dict[str, bool]) -> nn.Module:
        device_ids = None if self.device.type == "cpu" else [self.device]
        self._frozen += [(name, item) for name, item in module.named_parameters() if not item.requires_grad]
        # gradient_as_bucket_view saves a copy of all gradients.
        chosen: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": False, **options}
        model = DistributedDataParallel(
            module,
            device_ids=device_ids,
            process_group=self.data_group,
            bucket_cap_mb=self._config.comm.bucket_cap_mb,
            **chosen,
        )
        if self._config.comm.hook != "none":
            from jobkit.parallel.compression import Compression

            self.compressions.append(Compression(model, self._config.comm))
        order = GradientOrder(model)
        if self.stage_group is None:
            self.orders.add(order)
        else:
            order.fix_in_reverse()
        return model

    def _shard(self, module: nn.Module) -> None:
        from jobkit.parallel.fsdp import shard

        assert self._mesh is not None
        parallel = self._config.parallel
        is_hybrid = self.layout.replicas > 1 or parallel.data == "ddp"
        shard(
            module,
            self._mesh["replica", "shard"] if is_hybrid else self._mesh["shard"],
            reshard_after_forward=parallel.data in ("zero3", "hsdp"),
            dtype=AUTOCAST.get(self._config.precision),
            offload=parallel.offload,
        )

    def _tensor_plan(self, module: nn.Module) -> dict[str, Any]:
        if not hasattr(module, "tensor_plan"):
            raise UsageError(
                f"parallel.tensor: {type(module).__name__} has no tensor_plan() that says how its layers are divided; "
                'return {"layer.name": ColwiseParallel(), ...} (torch.distributed.tensor.parallel)'
            )
        plan: dict[str, Any] = module.tensor_plan()  # type: ignore[operator]
        return plan

    def _divide_layers(self, module: nn.Module, plan: Mapping[str, Any]) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        assert self._mesh is not None
        children = [name for name, _ in module.named_children()]  # a stage has some of them
        of_children = {
            key: style for key, style in plan.items() if any(fnmatch(n, key.split(".")[0]) for n in children)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a path that names nothing is a mistake in the plan
            try:
                parallelize_module(module, self._mesh["tensor"], of_children)
            except (UserWarning, ValueError, NotImplementedError) as error:
                raise UsageError(f"parallel.tensor: {type(module).__name__}.tensor_plan(): {error}") from None

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """Return `make(parameters, **options)` for the model's trainable parameters. Raises UsageError.

        torch's kernels for many tensors take DTensors of one mesh at a time: with `tensor` what the plan divides has a
        group of its own, on any number of ranks.
        """
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parts = [trainable]
        if self._config.parallel.tensor != 1:
            parts = [[item for item in trainable if _is_divided(item) == divided] for divided in (False, True)]
        groups = [{"params": part} for part in parts]
        try:
            if self._config.parallel.data == "zero1" and self.data_size > 1:
                from jobkit.parallel.zero1 import Zero1

                optimizer: torch.optim.Optimizer = Zero1(groups, make, self.data_group, options)
            else:
                # A frozen stage has groups without parameters.
                optimizer = make(groups if len(groups) > 1 or self.stage_group is not None else trainable, **options)
        except (TypeError, ValueError) as error:
            name = getattr(make, "__name__", type(make).__name__)
            takes = ", ".join(list(inspect.signature(make).parameters)[1:])
            raise UsageError(f"ctx.optimizer: {name}: {error} (it takes {takes})") from error
        self.optimizers.append(optimizer)
        return optimizer

    def check_optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Raise UsageError for an optimizer that would not train the spread model, or not as the YAML says."""
        present = {id(parameter) for module in self.modules for parameter in module.parameters()}
        for optimizer in optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            is_zero1 = self._config.parallel.data == "zero1" and self.data_size > 1
            if is_zero1 and optimizer not in self.optimizers:
                raise UsageError(
                    "parallel.data: zero1 divides an optimizer's state: make it by ctx.optimizer(model, ...)"
                )
            if self._is_sharded and parameters and not any(id(parameter) in present for parameter in parameters):
                raise UsageError(
                    "an optimizer has the parameters from before ctx.parallelize, which put shards in their place: "
                    "make it by ctx.optimizer(model, ...), or of the parameters of the model that came back"
                )

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the 2-norm of all gradients of the model, a float32 scalar, the same on every rank."""
        return gradient_norm(parameters, self.stage_group, device=self.device)

    @contextmanager
    def unsynchronised(self, model: nn.Module) -> Iterator[None]:
        """Within it, gradients stay on this rank."""
        inner = plain_module(model)
        if hasattr(inner, "set_requires_gradient_sync"):  # fully_shard's
            inner.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                inner.set_requires_gradient_sync(True)
            return
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            yield

    @property
    def _keeps_gathered(self) -> bool:
        """True if a forward without a backward pass leaves whole parameters in the place of shards (zero2)."""
        return self._is_sharded and self._config.parallel.data not in ("zero3", "hsdp")

    def reshard(self) -> None:
        """Put the shards back: before the state is read or restored, and before parameters are changed by hand."""
        for part in self._gathers:
            part.reshard()

    def reshard_gathered(self) -> None:
        """Put the shards back where a look shows that they are not there, for 0.1 us a part: at each boundary, for the
        next forward shall see the same whether a save came or not."""
        for part, (holder, name, shard) in self._gathers.items():
            if holder.get(name) is not shard:
                part.reshard()

    def check_frozen(self) -> None:
        """Raise UsageError for a parameter that DDP takes for frozen, and that is trained now."""
        name = next((name for name, parameter in self._frozen if parameter.requires_grad), None)
        if name is not None:
            raise UsageError(
                f"{name} was frozen when ctx.parallelize was called, so DDP does not exchange its gradients, and each "
                "rank trains it by its own samples: freeze it after ctx.parallelize(model, "
                "find_unused_parameters=True), or use parallel: zero3"
            )

    def average(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace all replicas by their mean: local SGD (arXiv:1805.09767). All ranks call it."""
        for tensor in self._drifting(optimizers):
            mean = tensor.contiguous()
            dist.all_reduce(mean)
            tensor.copy_(mean / self.data_size)

    @contextmanager
    def mean_replicas(self, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
        """Within it, all replicas are their mean. All ranks call it."""
        optimizers = [] if optimizer is None else [optimizer]
        tensors = self._drifting(optimizers)
        kept = [tensor.clone() for tensor in tensors]
        self.average(optimizers)
        try:
            yield
        finally:
            for tensor, value in zip(tensors, kept, strict=True):
                tensor.copy_(value)

    def _drifting(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
        tensors = [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]
        tensors += [state["ema"] for item in optimizers for state in item.state.values() if "ema" in state]
        return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def _undivided(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and the modules in it, but for those that fully_shard divides apart."""
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _undivided(child)


def _is_divided(parameter: nn.Parameter) -> bool:
    """Return whether the ranks of a tensor group have parts of a parameter."""
    return isinstance(parameter.data, DTensor) and "tensor" in (parameter.data.device_mesh.mesh_dim_names or ())


class GradientOrders:
    """The gradient orders of all DDP modules of a run: DDP's state in a checkpoint.

    Of those that others make it takes note as they are made: a script may track the module within one, Trainer and
    Lightning make theirs inside, and a framework that saves its own files has nothing tracked.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._orders: list[GradientOrder] = []
        self._others: dict[str, GradientOrder] = {}
        self._made: dict[str, weakref.ref[DistributedDataParallel]] = {}
        hook: Any = register_module_module_registration_hook
        self._hook = hook(self._note) if ranks.world_size > 1 else None

    def add(self, order: GradientOrder) -> None:
        self._orders.append(order)

    def _note(self, module: nn.Module, name: str, _: Any) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            group = f"of {members_of(module)}"
            number = sum(name.startswith(group) for name in self._made)
            self._made[f"{group} {number}"] = weakref.ref(module)

    def find(self, tracked: Mapping[str, nn.Module], ours: Iterable[nn.Module]) -> None:
        """Take in the DDP modules that others made, but for those within `known`; before the loop."""
        self.close()
        seen = {id(part) for module in ours for part in module.modules()}
        made = [(name, model) for name, reference in self._made.items() if (model := reference()) is not None]
        # What is tracked may be older than the context.
        for name, model in [*_ddp_within(tracked), *made]:
            if id(model) not in seen:
                seen.add(id(model))
                self._others[name] = GradientOrder(model)
        for _, order, _ in self._alive():
            order.say_if_lost()

    def close(self) -> None:
        """Take note of no others any more."""
        if self._hook is not None:
            self._hook.remove()

    def _alive(self) -> list[tuple[str, GradientOrder, Any]]:
        named = {**{str(number): order for number, order in enumerate(self._orders)}, **self._others}
        return [(name, order, model) for name, order in sorted(named.items()) if (model := order.model) is not None]

    def state_dict(self) -> dict[str, Any]:
        alive = self._alive()
        return {
            "orders": {name: order.learnt() for name, order, _ in alive},
            # After a forward without gradients, or within no_sync, DDP leaves its next broadcast of buffers out.
            "broadcasts": {name: model.require_forward_param_sync for name, _, model in alive},
            "in_buckets": {name: order.in_buckets() for name, order, _ in alive},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lay out the buckets as they were. All ranks call it together."""
        orders, broadcasts = state["orders"], state.get("broadcasts", {})
        if isinstance(orders, list):  # of an older run
            orders = {str(number): names for number, names in enumerate(orders)}
        alive = self._alive()
        # When Python frees a module that a script has given up differs between ranks.
        present = [set(names) for names in self._ranks.gather([name for name, _, _ in alive])]
        for name, order, model in alive:
            if all(name in present[rank] for rank in order.members):
                in_buckets = state.get("in_buckets", {}).get(name, [])
                if not order.fix_bucket_order(orders.get(name), in_buckets):
                    order.put_in_buckets(in_buckets)
                model.require_forward_param_sync = broadcasts.get(name, model.require_forward_param_sync)


def _ddp_within(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Yield the DDP modules within others, by name; but for copies in an average, which nobody trains."""
    for name, module in modules.items():
        averages = [part for part in module.modules() if isinstance(part, AveragedModel)]
        copies = {id(part) for average in averages for part in average.modules()}
        for path, part in module.named_modules():
            if isinstance(part, DistributedDataParallel) and id(part) not in copies:
                yield f"{name}.{path}", part


@contextmanager
def independent_forwards(modules: Iterable[nn.Module], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Within it, a forward of DDP modules is no collective, and all ranks of a group have its first rank's buffers.

    So the ranks may make different numbers of forwards, and a batch has the same result on each of them.
    """
    modules = list(modules)
    ddp = [module for module in modules if isinstance(module, DistributedDataParallel)]
    # After a forward without gradients DDP leaves the next broadcast out: ranks that made none would wait for it.
    before = [(module.broadcast_buffers, module.require_forward_param_sync) for module in ddp]
    # BatchNorm's averages and their like: other buffers, as quantised weights, do not differ between ranks.
    present = {id(buffer): buffer.detach() for module in modules for buffer in module.buffers()}.values()
    several = dist.is_initialized() and dist.get_world_size() > 1
    buffers = [buffer for buffer in present if several and buffer.is_floating_point() and buffer.itemsize > 1]
    kept = [buffer.clone() for buffer in buffers]
    if buffers:
        ranks = group or dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(ranks, buffers, 250 << 20, 0)  # type: ignore[attr-defined]
    try:
        for module in ddp:
            module.broadcast_buffers = False
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)
        for module, flags in zip(ddp, before, strict=True):
            module.broadcast_buffers, module.require_forward_param_sync = flags
