"""fused_ema_adam on sharded parameters, and as the optimizer of each rank's part."""

from __future__ import annotations

import torch
from harness.ranks import Team, on_ranks
from harness.small_model import SAME_TRAJECTORY, assert_same, averages, net, take_steps, values
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from jobkit.train.optim import EmaAdamW, fused_ema_adam


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def compare_sharded(team: Team) -> None:
    one = net()
    optimizer = fused_ema_adam(one.parameters(), 1e-2)
    take_steps(one, optimizer, 0, 10)
    for fused in (True, False):
        module = net()
        for child in (module[0], module[2], module):
            fully_shard(child)
        sharded = fused_ema_adam(module.parameters(), 1e-2, fused=fused)
        take_steps(module, sharded, 0, 10)
        assert all(isinstance(average, DTensor) for average in averages(sharded))
        torch.testing.assert_close(whole(averages(sharded)), averages(optimizer), **SAME_TRAJECTORY)
        trained = values(module)
        with sharded.averaged():
            assert_same(values(module), averages(sharded))
        assert_same(values(module), trained)
        loaded = fused_ema_adam(module.parameters())
        loaded.load_state_dict(sharded.state_dict())
        assert_same(averages(loaded), averages(sharded))


def test_with_sharded_parameters_the_averages_are_sharded_too_and_the_same() -> None:
    on_ranks(2, compare_sharded)


def compare_zero(team: Team) -> None:
    one = net()
    optimizer = fused_ema_adam(one.parameters(), 1e-2)
    take_steps(one, optimizer, 0, 10)
    for make in (fused_ema_adam, EmaAdamW):
        module = net()
        zero = ZeroRedundancyOptimizer(module.parameters(), make, lr=1e-2, ema_decay=0.9999)  # type: ignore[arg-type]
        take_steps(module, zero, 0, 10)
        assert_same(values(module), values(one))
        own = {id(parameter) for parameter in zero.optim.state}
        everything = zip(module.parameters(), averages(optimizer), strict=True)
        mine = [(parameter, average) for parameter, average in everything if id(parameter) in own]
        assert 0 < len(mine) < 4, "each rank keeps some of the state"
        assert_same([zero.optim.state[parameter]["ema"] for parameter, _ in mine], [average for _, average in mine])


def test_it_is_the_local_optimizer_of_torchs_zero_redundancy_optimizer() -> None:
    on_ranks(2, compare_zero)
