"""Training in plain torch, by hand and by torch's own classes: what is right for the same training under `ctx`.

Nothing here imports jobkit. A place is a rank of a process group that stands; `ALONE` computes the whole batch.

seen = train(place, ddp, steps=4)
seen.gradients[0]["0.up.weight"], seen.weights[0], seen.losses[0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, BATCH, STEPS = 10, 12, 4
SGD = {"lr": 0.2, "momentum": 0.9}
"""Options of SGD: a gradient that is scaled shows in its weights, which Adam would hide."""

ALONE = SimpleNamespace(rank=0, world_size=1)
mse = nn.functional.mse_loss
Arrays = dict[str, Any]
Batch = tuple[Tensor, Tensor]


@dataclass
class Seen:
    """What a training showed, step by step; arrays by the names of the parameters."""

    gradients: list[Arrays] = field(default_factory=list)
    """Before they are unscaled and clipped."""
    weights: list[Arrays] = field(default_factory=list)
    """After the step."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    kept: tuple[int, int] = (0, 0)
    """Numbers that this rank keeps: of the parameters, and of the optimizer's state."""
    final: Arrays = field(default_factory=dict)
    """The weights that others get in the end: the averages, where there are any."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Net(nn.Sequential):
    def tensor_plan(self) -> dict[str, Any]:
        return PLAN


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net(*[Block() for _ in range(4)])


def batch_of(step: int, size: int = BATCH) -> Batch:
    x, y = torch.randn(2, size, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
    return x, y


def with_overflow(step: int, size: int = BATCH) -> Batch:
    """Return a batch whose gradients do not fit into fp16 in step 2, times a scale of 2 ** 16."""
    x, y = batch_of(step, size)
    return x, y + 100 * (step == 2)


def share(place: Any, batch: Batch) -> Batch:
    """Return a rank's part of a batch."""
    size = len(batch[0])
    part = slice(size * place.rank // place.world_size, size * (place.rank + 1) // place.world_size)
    return batch[0][part], batch[1][part]


def arrays(tensors: Iterable[tuple[str, Tensor | None]]) -> Arrays:
    """Return copies of tensors, whole ones of those that are divided over the ranks."""
    pairs = [(name.removeprefix("module."), tensor) for name, tensor in tensors if tensor is not None]
    whole = [(name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor) for name, tensor in pairs]
    return {name: tensor.detach().float().numpy().copy() for name, tensor in whole}


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    local: Any = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has one of a part
    state = [value for item in local.state.values() for value in item.values() if isinstance(value, Tensor)]
    sizes = [
        sum(part.to_local().numel() if isinstance(part, DTensor) else part.numel() for part in tensors)
        for tensors in ([parameter.data for parameter in model.parameters()], state)
    ]
    return sizes[0], sizes[1]


def gradients(model: nn.Module) -> Arrays:
    return arrays((name, parameter.grad) for name, parameter in model.named_parameters())


# How a model is spread: `spread(model, place)` returns it and what makes its optimizer


Make = Callable[..., torch.optim.Optimizer]
Spread = Callable[[nn.Module, Any], tuple[nn.Module, Make]]


def whole(model: nn.Module, place: Any) -> tuple[nn.Module, Make]:
    return model, torch.optim.SGD


def ddp(model: nn.Module, place: Any, **options: Any) -> tuple[nn.Module, Make]:
    return DistributedDataParallel(model, **options) if place.world_size > 1 else model, torch.optim.SGD


def hooked(model: nn.Module, place: Any, *, power_sgd: bool) -> tuple[nn.Module, Make]:
    model = DistributedDataParallel(model)
    if power_sgd:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, torch.optim.SGD


def zero1(model: nn.Module, place: Any) -> tuple[nn.Module, Make]:
    make: Any = lambda parameters, **options: ZeroRedundancyOptimizer(parameters, torch.optim.SGD, **options)  # noqa: E731
    return DistributedDataParallel(model), make


def sharded(model: nn.Module, place: Any, *, reshard: bool, replicas: int = 1) -> tuple[nn.Module, Make]:
    shape = (replicas, place.world_size // replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return model, torch.optim.SGD


def tensor(model: nn.Module, place: Any) -> tuple[nn.Module, Make]:
    return parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), PLAN), torch.optim.SGD


# Training


def backward(model: nn.Module, batch: Batch, count: int, scale: Callable[[Tensor], Tensor], autocast: Any) -> float:
    """Add the gradients of a rank's part, in `count` micro-batches of which the last communicates; return its loss."""
    total, parts = 0.0, list(zip(batch[0].tensor_split(count), batch[1].tensor_split(count), strict=True))
    for number, (x, y) in enumerate(parts):
        is_quiet = isinstance(model, DistributedDataParallel) and number < len(parts) - 1
        with model.no_sync() if is_quiet else nullcontext():
            with autocast():
                loss = mse(model(x), y)
            part = len(x) / len(batch[0])
            scale(loss * part if count > 1 else loss).backward()
        total += loss.item() * part
    return total


def train(
    place: Any,
    spread: Spread = ddp,
    *,
    steps: int = STEPS,
    batches: Callable[[int], Batch] = batch_of,
    count: int = 1,
    max_norm: float | None = None,
    dtype: torch.dtype | None = None,
    average_every: int = 0,
    make: Make | None = None,
    ema_decay: float | None = None,
    **options: Any,
) -> Seen:
    """Train in plain torch. `average_every` is local SGD; fp16 has a GradScaler; `ema_decay` an AveragedModel."""
    seen, (model, torchs) = Seen(), spread(net(), place)
    optimizer = (make or torchs)(model.parameters(), **(options or SGD))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    averaged = AveragedModel(model, avg_fn=moves_by(ema_decay)) if ema_decay is not None else None
    if averaged is not None:
        averaged.update_parameters(model)  # it begins as the weights before the first update
    for step in range(steps):
        autocast = nullcontext if dtype is None else lambda: torch.autocast("cpu", dtype=dtype)
        loss = backward(model, share(place, batches(step)), count, scaler.scale, autocast)
        seen.gradients.append(gradients(model))
        if max_norm is not None:
            scaler.unscale_(optimizer)
            seen.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if average_every and ((step + 1) % average_every == 0 or step + 1 == steps):
            average(model)
        if averaged is not None:
            averaged.update_parameters(model)
        seen.losses.append(mean_over_ranks(loss, place))
        seen.weights.append(arrays(model.named_parameters()))
    seen.kept = kept(model, optimizer)
    last = model if averaged is None else averaged.module
    seen.final = arrays(last.named_parameters())
    return seen


def moves_by(decay: float) -> Callable[..., Tensor]:
    """Return the move of an average after the update with the number `count`: by min(decay, (1 + n) / (10 + n))."""

    def move(average: Tensor, value: Tensor, count: Any) -> Tensor:
        d = min(decay, (1 + float(count)) / (10 + float(count)))
        return d * average + (1 - d) * value

    return move


def mean_over_ranks(value: float, place: Any) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    if place.world_size > 1:
        dist.all_reduce(total)
    return float(total) / place.world_size


@torch.no_grad()
def average(model: nn.Module) -> None:
    """Replace the ranks' weights by their mean."""
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter /= dist.get_world_size()


# Loops with an order and random numbers of their own


class Crossed(nn.Module):
    """A network whose gradients become ready in another order than its parameters are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(400, 1), nn.Linear(400, 400), nn.Linear(300, 400)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def crossed() -> nn.Module:
    torch.manual_seed(0)
    return Crossed()


def points(size: int) -> TensorDataset:
    x = torch.randn(size, 300, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def batch_of_points(step: int, size: int) -> Batch:
    x, y = points(96).tensors
    ids = torch.arange(step * size, (step + 1) * size) % 96
    return x[ids], y[ids]


def train_uninterrupted(place: Any, steps: int, size: int) -> Arrays:
    """Return the weights after some steps over `points`, in their order, with DDP, momentum and a schedule."""
    model = DistributedDataParallel(crossed(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(steps):
        x, y = share(place, batch_of_points(step, size))
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return arrays(model.named_parameters())


class Rooted(Net):
    """A network whose root has a parameter of its own: fully_shard leaves it gathered after a forward."""

    def __init__(self) -> None:
        super().__init__(*[Block() for _ in range(3)])
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift)


OWN_SHARDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "root_kept": {"reshard": False},
    "accumulates": {"updates_every": 3},
    "accumulates_float32": {"updates_every": 3, "policy": MixedPrecisionPolicy()},
    "accumulates_replica": {"updates_every": 3, "replicas": 3},
}
"""Scripts with fully_shard of their own. What they accumulate lies within fully_shard until its ranks exchange it."""


class OwnShards:
    """Training of a network that fully_shard divides over all ranks and gathers in bf16."""

    def __init__(
        self,
        reshard: bool | None = None,
        updates_every: int = 1,
        replicas: int = 1,
        policy: MixedPrecisionPolicy = MixedPrecisionPolicy(torch.bfloat16, torch.float32),  # noqa: B008
    ) -> None:
        torch.manual_seed(0)
        self.model, self._every, self._replicas = Rooted(), updates_every, replicas
        shape = (replicas, dist.get_world_size() // replicas)
        mesh = init_device_mesh("cpu", shape[replicas == 1 :], mesh_dim_names=("replica", "shard")[replicas == 1 :])
        for part in (*self.model.children(), self.model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, place: Any, step: int) -> float:
        """Train on a batch, and validate every second time; return the loss."""
        is_update = (step + 1) % self._every == 0
        root: Any = self.model
        exchanges = root.set_requires_gradient_sync if self._replicas == 1 else root.set_requires_all_reduce
        exchanges(is_update)
        loss = mse((x := self.model(share(place, batch_of(step))[0])), share(place, batch_of(step))[1].to(x.dtype))
        loss.backward()
        if is_update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                self.model(batch_of(100)[0])
        return loss.item()


def train_own_shards(place: Any, way: str) -> tuple[Arrays, list[float]]:
    own = OwnShards(**OWN_SHARDS[way])
    losses = [own.step(place, step) for step in range(9)]
    with torch.no_grad():
        mean = torch.cat([own.model(x)[:, 0].double() for x in batch_of(100, 7)[0].split(2)]).mean().item()
    for part in own.model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return arrays(own.model.named_parameters()), [*losses, mean]


class OwnDdp:
    """Training with DistributedDataParallel as a script makes it; with `accumulates` two batches make an update.

    With `sends` each of these is exchanged, and with `keeps` the gradients become zeros in their place. With `norm`
    the model has buffers, which DDP sends before a forward, but not after one within no_sync.
    """

    def __init__(
        self,
        accumulates: bool = False,
        sends: bool = False,
        keeps: bool = False,
        norm: bool = False,
        hook: Any = None,
        **options: Any,
    ) -> None:
        net = nn.Sequential(nn.BatchNorm1d(300), crossed()) if norm else crossed()
        self.model = DistributedDataParallel(net, bucket_cap_mb=1, **options)
        if hook is not None:
            self.model.register_comm_hook(None, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._accumulates, self._sends, self._keeps = accumulates, sends, keeps

    def step(self, number: int, batch: Batch) -> None:
        is_first = self._accumulates and number % 2 == 0
        with self.model.no_sync() if is_first and not self._sends else nullcontext():
            mse(self.model(batch[0]), batch[1]).backward()
        if not is_first:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not self._keeps)


OWN_DDP: dict[str, dict[str, Any]] = {
    "tracked": {},
    "in_another": {},
    "tracked_inside": {},
    "averaged": {},
    "early": {},
    "viewed": {"gradient_as_bucket_view": True},
    "accumulated": {"accumulates": True},
    "accumulated_viewed": {"accumulates": True, "gradient_as_bucket_view": True},
    "kept_viewed": {"keeps": True, "gradient_as_bucket_view": True},
    "kept_viewed_accumulated": {"keeps": True, "accumulates": True, "gradient_as_bucket_view": True},
    "kept_viewed_unused": {"keeps": True, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    "sent_viewed": {"accumulates": True, "sends": True, "gradient_as_bucket_view": True},
    "accumulated_buffers": {"accumulates": True, "norm": True},
    "compressed": {"hook": default_hooks.fp16_compress_hook},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static_kept_viewed": {"static_graph": True, "keeps": True, "gradient_as_bucket_view": True},
}
"""How scripts make theirs, and what they track of it: each an option of OwnDdp."""


def train_own_ddp(place: Any, steps: int, size: int) -> dict[str, Arrays]:
    """Return the weights and buffers of each of OWN_DDP after some steps."""
    trained = {name: OwnDdp(**options) for name, options in OWN_DDP.items()}
    for step in range(steps):
        for own in trained.values():
            own.step(step, share(place, batch_of_points(step, size)))
    return {name: arrays(own.model.state_dict().items()) for name, own in trained.items()}


def dropped() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(300, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def train_epochs(epochs: int) -> tuple[Arrays, list[float]]:
    """Return the weights after some epochs, and numbers drawn in each step; lines above the batches draw, too.

    The gradients of three batches make an update.
    """
    model, loader, drawn = dropped(), DataLoader(points(24), batch_size=4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    scale = 1.0
    for _ in range(epochs):
        scale *= 0.5
        offset = scale * torch.rand(1)
        for x, y in loader:
            mse(model(x + offset), y).backward()
            drawn.append(torch.rand(()).item())
            if len(drawn) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return arrays(model.named_parameters()), drawn


def dealt(place: Any, epochs: int, shuffle: bool) -> list[list[int]]:
    """Return the batches that DistributedSampler deals to a rank."""
    sampler: Any = DistributedSampler(range(24), place.world_size, place.rank, shuffle=shuffle)
    loader, seen = DataLoader(range(24), batch_size=2, sampler=sampler), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        seen += [batch.tolist() for batch in loader]
    return seen


def error(x: Tensor) -> Tensor:
    """Return a value for each sample [n]; a large part of it cancels in a sum, whose rounding so shows."""
    sign = torch.where(x[:, 0] < 0.5, 1.0, -1.0).double()
    return x.double().sum(1) + 1e12 * sign
