"""What a training function does with a spread model beside training it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch import nn

from jobkit.errors import JobkitError
from jobkit.run.config import Config, ParallelConfig
from jobkit.train.engine import Engine


def engine_of(team: Team, precision: Any = "fp32", **parallel: Any) -> Engine:
    config = Config(name="x", task="a:b", parallel=ParallelConfig(**parallel), precision=precision)
    return Engine(config, torch.device("cpu"), team.rank, team.world_size, team.world_size)


ALONE = Team(0, 1, None)


# An optimizer and what it trains


def optimizers_made_before(team: Team, kinds: list[str]) -> list[str]:
    said = []
    for kind in kinds:
        engine, net = engine_of(team, data=kind), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = engine.parallelize(net)
        try:
            engine.check_tracked([model, optimizer])
            said.append("")
        except JobkitError as error:
            said.append(str(error))
        made_after = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(torch.ones(2, 4))  # zero2 leaves whole parameters in the place of shards
        engine.check_tracked([model, made_after])
    return said


def test_an_optimizer_made_before_its_model_is_sharded_is_refused() -> None:
    for ddp, *sharded in on_ranks(2, optimizers_made_before, ["ddp", "zero2", "zero3", "hsdp"]):
        assert ddp == "", "there it trains the model"
        assert len(sharded) == 3
        for said in sharded:
            assert said.startswith("the SGD would train 0.weight as it was before ctx.parallelize")


def test_an_optimizer_of_something_that_is_not_tracked_is_refused() -> None:
    engine, temperature = engine_of(ALONE), nn.Parameter(torch.ones(3))
    model = engine.parallelize(nn.Linear(2, 2))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    with pytest.raises(JobkitError, match=r"a parameter of shape \[3\] that is in no tracked module"):
        engine.check_tracked([model, optimizer])
    holder = nn.ParameterList([temperature])
    engine.check_tracked([model, optimizer, holder])
