"""DDP lays its buckets out after its first backward: a run that goes on must lay them out alike, or bits differ."""

from __future__ import annotations

from pathlib import Path

import torch
from harness.ranks import run_ranks
from oracle.plain import Crossed
from torch import nn

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.live import Entry
from jobkit.checkpoint.staging import Place
from jobkit.group import RankGroup
from jobkit.run.schema import CommConfig, Config
from jobkit.train.spread import Spread

CONFIG = Config(name="test", task="module:function", comm=CommConfig(bucket_cap_mb=1))
STEPS = 6


def train(
    ranks: RankGroup, folder: Path, restores_order: bool, stop: int = 3, static_graph: bool = False
) -> tuple[list[float], list[float]]:
    """Return weights of a straight run, and of a run that goes on from a step."""

    def make() -> tuple[Spread, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        spread = Spread(CONFIG, torch.device("cpu"), ranks)
        model = spread.parallelize(Crossed(), static_graph=static_graph)
        return spread, model, spread.optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)

    def entries(spread: Spread, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Entry]:
        made = [Entry(name="model", live=model), Entry(name="optimizer", live=optimizer)]
        return [*made, Entry(name="order", live=spread.orders, scope="rank")] if restores_order else made

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.rand(16, 300, generator=torch.Generator().manual_seed(100 * step + ranks.rank))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def digest(model: nn.Module) -> list[float]:
        return [value for parameter in model.parameters() for value in parameter.detach().flatten()[:500].tolist()]

    place = Place(ranks.rank, ranks.world_size, ranks.world_size)
    straight = make()
    steps(straight[1], straight[2], 0, stop)
    checkpointer = Checkpointer(folder, ranks, place, attempt=1, keep=1)
    checkpointer.write(checkpointer.stage(stop, entries(*straight), {}), wait=True)
    steps(straight[1], straight[2], stop, STEPS)
    again = make()
    checkpointer = Checkpointer(folder, ranks, place, attempt=2, keep=1)
    checkpointer.restore(entries(*again))
    steps(again[1], again[2], stop, STEPS)
    return digest(straight[1]), digest(again[1])


def test_a_run_that_goes_on_adds_gradients_up_in_the_same_order(tmp_path: Path) -> None:
    for straight, again in run_ranks(train, 3, tmp_path / "with", True):
        assert again == straight


def test_without_the_order_the_last_bits_differ(tmp_path: Path) -> None:
    assert any(again != straight for straight, again in run_ranks(train, 3, tmp_path / "without", False))


def test_a_static_graph_is_saved_after_its_first_step(tmp_path: Path) -> None:
    for straight, again in run_ranks(train, 2, tmp_path, True, 1, True):
        assert straight == again
