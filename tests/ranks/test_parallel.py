"""Every way to spread a model over ranks trains as one process does, and goes on bit for bit after an interruption."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.ranks import make_rank, run_ranks
from oracle import plain
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import TensorDataset

import jobkit
import jobkit.parallel.compression
import jobkit.parallel.fsdp
import jobkit.parallel.pipeline
import jobkit.parallel.zero1  # here, so that forked ranks have them
from jobkit.checkpoint.export import whole_weights
from jobkit.config.schema import CheckpointConfig, CommConfig, Config, ParallelConfig
from jobkit.errors import UsageError
from jobkit.loop.context import Context
from jobkit.loop.join import Joined
from jobkit.run import records
from jobkit.run.records import Lease
from jobkit.wire.group import RankGroup
from jobkit.wire.pages import SLOTS_VARIABLE

STEPS = 6
Weights = dict[str, Any]
"""Arrays by name; the averages of EmaAdamW have names that begin with `average`. Beside them an evaluation, a draw."""

TOLERANCE = 2e-6
"""Largest difference of a weight from that of one process: sums in another order."""

ON_TWO: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"data": "zero1"},
    "zero2": {"data": "zero2"},
    "zero3 offloaded": {"data": "zero3", "offload": True},
    "tensor": {"tensor": "all"},
    "pipeline": {"pipeline": "all"},
}
EXCHANGES: dict[str, dict[str, Any]] = {
    "fp16 hook": {"comm": {"hook": "fp16"}},
    "local sgd": {"comm": {"local_sgd": 4}},
    "fp16": {"precision": "fp16"},
    "bf16 sharded": {"data": "zero3", "precision": "bf16"},
    "fp16 sharded": {"data": "zero2", "precision": "fp16"},
}
"""On two ranks; these train other weights than one process."""
ON_FOUR: dict[str, dict[str, Any]] = {
    "zero3": {"data": "zero3"},
    "hsdp": {"data": "hsdp", "shards": 2},
    "ddp x tensor": {"tensor": 2},
    "zero3 x tensor": {"data": "zero3", "tensor": 2},
    "ddp x pipeline": {"pipeline": 2},
    "zero1 x pipeline": {"data": "zero1", "pipeline": 2},
    "zero2 x pipeline": {"data": "zero2", "pipeline": 2},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
}
if torch.__version__ < jobkit.parallel.pipeline.OLDEST_TORCH:
    ON_TWO, ON_FOUR = (
        {name: case for name, case in cases.items() if "pipeline" not in case} for cases in (ON_TWO, ON_FOUR)
    )


class Block(plain.Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))


class Net(nn.Sequential):
    def tensor_plan(self) -> dict[str, Any]:
        # Of the last two blocks alone: a pipeline's first stage has no DTensors.
        return {"[23].up": ColwiseParallel(), "[23].down": RowwiseParallel()}


EVALUATIONS = itertools.count()
"""The attempts of a process have one store, where evaluations are counted."""


class Attempt:
    """One attempt of a run on this rank."""

    def __init__(self, ranks: RankGroup, folder: Path, config: Any, slots: tuple[int, int] | None = None) -> None:
        self.rank = make_rank(folder, config, ranks.rank, ranks.world_size)
        lease = Lease(attempt=self.rank.attempt, writer="w", token="t", job_id="1")
        records.write(self.rank.run.lease_file, lease)
        environ = {} if slots is None else {SLOTS_VARIABLE: f"{slots[0]},{slots[1]}"}
        self.ctx = Context(self.rank, Joined(torch.device("cpu"), RankGroup.of_world()), environ)
        self.ctx._evaluator._count = next(EVALUATIONS)

    def train(self, *, die_at: int = 0) -> Weights | None:
        """Return the final weights on rank 0; None where the attempt was left as by a kill."""
        ctx = self.ctx
        torch.manual_seed(0)
        model = ctx.parallelize(Net(*[Block() for _ in range(4)]))
        optimizer = ctx.optimizer(model, jobkit.optim.EmaAdamW, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        ctx.track(model=model, optimizer=optimizer, scheduler=scheduler)
        place = SimpleNamespace(rank=ctx._parallelizer.data_rank, world_size=ctx._parallelizer.data_size)
        for step in ctx.steps(STEPS):
            if die_at:
                ctx._checkpointer.snapshots.wait()  # on a busy machine the next one would be left out
            if die_at and step == die_at:
                ctx._checkpointer.wait()
                return None
            batch, micro = (
                plain.share(place, plain.batch_of(step)),
                None if ctx._parallelizer.stage_group is not None else 2,
            )
            loss = ctx.backward(model, batch, plain.mse, micro_batch_size=micro, global_batch_size=plain.BATCH)
            ctx.update(optimizer, max_norm=0.5)
            scheduler.step()
            drawn = torch.rand(())

        def error(batch: plain.Batch, ids: Tensor) -> Tensor:
            return (model(batch[0]) - batch[1]).square().mean(1)

        held_out = TensorDataset(*plain.batch_of(STEPS, 7))
        with torch.no_grad(), ctx.evaluating(model, optimizer):
            mean = torch.tensor(ctx.evaluate(error, held_out, batch_size=2))
        weights, _ = whole_weights(model, ctx._ranks)
        ctx.finish({"loss": loss.item()})
        if not ctx.is_main:
            return {}
        averages = load_file(ctx.run_dir / "final" / "model.safetensors")
        both = {
            **weights,
            **{f"average {name}": tensor for name, tensor in averages.items()},
            "mean": mean,
            "draw": drawn,
        }
        return {name: tensor.numpy() for name, tensor in both.items()}


def config_of(case: dict[str, Any], every: Any = "off", memory: Any = "off") -> Config:
    parallel = ParallelConfig(**{key: value for key, value in case.items() if key not in ("comm", "precision")})
    return Config(
        name="test",
        task="m:f",
        seed=1,
        parallel=parallel,
        comm=CommConfig(**case.get("comm", {})),
        precision=case.get("precision", "fp32"),
        checkpoint=CheckpointConfig(every=every, memory=memory),
    )


def difference(left: Weights, right: Weights) -> float:
    assert set(left) == set(right)
    return max(float(abs(left[name] - right[name]).max()) for name in set(left) - {"draw"})


def straight_and_interrupted(ranks: RankGroup, case: dict[str, Any], root: Path, slots: Any) -> tuple[Any, Any, Any]:
    """Return the weights without interruption, after one that goes on from disk, and after one from memory."""
    half = STEPS // 2
    straight = Attempt(ranks, root / "straight", config_of(case)).train()
    died = Attempt(ranks, root / "died", config_of(case, every=half, memory=1), slots[ranks.rank])
    died.train(die_at=half + 1)
    if ranks.is_main:
        # The reporter's thread of this rank, which no kill ended, still replaces progress.json each half second.
        unfinished = shutil.ignore_patterns(".*.tmp")
        for copy in ("disk", "half", "other"):
            shutil.copytree(root / "died", root / copy, symlinks=True, ignore=unfinished)
    ranks.barrier()
    resumed = Attempt(ranks, root / "died", config_of(case, memory=1), slots[ranks.rank])
    assert resumed.ctx.step == half + 1
    from_memory = resumed.train()
    resumed = Attempt(ranks, root / "disk", config_of(case))
    assert resumed.ctx.step == half
    return straight, resumed.train(), from_memory


def interrupted(world_size: int, cases: dict[str, Any], root: Path) -> dict[str, Any]:
    """Return the three weights of each case. Each has processes of its own: gloo keeps threads for every group."""
    answers = {}
    for name, case in cases.items():
        slots = [(os.memfd_create("first"), os.memfd_create("second")) for _ in range(world_size)]
        answers[name] = run_ranks(straight_and_interrupted, world_size, case, root / name, slots)[0]
        for pair in slots:
            for slot in pair:
                os.close(slot)
    return answers


def resume(ranks: RankGroup, case: dict[str, Any], root: Path) -> Weights | None:
    return Attempt(ranks, root, config_of(case)).train()


def resumed(cases: dict[str, Any], root: Path, folder: str, world_size: int) -> dict[str, Any]:
    """Return the weights of runs that go on with other ranks."""
    return {name: run_ranks(resume, world_size, case, root / name / folder)[0] for name, case in cases.items()}


def alone(ranks: RankGroup, root: Path) -> Weights:
    weights = Attempt(ranks, root, config_of({})).train()
    assert weights is not None
    return weights


@pytest.fixture(scope="module")
def trained(once: Callable[..., Path]) -> tuple[Path, dict[str, Any], Weights]:
    """Each strategy on several ranks, and one process."""

    def make(root: Path) -> None:
        answers = interrupted(2, ON_TWO | EXCHANGES, root) | interrupted(4, ON_FOUR, root)
        torch.save((answers, run_ranks(alone, 1, root)[0]), root / "answers.pt")

    root = once("strategies", make)
    return root, *torch.load(root / "answers.pt", weights_only=False)


Trained = tuple[Path, dict[str, Any], Weights]


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_every_strategy_trains_as_one_process_does(trained: Trained, name: str) -> None:
    assert difference(trained[1][name][0], trained[2]) < TOLERANCE


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR, *EXCHANGES])
def test_every_strategy_goes_on_bit_for_bit_from_disk_and_from_memory(trained: Trained, name: str) -> None:
    straight, from_disk, from_memory = trained[1][name]
    assert difference(straight, from_disk) == difference(straight, from_memory) == 0.0
    assert straight["draw"] == from_disk["draw"] == from_memory["draw"]  # other ranks have other random numbers


def test_every_strategy_goes_on_with_half_the_ranks(trained: Trained) -> None:
    root, _, reference = trained
    halved = {"tensor x pipeline": {"tensor": "all"}}  # four ranks are the least for the product
    answers = resumed({**ON_FOUR, **halved}, root, "half", 2) | resumed(ON_TWO, root, "half", 1)
    differences = {name: difference(weights, reference) for name, weights in answers.items()}
    assert max(differences.values()) < TOLERANCE, differences


def test_a_checkpoint_serves_another_strategy(trained: Trained) -> None:
    root, _, reference = trained
    others = {"ddp": {"data": "zero3"}, "zero3": {}, "zero1": {"data": "zero2"}, "hsdp": {"data": "zero1"}}
    answers = resumed(others, root, "other", 2)
    differences = {name: difference(weights, reference) for name, weights in answers.items()}
    assert max(differences.values()) < TOLERANCE, differences


def evaluations_of_a_gan(ranks: RankGroup, root: Path) -> list[list[float]]:
    """A generator whose samples a critic sees with their graph, which no backward pass uses."""
    cases: list[dict[str, Any]] = [{}, {"data": "zero2"}, {"data": "zero2", "precision": "bf16"}]
    answers = []
    for number, case in enumerate(cases):
        ctx = Attempt(ranks, root / str(number), config_of(case, every=2)).ctx
        torch.manual_seed(0)
        generator = ctx.parallelize(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
        optimizer = ctx.optimizer(generator, jobkit.optim.EmaAdamW, lr=0.05)
        ctx.track(generator=generator, optimizer=optimizer)
        seen = []
        for step in ctx.steps(6):
            x = torch.rand(8, 4, generator=torch.Generator().manual_seed(step))
            with ctx.autocast():
                generator(x)
                if step % 2:
                    generator(x).square().mean().backward()
                    ctx.update(optimizer)
                    generator(x)
            with torch.no_grad(), ctx.averaged(optimizer):
                seen.append(generator(x).sum().item())
        answers.append(seen)
    return answers


def test_a_forward_without_a_backward_pass_leaves_no_whole_weights_behind(tmp_path: Path) -> None:
    whole, sharded, rounded = run_ranks(evaluations_of_a_gan, 2, tmp_path)[0]
    assert sharded == pytest.approx(whole, abs=1e-5)
    assert rounded == pytest.approx(whole, abs=0.05)


def unfreeze(ranks: RankGroup, folder: Path) -> str:
    ctx = Attempt(ranks, folder, config_of({}, every=1)).ctx
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = ctx.parallelize(model)
    ctx.track(model=model, optimizer=optimizer)
    try:
        for step in ctx.steps(4):
            if step == 1:
                model.module[0].requires_grad_(True)
            model(torch.rand(2, 4) + ranks.rank).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        return str(error)
    return ""


def test_layers_that_are_unfrozen_behind_ddp_are_named_before_they_are_saved(tmp_path: Path) -> None:
    for text in run_ranks(unfreeze, 2, tmp_path):
        assert text.startswith("0.weight was frozen when ctx.parallelize was called")


def differs(ranks: RankGroup, folder: Path) -> str:
    ctx = Attempt(ranks, folder, config_of({})).ctx
    try:
        ctx.parallelize(nn.Linear(3, 4 + ranks.rank))
    except UsageError as error:
        return str(error)
    return ""


def test_a_module_of_another_shape_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for text in run_ranks(differs, 2, tmp_path):
        assert text.startswith("ctx.parallelize: rank 0 has weight [4, 3] float32, where rank 1")


def accumulate(ranks: RankGroup, folder: Path, steps: int) -> bool:
    """Add gradients up without a step of the optimizer; return whether they are there before the loop."""
    ctx = Attempt(ranks, folder, config_of({"data": "zero3"}, every=1)).ctx
    torch.manual_seed(0)
    model = ctx.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = ctx.optimizer(model, torch.optim.SGD, lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    present = False
    for step in ctx.steps(4):
        present = next(model.parameters()).grad is not None
        if step == steps:
            ctx._checkpointer.wait()
            break
        model(torch.ones(2, 4)).sum().backward()
    return present


def test_gradients_that_were_added_up_go_on_with_the_same_ranks_alone(tmp_path: Path) -> None:
    assert run_ranks(accumulate, 2, tmp_path, 2) == [True, True]
    shutil.copytree(tmp_path, tmp_path.with_name("fewer"), symlinks=True)
    assert run_ranks(accumulate, 2, tmp_path, 2) == [True, True]
    assert run_ranks(accumulate, 1, tmp_path.with_name("fewer"), 2) == [False]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(11, 10), nn.ModuleList([plain.Block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def gathered(ranks: RankGroup, tied: bool) -> Any:
    """Return the units, and the outputs and gradients of a rank's samples beside those of torch's autocast."""
    torch.manual_seed(0)
    model, x = Words(), torch.arange(12).view(3, 4)[ranks.rank] % 11
    if tied:
        model.head.weight = model.table.weight
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    jobkit.parallel.fsdp.shard(model, mesh, reshard_after_forward=True, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(x)
    output = model(x)
    for loss in (expected.float().square().mean(), output.float().square().mean()):
        loss.backward()
    every = ranks.gather({name: parameter.grad for name, parameter in alone.named_parameters()})
    sums = {name: torch.stack([each[name] for each in every]).mean(0) for name in every[0]}
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    units = [name for name, part in model.named_modules() if isinstance(part, FSDPModule)]
    return units, torch.equal(output, expected), max((sums[name] - grads[name]).abs().max().item() for name in sums)


@pytest.mark.parametrize("tied", [False, True])
def test_a_block_is_one_unit_with_its_norms_and_computes_as_under_autocast(tied: bool) -> None:
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for units, is_equal, most in run_ranks(gathered, 3, tied):
        assert sorted(units) == ["", *blocks, *([] if tied else ["table"])]
        assert is_equal and most < 1e-6
