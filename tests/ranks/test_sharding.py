"""What is gathered at a time, in which precision, and that tied weights stay tied."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor

from jobkit.errors import UsageError
from jobkit.run.config import Config, ParallelConfig
from jobkit.train.engine import Engine
from jobkit.train.optim import fused_ema_adam
from jobkit.train.parallel import unwrapped
from jobkit.train.sharding import reshard, shard_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.statistics = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tie:
            self.head.weight = self.embed.weight
            self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.statistics(x))


# Units


class Declared(Transformer):
    def shard_units(self) -> list[nn.Module]:
        return [self.head]


class LikeHuggingFace(Transformer):
    _no_split_modules = ("Linear", "Embedding")


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()


def names_of_units(module: nn.Module) -> list[str]:
    names = {part: name for name, part in module.named_modules()}
    return [names[unit] for unit in shard_units(module)]


def test_units_are_blocks_wherever_they_are() -> None:
    blocks = ["layers.0", "layers.1", "layers.2"]
    assert names_of_units(Transformer()) == blocks
    assert names_of_units(Wrapped()) == [f"model.{name}" for name in blocks]
    assert names_of_units(Declared()) == ["head"]
    assert "layers.1.up" in names_of_units(LikeHuggingFace()) and "layers.1" not in names_of_units(LikeHuggingFace())
    assert names_of_units(nn.Sequential(Block(), nn.Tanh(), Block())) == ["0", "2"]
    of_most = nn.Sequential(OrderedDict(embed=nn.Linear(8, 8), body=Wrapped(), head=nn.Linear(8, 8)))
    assert names_of_units(of_most) == ["embed", *(f"body.model.{name}" for name in blocks), "head"]
    assert names_of_units(nn.ModuleList([nn.ModuleList([Block()]), nn.Tanh()])) == ["0.0"]
    assert names_of_units(Block()) == []


# Training


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (2, 6), generator=generator).unbind()  # type: ignore[return-value]


def engine_of(team: Team, kind: str, precision: Any, offload: bool = False) -> Engine:
    config = Config(name="x", task="a:b", parallel=ParallelConfig(data=kind, offload=offload), precision=precision)
    return Engine(config, torch.device("cpu"), team.rank, team.world_size, team.world_size)


def train(team: Team, kind: str, precision: Any, tie: bool = False, seen: dict[str, Any] | None = None) -> nn.Module:
    engine = engine_of(team, kind, precision)
    torch.manual_seed(0)
    model = engine.parallelize(Transformer(tie))
    optimizer = engine.optimizer(model, torch.optim.SGD, lr=0.5)
    if seen is not None:
        watch(unwrapped(model), seen)
    for step in range(4):
        inputs, target = (part[3 * team.rank : 3 * team.rank + 3] for part in batch(step))
        engine.backward(model, inputs, nn.functional.cross_entropy, target, global_batch_size=6)
        if seen is not None:
            seen["gradient"] = model.get_parameter("head.weight").grad.dtype if kind != "ddp" else None
        engine.update(optimizer)
    reshard(model)
    return model


def watch(model: Any, seen: dict[str, Any]) -> None:
    block = model.layers[0]
    block.up.register_forward_hook(lambda part, _, y: seen.update(weight=part.weight.dtype, product=y.dtype))
    block.norm.register_forward_hook(lambda part, _, y: seen.update(norm=y.dtype))
    model.statistics.register_forward_hook(lambda part, _, y: seen.update(statistics=part.weight.dtype))
    model.register_forward_hook(lambda part, _, y: seen.update(output=y.dtype))


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = unwrapped(model).named_parameters(remove_duplicate=False)
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in found}


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest of any element."""
    assert left.keys() == right.keys() and all(left[name].dtype == right[name].dtype for name in left)
    return max((left[name] - right[name]).abs().max().item() for name in left)


def train_in_bf16(team: Team) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    found: dict[str, Any] = {"ddp in fp32": weights(train(team, "ddp", "fp32"))}
    for kind in ("ddp", "zero2", "zero3", "hsdp"):
        found[kind] = weights(model := train(team, kind, "bf16", seen=seen))
        found[f"seen in {kind}"] = dict(seen)
    for kind in ("ddp", "zero3"):
        found[f"{kind} in fp16"] = weights(train(team, kind, "fp16"))
    found["without autocast"] = model(batch(0)[0]).dtype
    return found


def test_sharded_models_in_bf16_train_as_ddp_does_under_autocast() -> None:
    for found in on_ranks(2, train_in_bf16):
        low, exact = torch.bfloat16, torch.float32
        types = {"product": low, "output": low, "norm": exact, "statistics": exact}
        assert found["seen in ddp"] == {**types, "weight": exact, "gradient": None}
        assert found["without autocast"] == low
        assert difference(found["ddp"], found["ddp in fp32"]) > 1e-3, "it is in bf16"
        assert difference(found["zero3 in fp16"], found["ddp in fp16"]) < 1e-6
        for kind in ("zero2", "zero3", "hsdp"):
            assert found[f"seen in {kind}"] == {**types, "weight": low, "gradient": exact}, kind
            assert difference(found[kind], found["ddp"]) < 1e-6, kind


def train_tied(team: Team) -> list[dict[str, Tensor]]:
    models = [train(team, kind, "fp32", tie=True) for kind in ("ddp", "zero3")]
    assert isinstance(models[1].layers[1], FSDPModule) and not isinstance(models[1].layers[0], FSDPModule)
    return [weights(model) for model in models]


def test_tied_weights_stay_tied_within_units_and_between_them() -> None:
    for ddp, zero3 in on_ranks(2, train_tied):
        for name, tensor in ddp.items():
            torch.testing.assert_close(zero3[name], tensor, rtol=1e-5, atol=1e-6, msg=name)
        assert torch.equal(zero3["head.weight"], zero3["embed.weight"])
        assert torch.equal(zero3["layers.0.up.weight"], zero3["layers.2.up.weight"])


# On the host


def train_offloaded(team: Team) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Weights with and without, of a model that was real and of one on meta, with clipping and averages."""
    found = {}
    for kind, precision, device in (("zero2", "fp32", "cpu"), ("zero3", "fp16", "cpu"), ("hsdp", "bf16", "meta")):
        both = []
        for offload in (True, False):
            engine = engine_of(team, kind, precision, offload)
            torch.manual_seed(0)
            with torch.device(device):
                net = Transformer()
            model = engine.parallelize(net)
            groups = [state._fsdp_param_group for state in map(fsdp_state, model.modules()) if state is not None]
            policies = {type(group.offload_policy) for group in groups}
            assert policies == {CPUOffloadPolicy if offload else OffloadPolicy} and len(groups) > 3
            optimizer = engine.optimizer(model, fused_ema_adam, lr=0.1)
            for step in range(4):
                inputs, target = (part[3 * team.rank : 3 * team.rank + 3] for part in batch(step))
                for _ in range(2):  # gradients that are added to those on the host
                    engine.backward(model, inputs, nn.functional.cross_entropy, target, global_batch_size=6)
                engine.update(optimizer, max_norm=0.1)
            with engine.averaged(optimizer):
                both.append({**weights(model), "output": model(batch(0)[0]).detach()})
            reshard(model)
        found[f"{kind} {precision} {device}"] = both[0], both[1]
    return found


def fsdp_state(part: nn.Module) -> Any:
    state = part._get_fsdp_state() if isinstance(part, FSDPModule) else None
    return state if state is not None and state._fsdp_param_group is not None else None


def test_the_policy_of_the_host_reaches_every_unit_and_changes_no_bit() -> None:
    for found in on_ranks(2, train_offloaded):
        for name, (offloaded, plain) in found.items():
            assert difference(offloaded, plain) == 0.0, name


# What fully_shard does not take


class WithScalar(Block):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(()))


class WithTwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})])
        self.layers[0]["down"].half()


def refused_by_name(team: Team, data: str) -> tuple[str, ...]:
    engine = engine_of(team, data, "fp32")
    messages = []
    for module in (WithScalar(), WithTwoTypes()):
        with pytest.raises(UsageError) as refused:
            engine.parallelize(module)
        messages.append(str(refused.value))
    return tuple(messages)


@pytest.mark.parametrize("data", ["zero2", "zero3"])
def test_a_scalar_or_a_block_of_two_types_is_refused_by_name(data: str) -> None:
    for scalar, types in on_ranks(2, refused_by_name, data):
        assert "temperature is a scalar" in scalar and "ddp" in scalar
        assert "layers.0.up.weight in torch.float32 and layers.0.down.weight in torch.float16" in types
