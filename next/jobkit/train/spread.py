"""How the YAML's `parallel:` and `comm:` spread a model over the ranks.

    module --weights.py--> the same weights on all ranks --DDP--> the module that the training function calls

context.py calls this. This edition spreads by DDP; on a single rank a module stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.run.schema import Config
from jobkit.train.gradient_order import GradientOrder
from jobkit.train.weights import broadcast, check_same_module, materialise

OPTIONS = ("find_unused_parameters", "static_graph", "broadcast_buffers", "gradient_as_bucket_view")
"""DDP's options that ctx.parallelize passes on."""


class Spread:
    """Spreads the models of one rank.

    spread = Spread(config, torch.device("cpu"), RankGroup.of_world())
    model = spread.parallelize(Net())
    spread.data_rank, spread.data_size      # this rank's part of a global batch
    """

    forward_is_collective = False
    """True where all ranks make a forward together, as of sharded weights: they evaluate as many batches each."""

    def __init__(self, config: Config, device: torch.device, ranks: RankGroup) -> None:
        parallel = config.parallel
        others = {
            "parallel.data": parallel.data != "ddp",
            "parallel.tensor": parallel.tensor not in (1, "all") or (parallel.tensor == "all" and ranks.world_size > 1),
            "parallel.pipeline": parallel.pipeline not in (1, "all")
            or (parallel.pipeline == "all" and ranks.world_size > 1),
            "comm.hook": config.comm.hook != "none",
            "comm.local_sgd": config.comm.local_sgd > 0,
        }
        if unknown := next((key for key, is_used in others.items() if is_used), None):
            raise UsageError(f"{unknown}: this edition spreads models by ddp alone")
        self.device, self.ranks = device, ranks
        self.data_rank, self.data_size = ranks.rank, ranks.world_size
        self.modules: list[nn.Module] = []
        """The modules that `parallelize` returned."""
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers that `optimizer` returned."""
        self.orders = GradientOrders()
        """The order in which DDP's gradients become ready: a part of the state of a run on several ranks."""
        self._bucket_cap_mb, self._seed = config.comm.bucket_cap_mb, config.seed or 0

    def parallelize(self, module: nn.Module, **options: bool) -> nn.Module:
        """Return the module on this rank's device, with rank 0's weights, spread over the ranks. All ranks call it.

        Raises UsageError for a module that differs between ranks, and for options that are not DDP's.
        """
        if unknown := next((name for name in options if name not in OPTIONS), None):
            raise UsageError(f"ctx.parallelize takes no {unknown}; it takes {', '.join(OPTIONS)}")
        module = materialise(module, self.device, self._seed)
        if self.ranks.world_size > 1:
            check_same_module(module, self.ranks)
            broadcast(module, self.ranks)
            if any(parameter.requires_grad for parameter in module.parameters()):
                module = self._ddp(module, options)
        self.modules.append(module)
        return module

    def _ddp(self, module: nn.Module, options: dict[str, bool]) -> nn.Module:
        device_ids = None if self.device.type == "cpu" else [self.device]
        # gradient_as_bucket_view saves a copy of all gradients.
        chosen: dict[str, Any] = {"gradient_as_bucket_view": True, "init_sync": False, **options}
        model = DistributedDataParallel(module, device_ids=device_ids, bucket_cap_mb=self._bucket_cap_mb, **chosen)
        self.orders.add(GradientOrder(model))
        return model

    def optimizer(
        self, model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """Return `make(parameters, **options)` for the model's trainable parameters. Raises UsageError."""
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        try:
            optimizer = make(trainable, **options)
        except (TypeError, ValueError) as error:
            name = getattr(make, "__name__", type(make).__name__)
            takes = ", ".join(list(inspect.signature(make).parameters)[1:])
            raise UsageError(f"ctx.optimizer: {name}: {error} (it takes {takes})") from error
        self.optimizers.append(optimizer)
        return optimizer

    @staticmethod
    def unsynchronised(model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this rank."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


class GradientOrders:
    """The orders of all DDP modules of a run: what a checkpoint holds of DDP."""

    def __init__(self) -> None:
        self._orders: list[GradientOrder] = []

    def add(self, order: GradientOrder) -> None:
        self._orders.append(order)

    def state_dict(self) -> dict[str, Any]:
        return {"orders": [order.learnt() for order in self._orders]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lay out the buckets as they were. All ranks call it together."""
        for order, names in zip(self._orders, state["orders"], strict=False):
            order.settle(names)


@contextmanager
def independent_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within it, a forward of DDP modules is no collective, and all ranks have rank 0's buffers in all modules.

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
        group = dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, buffers, 250 << 20, 0)  # type: ignore[attr-defined]
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
