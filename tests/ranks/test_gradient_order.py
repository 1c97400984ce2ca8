"""DDP's buckets follow the true order of the gradients, in a resumed run from its first step on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import Team, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from jobkit.group import RankGroup
from jobkit.run.config import CommConfig, ParallelConfig
from jobkit.run.layout import factor
from jobkit.train.gradient_order import GradientOrder
from jobkit.train.parallel import Parallel
from jobkit.worker.tracked_state import TrackedState

WIDTH, STEPS = 24, 4
MEGABYTES = WIDTH * WIDTH * 4 / 2**20
"""Of a bucket: the weight and the bias of a layer."""

FORWARD = [2, 0, 3, 1]
"""The order in which the layers compute; they are registered as 0, 1, 2, 3."""

TRUE_ORDER = [[f"layers.{i}.bias", f"layers.{i}.weight"] for i in reversed(FORWARD)]


class Net(nn.Module):
    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in FORWARD)
        if unused:
            self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for i in FORWARD:
            x = torch.tanh(self.layers[i](x))
        return x


Make = Callable[[Parallel], nn.Module]


def spread(parallel: Parallel, **options: bool) -> nn.Module:
    return parallel.spread(Net(unused="static_graph" in options), **options)


def own(parallel: Parallel) -> nn.Module:
    """What a user wraps himself, with a hook of his own."""
    model = DistributedDataParallel(Net(), bucket_cap_mb=MEGABYTES)  # type: ignore[arg-type]
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def inside(parallel: Parallel) -> nn.Module:
    """Within a module that is tracked as a whole."""
    return nn.ModuleList([nn.Linear(2, 2), DistributedDataParallel(Net(), bucket_cap_mb=MEGABYTES)])  # type: ignore[arg-type]


def static(parallel: Parallel) -> nn.Module:
    return spread(parallel, static_graph=True)


def as_views(parallel: Parallel) -> nn.Module:
    return spread(parallel, gradient_as_bucket_view=True)


def finding_unused(parallel: Parallel) -> nn.Module:
    return spread(parallel, find_unused_parameters=True)


KINDS: list[tuple[Make, int, tuple[int, ...]]] = [
    (spread, 1, (0, 1, 3)),
    (spread, 2, (1,)),
    (own, 1, (2,)),
    (inside, 1, (1,)),
    (static, 1, (0, 1, 3)),  # torch begins no static graph with a micro-batch that is not sent
    (as_views, 2, (3,)),
    (finding_unused, 1, (0, 1)),
]
"""How the model is made, micro-batches, and after which steps the run is interrupted."""


def ddp_of(model: nn.Module) -> DistributedDataParallel:
    (found,) = (one for one in model.modules() if isinstance(one, DistributedDataParallel))
    return found


def layout(model: nn.Module) -> list[list[str]]:
    """The names of the parameters in each bucket, in the order in which buckets are sent."""
    ddp = ddp_of(model)
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    return [[names[one] for one in bucket.parameters()] for bucket in ddp.reducer._get_zeros_like_grad_buckets()]  # type: ignore[index]


class Training:
    def __init__(self, team: Team, make: Make) -> None:
        config = ParallelConfig()
        comm = CommConfig(bucket_cap_mb=MEGABYTES)  # type: ignore[arg-type]
        layout = factor(config, team.world_size, team.world_size)
        self.rank = team.rank
        self.parallel = Parallel(layout, config, comm, torch.device("cpu"), team.rank)
        self.model = make(self.parallel)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)

    def steps(self, first: int, last: int, micro: int = 1) -> None:
        ddp = ddp_of(self.model)
        for step in range(first, last):
            generator = torch.Generator().manual_seed(1000 * step + self.rank)
            for part in range(micro):
                with nullcontext() if part == micro - 1 else ddp.no_sync():
                    ddp(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tracked(self, team: Team, root: Path, resumes: bool) -> TrackedState:
        checkpointer = team.checkpointer(root)
        loaded = checkpointer.load_newest(names=()) if resumes else None
        tracking = TrackedState(self.parallel, checkpointer, RankGroup.of(team.group), loaded)
        tracking.add("model", self.model)
        return tracking

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def interrupted(team: Team, make: Make, root: Path, at: int, micro: int = 1) -> tuple[list[Tensor], Any]:
    """The weights of a run that is saved after `at` steps and resumed, and the layout of its first step after that."""
    before = Training(team, make)
    tracking = before.tracked(team, root, resumes=False)
    before.steps(0, at, micro)
    shared, held_by, own_state = tracking.trees()
    team.checkpointer(root).save(at, shared, own_state, held_by=held_by).wait()
    after = Training(team, make)
    after.tracked(team, root, resumes=True)
    after.steps(at, at + 1, micro)
    found = layout(after.model)
    after.steps(at + 1, STEPS, micro)
    return after.weights(), found


def whole(team: Team, make: Make, root: Path, micro: int = 1) -> tuple[list[Tensor], Any]:
    training = Training(team, make)
    training.tracked(team, root, resumes=False)
    training.steps(0, STEPS, micro)
    return training.weights(), layout(training.model)


def every_kind(team: Team, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for make, micro, interruptions in KINDS:
        name = f"{make.__name__}, {micro} micro-batch(es)"
        resumed = {at: interrupted(team, make, root / name / str(at), at, micro) for at in interruptions}
        found[name] = whole(team, make, root, micro), resumed
    settle = GradientOrder.settle
    GradientOrder.settle = lambda self, order: None  # type: ignore[method-assign]
    found["as torch does"] = whole(team, spread, root), {2: interrupted(team, spread, root / "control", 2)}
    GradientOrder.settle = settle  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On three ranks: with two, sums have one order only."""
    return on_ranks(3, every_kind, tmp_path_factory.mktemp("order"))[0]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_a_resumed_run_has_the_weights_of_the_uninterrupted_one_to_the_last_bit(trained: dict[str, Any]) -> None:
    for name, ((weights, _), resumed) in trained.items():
        for at, (again, _) in resumed.items():
            assert same(again, weights) == (name != "as torch does"), f"{name}, interrupted after {at}"


def test_the_buckets_have_the_true_order_from_the_first_step_after_a_resume(trained: dict[str, Any]) -> None:
    for name, ((_, buckets), resumed) in trained.items():
        if name.startswith("finding_unused"):  # DDP leaves those in reverse order of registration
            assert buckets == resumed[1][1] == resumed[0][1]
            assert [bucket[-1] for bucket in buckets] != [bucket[-1] for bucket in TRUE_ORDER]
            continue
        unused = [["other.weight"], ["other.bias"]] if name.startswith("static") else []
        assert buckets == [*TRUE_ORDER, *unused], name
        for at, (_, first) in resumed.items():
            is_settled = at > 0 and name != "as torch does"
            assert first == buckets if is_settled else len(first) == 1, f"{name}, resumed at {at}"


def resume_another_model(team: Team, root: Path) -> list[list[str]]:
    """With the parameters of one layer named otherwise."""
    before = Training(team, own)
    tracking = before.tracked(team, root, resumes=False)
    before.steps(0, 1)
    known = tracking.trees()[2]["gradient_order"]["model"][0]
    after = Training(team, own)
    (order,) = (GradientOrder(ddp_of(after.model)),)
    order.settle([name.replace("layers.3", "renamed") for name in known or []])
    after.steps(0, 2)
    return layout(after.model)


def test_an_order_of_other_parameters_is_learnt_anew(tmp_path: Path) -> None:
    assert on_ranks(2, resume_another_model, tmp_path) == [TRUE_ORDER] * 2
