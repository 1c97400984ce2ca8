"""The weights a spread model begins with: rank 0's on every rank, or drawn from the seed on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness.ranks import Team, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from jobkit.errors import JobkitError
from jobkit.run.config import CommConfig, ParallelConfig
from jobkit.run.layout import factor
from jobkit.train.parallel import Parallel, unwrapped
from jobkit.train.weights import named_tensors

STRATEGIES: dict[str, tuple[dict[str, Any], CommConfig]] = {
    "ddp": ({}, CommConfig()),
    "local sgd": ({}, CommConfig(local_sgd=4)),
    "zero1": ({"data": "zero1"}, CommConfig()),
    "zero2": ({"data": "zero2"}, CommConfig()),
    "zero3": ({"data": "zero3"}, CommConfig()),
    "hsdp": ({"data": "hsdp", "shards": 2}, CommConfig()),
    "tensor": ({"tensor": "all"}, CommConfig()),
    "zero3 x tensor": ({"data": "zero3", "tensor": 2}, CommConfig()),
    "pipeline": ({"pipeline": 2}, CommConfig()),
    "zero3 x pipeline": ({"data": "zero3", "pipeline": 2}, CommConfig()),
}


class Block(nn.Module):
    """With a norm that 4 ranks divide unevenly, a table that is not saved, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.rand(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.down(self.up(x)))

    def reset_parameters(self) -> None:
        self.table = torch.rand(3, device=self.table.device)


class Net(nn.Sequential):
    def tensor_plan(self) -> dict[str, ParallelStyle]:
        return {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(*[Block() for _ in range(4)])


def parallel_of(team: Team, name: str, **options: Any) -> Parallel:
    case, comm = STRATEGIES[name]
    config = ParallelConfig(**case)
    layout = factor(config, team.world_size, team.world_size)
    return Parallel(layout, config, comm, torch.device("cpu"), team.rank, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a spread model, or stage, whole. Collective."""
    found = named_tensors(unwrapped(model)).items()
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in found}


def spread_what_rank_0_has(team: Team, names: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for name in names:
        model = net(seed=team.rank)  # each rank something else; rank 0 what is "pretrained"
        found.append(whole(parallel_of(team, name).spread(model)))
    frozen = nn.Linear(3, 3).requires_grad_(False)
    found.append(whole(parallel_of(team, "zero3").spread(frozen)))
    return found


def test_what_rank_0_alone_has_loaded_is_what_all_ranks_begin_with() -> None:
    pretrained = named_tensors(net(seed=0))
    found = on_ranks(4, spread_what_rank_0_has, list(STRATEGIES))
    for of_rank in found:
        for name, tensors in zip(STRATEGIES, of_rank, strict=False):
            assert ("pipeline" in name) == (len(tensors) < len(pretrained))
            for key, tensor in tensors.items():
                assert torch.equal(tensor, pretrained[key]), (name, key)
        assert torch.equal(of_rank[-1]["weight"], found[0][-1]["weight"]), "a frozen module too"


# On meta

DRAWN = {1: ["ddp"], 4: ["ddp", "zero2", "zero3", "hsdp", "tensor", "zero3 x tensor", "pipeline"]}


class Tied(nn.Module):
    """A table at both ends, initialised by the model as a whole: smaller than the table's own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw(team: Team, names: list[str]) -> list[tuple[dict[str, Tensor], dict[str, Tensor], bool]]:
    found = []
    for name in names:
        with torch.device("meta"):
            blocks, tied = net(), Tied()
        parallel = parallel_of(team, name, seed=3)
        model = parallel.spread(blocks)
        if "pipeline" in name or "tensor" in name:  # ties and attributes: not for these
            found.append((whole(model), {}, True))
            continue
        other = parallel.spread(tied)
        tensors = whole(other)
        before = torch.get_rng_state()
        other(torch.tensor([0, 1, 2, 3, 4, 5, 6, 0])).square().sum().backward()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        optimizer.step()
        after = whole(other)
        is_tied = torch.equal(after["embed.weight"], after["head.weight"])
        trains = not torch.equal(after["embed.weight"], tensors["embed.weight"])
        found.append((whole(model), tensors, is_tied and trains and torch.equal(before, torch.get_rng_state())))
    return found


def test_a_model_on_meta_is_drawn_from_the_seed_the_same_on_any_number_of_ranks() -> None:
    ((expected, tied, works),) = on_ranks(1, draw, DRAWN[1])[0]
    assert works
    assert 0.01 < tied["embed.weight"].std() < 0.03, "by init_weights(), which comes after reset_parameters()"
    assert not torch.equal(expected["0.up.weight"], expected["1.up.weight"])
    assert expected["0.up.weight"].abs().max() <= 6**-0.5 and expected["0.norm.running_var"].eq(1).all()
    for of_rank in on_ranks(4, draw, DRAWN[4]):
        for name, (tensors, of_tied, works) in zip(DRAWN[4], of_rank, strict=True):
            assert works, name
            for key, tensor in tensors.items():
                assert torch.equal(tensor, expected[key]), (name, key)
            for key, tensor in of_tied.items():
                assert torch.equal(tensor, tied[key]), (name, key)


class LikeHuggingFace(nn.Module):
    """The model knows how to initialise its parts; one block's is by the names of what is in it."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList([Block(), Block()])

    def _init_weights(self, part: nn.Module) -> None:
        if isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.data.normal_(std=0.02)
        if isinstance(part, nn.Linear):
            part.bias.data.zero_()
        if isinstance(part, nn.BatchNorm1d):
            part.reset_parameters()
        if isinstance(part, Block):
            part.table.fill_(1.0)
            part.down.weight.data.mul_(0.1)


def test_a_hugging_face_model_on_meta_is_initialised_as_it_says() -> None:
    with torch.device("meta"):
        model = LikeHuggingFace()
    tensors = named_tensors(parallel_of(Team(0, 1, None), "ddp").spread(model))
    assert 0.015 < tensors["embed.weight"].std() < 0.025 and tensors["layers.1.table"].eq(1).all()
    assert 0.01 < tensors["layers.1.up.weight"].std() < 0.03 and tensors["layers.1.down.weight"].abs().max() < 0.01


def load_on_rank_0_alone(team: Team) -> dict[str, Tensor]:
    with torch.device("cpu" if team.rank == 0 else "meta"):
        model = net()
    return whole(parallel_of(team, "zero3").spread(model))


def test_ranks_that_are_not_0_may_build_on_meta_what_rank_0_has_loaded() -> None:
    pretrained = named_tensors(net())
    for of_rank in on_ranks(2, load_on_rank_0_alone):
        assert all(torch.equal(tensor, pretrained[name]) for name, tensor in of_rank.items())


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


class Masked(nn.Linear):
    """A causal mask beside weights that initialise themselves: nothing gives it its values again."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        pass


def scaled(module: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        module.weight.mul_(0.1)
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no way": (lambda: nn.Sequential(nn.Linear(2, 2), Bare()), "1 (Bare) is on the meta device and cannot initialise"),
    "left": (
        lambda: nn.Sequential(nn.Linear(2, 2), Forgetful()),
        "1.scale is on the meta device, and what initialises",
    ),
    "mask": (lambda: nn.Sequential(Masked()), "0.mask is on the meta device, and what initialises"),
    "lost": (lambda: nn.Sequential(scaled(nn.Linear(2, 2))), "0.weight is on the meta device, and was given values by"),
}


def refuse(team: Team) -> list[str]:
    said = []
    for build, _ in REFUSED.values():
        with torch.device("meta"):
            model = build()
        try:
            parallel_of(team, "zero3").spread(model)
        except JobkitError as error:
            said.append(str(error))
    try:
        parallel_of(team, "ddp").spread(nn.Linear(2, 2 + team.rank))
    except JobkitError as error:
        said.append(str(error))
    return said


def test_what_cannot_initialise_itself_on_meta_and_different_models_are_refused_on_all_ranks() -> None:
    for of_rank in on_ranks(2, refuse):
        assert len(of_rank) == 5
        for said, (_, expected) in zip(of_rank, REFUSED.values(), strict=False):
            assert expected in said
        assert "not the same as rank 0's" in of_rank[4]
