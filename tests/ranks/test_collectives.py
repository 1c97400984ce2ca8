"""What ranks send each other of a model whose tensors lie in memory in any order, or with gaps."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch import nn

from jobkit.errors import DistributedError
from jobkit.group import RankGroup
from jobkit.run.records import FailureReport
from jobkit.supervisor.diagnosis import _is_secondary
from jobkit.train.data_parallel import send_first
from jobkit.train.local_sgd import average_replicas

Gathered = list[tuple[int, str]]


def gathered(team: Team, sizes: list[int]) -> tuple[Gathered, Gathered]:
    group = RankGroup.of_world()
    value = team.rank, "x" * sizes[team.rank]
    return group.gather(value), group.gather_on_main(value)


@pytest.mark.parametrize("sizes", [[0, 1, 2], [5000, 0, 3], [1, 2, 1_000_000], [1007, 1008, 1009]])
def test_values_of_any_size_are_gathered_on_all_ranks_or_on_the_first(sizes: list[int]) -> None:
    expected = [(rank, "x" * size) for rank, size in enumerate(sizes)]
    assert on_ranks(3, gathered, sizes) == [(expected, expected), (expected, []), (expected, [])]


def lose_one(team: Team, folder: Path) -> None:
    """A rank dies before it is asked for its value; the first goes on to tell the others something else."""
    group = RankGroup.of_world()
    group.gather("all are well")
    if team.rank == 2:
        os._exit(1)
    try:
        group.gather("all are well")
    except (RuntimeError, DistributedError) as error:  # and nothing else: what came is not taken for an answer
        (folder / f"{team.rank}").write_text(str(error))
    with suppress(RuntimeError):
        group.broadcast("something else")
    os._exit(0)  # else it would wait for the rank that is gone, until a collective's timeout


def test_ranks_that_wait_for_an_answer_learn_that_another_is_lost(tmp_path: Path) -> None:
    on_ranks(4, lose_one, tmp_path)
    for rank in (0, 1, 3):
        report = FailureReport(rank=rank, time=0.0, error=(tmp_path / f"{rank}").read_text())
        assert _is_secondary(report), "the rank that is gone is to blame, and its node"


class Views(nn.Module):
    """Tensors of each kind, all `value`."""

    def __init__(self, value: float, channels_last: bool) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.full((2, 3), value).t())
        images = torch.arange(16.0).view(2, 2, 2, 2) + value
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.register_buffer("images", images.contiguous(memory_format=layout))
        self.register_buffer("gaps", torch.full((4, 4), value)[:, ::2])
        self.register_buffer("expanded", torch.full((1, 2), value).expand(3, 2))


def both(team: Team) -> tuple[list[torch.Tensor], list[torch.Tensor], bool]:
    model = Views(float(team.rank), channels_last=team.rank == 0)
    average_replicas([model], [])
    average = [tensor.detach().clone() for tensor in (model.turned, *model.buffers())]
    model = Views(float(team.rank), channels_last=team.rank == 0)
    send_first(model.buffers())
    images = model.images
    return average, list(model.buffers()), images.is_contiguous(memory_format=torch.channels_last)


def test_views_channels_last_and_expanded_tensors_are_averaged_and_sent() -> None:
    expected = [torch.full((3, 2), 0.5), torch.arange(16.0).view(2, 2, 2, 2) + 0.5]
    expected += [torch.full((4, 2), 0.5), torch.full((3, 2), 0.5)]
    for rank, (average, sent, channels_last) in enumerate(on_ranks(2, both)):
        assert all(map(torch.equal, average, expected)), average
        assert all(map(torch.equal, sent, Views(0.0, channels_last=False).buffers())), sent
        assert channels_last == (rank == 0)
