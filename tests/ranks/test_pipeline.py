"""A model in stages on several ranks trains as the whole model does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.ranks import make_context, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import jobkit
from jobkit.config.schema import Config, ParallelConfig
from jobkit.errors import UsageError
from jobkit.parallel.accumulation import call
from jobkit.parallel.gradients import clip_gradients, gradient_norm
from jobkit.parallel.pipeline import OLDEST_TORCH, Pipeline, cut_stages, stage_of
from jobkit.wire.group import RankGroup

WIDTH, BATCH = 4, 12

if torch.__version__ < OLDEST_TORCH:
    pytest.skip("torch is too old for pipelines", allow_module_level=True)


class Conditioned(nn.Module):
    """Returns its inputs, `x` changed: by a condition that needs a gradient, and ids and a mask that need none."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear, self.embed = number, nn.Linear(WIDTH, WIDTH), nn.Embedding(4, WIDTH)
        self.deepen = nn.Linear(WIDTH, WIDTH) if number == 0 else nn.Identity()

    def forward(self, x: Any, condition: Any = None, ids: Any = None, mask: Any = None) -> Any:
        x, condition, ids, mask = x if isinstance(x, tuple) else (x, condition, ids, mask)
        condition = self.deepen(condition)
        changed = torch.tanh(self.linear(x) + condition + self.embed(ids)).masked_fill(mask, 0.0)
        return (x + changed, condition, ids, mask) if self.number < 2 else x + changed


def conditioned(spreads: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return (jobkit.Blocks if spreads else nn.Sequential)(*map(Conditioned, range(3)))


def plain(dropout: float = 0.0, freezes: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    first, tanh, drop = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)  # these two stand in it twice
    rest = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), tanh, drop, nn.Linear(WIDTH, 1)
    model = nn.Sequential(first, tanh, drop, *rest).eval()
    stage_of(model, 0, 2).requires_grad_(not freezes)  # a stage's blocks are the model's
    return model


def data(length: int = WIDTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, condition = torch.randn(2, BATCH, length, WIDTH, generator=generator)
    ids = torch.randint(4, (BATCH, length), generator=generator)
    return {"x": x, "condition": condition, "ids": ids, "mask": torch.rand(x.shape, generator=generator) < 0.2}


X = data()["x"][:, 0]
Y = X[:, :1]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def make(ranks: RankGroup, model: nn.Module, stages: int | None = None, microbatches: int | None = None) -> Pipeline:
    """Return this rank's stage; with 4 ranks and 2 stages ranks 0 and 2 have one copy, 1 and 3 the other."""
    sizes = (stages or ranks.world_size, ranks.world_size // (stages or ranks.world_size))
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "replica"))
    part: nn.Module = stage_of(model, mesh.get_local_rank("pipeline"), sizes[0])
    if sizes[1] > 1 and any(parameter.requires_grad for parameter in part.parameters()):
        part = DistributedDataParallel(part, process_group=mesh["replica"].get_group())
    return Pipeline(part, mesh["pipeline"].get_group(), torch.device("cpu"), microbatches)


def gradients(module: nn.Module) -> dict[str, Any]:
    module = module.own_stage if isinstance(module, Pipeline) else module
    return {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}


def check(stages: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    together = {name: value for stage in stages for name, value in stage.items()}
    assert len(together) == sum(map(len, stages)) == len(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(together[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


INPUTS: dict[str, tuple[bool, Callable[[dict[str, Tensor]], Any]]] = {
    "a tuple": (True, lambda inputs: tuple(inputs.values())),
    "a dict": (True, lambda inputs: dict(reversed(inputs.items()))),
    "a tuple as the only input": (False, lambda inputs: (tuple(inputs.values()),)),
}
LENGTHS = (WIDTH, 3, WIDTH)  # of another length the tensors between the stages are others


def several_inputs(ranks: RankGroup, kind: str) -> tuple[list[float], Any, dict[str, Any], int]:
    spreads, form = INPUTS[kind]
    pipeline = make(ranks, conditioned(spreads))
    error = lambda output, target: mean_square(output, target["deep"][0])  # noqa: E731
    losses = []
    for length in LENGTHS:
        target = {"deep": [torch.zeros(BATCH, length, WIDTH)]}
        losses.append(float(pipeline.backward(form(data(length)), error, target, weight=2.0, micro_batch_size=4)))
    with torch.no_grad():
        output = call(pipeline, form(data()))
    return losses, output.numpy(), gradients(pipeline), len(pipeline._schedules)


@pytest.mark.parametrize(("kind", "stages"), [("a tuple", 2), ("a dict", 3), ("a tuple as the only input", 2)])
def test_stages_together_are_the_whole_model(kind: str, stages: int) -> None:
    answers = run_ranks(several_inputs, stages, kind)
    spreads, form = INPUTS[kind]
    model, expected = conditioned(spreads), []
    for length in LENGTHS:
        loss = mean_square(call(model, form(data(length))), torch.zeros(BATCH, length, WIDTH))
        (2.0 * loss).backward()
        expected.append(loss.item())
    for losses, output, _, schedules in answers:
        assert losses == pytest.approx(expected) and schedules == 2
        np.testing.assert_allclose(output, call(model, form(data())).detach().numpy(), rtol=1e-5)
    check([part for _, _, part, _ in answers], gradients(model))


def with_replicas(ranks: RankGroup, freezes: bool) -> tuple[float, float, float, dict[str, Any]]:
    pipeline = make(ranks, plain(freezes=freezes), stages=2)
    share = slice(ranks.rank % 2, None, 2)
    for _ in range(2):
        pipeline.zero_grad()
        loss = pipeline.backward(X[share], mean_square, Y[share])
    norm, values = gradient_norm(pipeline.parameters(), pipeline.group), gradients(pipeline)
    clip_gradients(pipeline.parameters(), 0.5 * float(norm), norm)
    return float(loss), float(norm), float(gradient_norm(pipeline.parameters(), pipeline.group)), values


@pytest.mark.parametrize("freezes", [False, True], ids=["all trained", "a stage without gradients"])
def test_with_ddp_around_the_stages_gradients_and_their_norm_are_the_global_batchs(freezes: bool) -> None:
    answers = run_ranks(with_replicas, 4, freezes)
    model = plain(freezes=freezes)
    loss = mean_square(model(X), Y)
    loss.backward()
    norm = float(gradient_norm(model.parameters()))
    for replica in (0, 1):
        check([answers[replica][3], answers[replica + 2][3]], gradients(model))
    assert (answers[0][0] + answers[1][0]) / 2 == pytest.approx(loss.item())
    for _, value, clipped, _ in answers:
        assert value == pytest.approx(norm) and clipped == pytest.approx(norm / 2, rel=1e-4)


def with_dropout(ranks: RankGroup) -> tuple[list[float], list[float], int]:
    """Return the losses of two steps made twice, draws after each, and how often BatchNorm saw a batch."""
    pipeline = make(ranks, plain(dropout=0.5).train(), microbatches=3)
    losses, draws = [], []
    for _ in range(2):
        torch.manual_seed(1)
        for _ in range(2):
            losses.append(float(pipeline.backward(X, mean_square, Y)))
            draws.append(float(torch.rand(())))
    return losses, draws, sum(int(buffer) for name, buffer in pipeline.named_buffers() if "num_batches" in name)


def test_dropout_draws_alike_again_and_the_common_stream_stays_common() -> None:
    (losses, draws, first), (_, other_draws, second) = run_ranks(with_dropout, 2)
    assert losses[0] != losses[1] and losses[:2] == losses[2:]
    assert draws == other_draws and draws[:2] == draws[2:]
    assert first + second == 4 * 3, "finding the shapes is no forward of a step"


def evaluation(ranks: RankGroup, folder: Path) -> tuple[float, float]:
    """Return the mean of a model whose stages have equally large buffers, of ctx and of the whole model."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
    )
    torch.nn.init.constant_(model[3].running_mean, 5.0)
    expected = float(model.eval()(X).square().mean())
    config = Config(name="test", task="m:f", parallel=ParallelConfig(pipeline=2))
    ctx = make_context(folder, ranks, config)
    stages = ctx.parallelize(model)
    with ctx.evaluating(stages):
        mean = ctx.evaluate(lambda batch, ids: stages(batch).square().mean(1), X, batch_size=4)
    ctx.close()
    return mean, ranks.broadcast(expected)


def test_a_stage_evaluates_with_its_own_buffers(tmp_path: Path) -> None:
    for mean, expected in run_ranks(evaluation, 2, tmp_path):
        assert mean == pytest.approx(expected)


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return {"x": x}


@pytest.mark.parametrize(
    ("model", "stages", "said"),
    [
        (nn.Linear(2, 2), 2, "is no nn.Sequential"),
        (OwnForward(nn.Tanh(), nn.Tanh()), 2, "has a forward of its own"),
        (nn.Sequential(*[nn.Linear(2, 2)] * 2), 2, "0.weight and 1.weight"),
        (plain(), 9, "8 block.* 9 stages"),
        (plain(), 2, "here is 2.12.1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    model: nn.Module, stages: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if said.startswith("here is"):
        monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1+cu130"))
    with pytest.raises(ValueError, match=said):
        stage_of(model, 0, stages)


def refusals(ranks: RankGroup) -> None:
    pipeline, fixed = make(ranks, plain()), make(ranks, plain(), microbatches=5)
    wrong = make(ranks, nn.Sequential(OwnForward(), nn.Tanh()))
    calls: dict[str, Callable[[], Any]] = {
        "no gradients": lambda: pipeline(X),
        "share of 12": lambda: fixed.backward(X, mean_square, Y),
        "share of 1 ": lambda: pipeline.backward(X[:1], mean_square, Y[:1]),
        "a int": lambda: pipeline.backward((X, 3), mean_square, Y),
        "[3, 1]": lambda: pipeline.backward(X, mean_square, Y[:3]),
        "a dict" if ranks.rank == 0 else "": lambda: (wrong.backward if ranks.rank == 0 else wrong)(X, mean_square, Y),
    }
    for said, refused in calls.items():
        with pytest.raises(UsageError, match=re.escape(said)):
            refused()


def test_what_a_schedule_cannot_compute_is_refused_on_all_stages() -> None:
    run_ranks(refusals, 2)


def test_the_largest_stage_is_as_small_as_possible() -> None:
    assert cut_stages([5, 1, 1, 1, 1], 2) == (1, 5)
    assert cut_stages([1, 1, 1, 1], 4) == (1, 2, 3, 4)
    assert cut_stages([3, 1, 2, 2, 1, 3], 3) == (2, 4, 6)
