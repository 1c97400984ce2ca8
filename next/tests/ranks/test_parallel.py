"""Every way to spread a model over ranks trains as one process does, and goes on bit for bit after an interruption."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import make_rank, run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import jobkit
from jobkit.errors import InputError, Stopped, UsageError
from jobkit.group import RankGroup
from jobkit.run import layout, records
from jobkit.run.records import Lease
from jobkit.run.schema import CheckpointConfig, Config, ParallelConfig
from jobkit.run.slots import SLOTS_VARIABLE
from jobkit.worker.context import Context
from jobkit.worker.join import Joined

STEPS, BATCH, WIDTH = 6, 12, 10
Weights = dict[str, Any]
"""Arrays by name; the averages of EmaAdamW have names that begin with `average`."""

TOLERANCE = 2e-6
"""Largest difference of a weight from that of one process: sums in another order."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"data": "zero1"},
    "zero2": {"data": "zero2"},
    "zero3": {"data": "zero3"},
    "zero3 offloaded": {"data": "zero3", "offload": True},
    "hsdp": {"data": "hsdp", "shards": 2},
    "tensor": {"tensor": "all"},
    "ddp x tensor": {"tensor": 2},
    "zero3 x tensor": {"data": "zero3", "tensor": 2},
    "pipeline": {"pipeline": "all"},
    "ddp x pipeline": {"pipeline": 2},
    "zero1 x pipeline": {"data": "zero1", "pipeline": 2},
    "zero2 x pipeline": {"data": "zero2", "pipeline": 2},
    "tensor x pipeline": {"tensor": 2, "pipeline": 2},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Sequential):
    def tensor_plan(self) -> dict[str, Any]:
        # Of the last two blocks alone: a pipeline's first stage has no DTensors.
        return {"[23].up": ColwiseParallel(), "[23].down": RowwiseParallel()}


class Attempt:
    """One attempt of a run on this rank."""

    def __init__(self, ranks: RankGroup, folder: Path, config: Any, slots: tuple[int, int] | None = None) -> None:
        self.rank = make_rank(folder, config, ranks.rank, ranks.world_size)
        lease = Lease(attempt=self.rank.attempt, writer="w", token="t", job_id="1")
        records.write(self.rank.run.lease_file, lease)
        environ = {} if slots is None else {SLOTS_VARIABLE: f"{slots[0]},{slots[1]}"}
        self.ctx = Context(self.rank, Joined(torch.device("cpu"), RankGroup.of_world()), environ)

    def train(self, *, stop_at: int = STEPS, die_at: int = STEPS) -> Weights | None:
        """Return the final weights on rank 0; None where the attempt was stopped, or left as by a kill."""
        ctx = self.ctx
        torch.manual_seed(0)
        model = ctx.parallelize(Net(*[Block() for _ in range(4)]))
        optimizer = ctx.optimizer(model, jobkit.optim.EmaAdamW, lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        ctx.track(model=model, optimizer=optimizer, scheduler=scheduler)
        share, ranks = ctx._spread.data_rank, ctx._spread.data_size
        try:
            for step in ctx.steps(STEPS):
                if step == die_at:
                    ctx._checkpointer.snapshots.wait()
                    return None
                generator = torch.Generator().manual_seed(step)
                x, y = torch.randn(2, BATCH, WIDTH, generator=generator).unbind()
                part = slice(BATCH * share // ranks, BATCH * (share + 1) // ranks)
                micro = None if ctx._spread.stages is not None else 2
                batch = (x[part], y[part])
                loss = ctx.backward(
                    model, batch, nn.functional.mse_loss, micro_batch_size=micro, global_batch_size=BATCH
                )
                ctx.update(optimizer, max_norm=0.5)
                scheduler.step()
                if step + 1 == stop_at:
                    self.rank.page.ask_to_stop()
        except Stopped:
            ctx.close()
            return None
        with ctx.averaged(optimizer):
            averaged = {name: tensor.clone() for name, tensor in _whole(ctx, model).items()}
        ctx.finish({"loss": loss.item()})
        if not ctx.is_main:
            return {}
        weights = load_file(ctx.run_dir / "final" / "model.safetensors")
        both = {**weights, **{f"average {name}": tensor for name, tensor in averaged.items()}}
        return {name: tensor.numpy() for name, tensor in both.items()}


def _whole(ctx: Context, model: nn.Module) -> dict[str, Tensor]:
    from jobkit.checkpoint.export import whole_weights

    return whole_weights(model, ctx._ranks)[0]


def config_of(case: dict[str, Any], every: Any = "off", memory: Any = "off") -> Config:
    checkpoint = CheckpointConfig(every=every, memory=memory)
    return Config(name="test", task="m:f", seed=1, parallel=ParallelConfig(**case), checkpoint=checkpoint)


def difference(left: Weights, right: Weights) -> float:
    assert set(left) == set(right)
    return max(float(abs(left[name] - right[name]).max()) for name in left)


def straight_and_interrupted(ranks: RankGroup, cases: dict[str, Any], root: Path, slots: Any) -> dict[str, Any]:
    """Return of each case the weights without interruption, after one on disk, and after one in memory."""
    answers = {}
    for name, case in cases.items():
        straight = Attempt(ranks, root / name / "straight", config_of(case)).train()
        stopped = root / name / "stopped"
        assert Attempt(ranks, stopped, config_of(case, every=3)).train(stop_at=3) is None
        if ranks.is_main:
            shutil.copytree(stopped, root / name / "half", symlinks=True)
            shutil.copytree(stopped, root / name / "other", symlinks=True)
        ranks.barrier()
        resumed = Attempt(ranks, stopped, config_of(case))
        assert resumed.ctx.step == 3
        from_disk = resumed.train()
        in_memory = config_of(case, memory=1)
        assert Attempt(ranks, root / name / "memory", in_memory, slots[ranks.rank]).train(die_at=4) is None
        ranks.barrier()
        resumed = Attempt(ranks, root / name / "memory", in_memory, slots[ranks.rank])
        assert resumed.ctx.step == 4
        answers[name] = straight, from_disk, resumed.train()
        for slot in slots[ranks.rank]:
            os.ftruncate(slot, 0)
    return answers


def resume(ranks: RankGroup, cases: dict[str, Any], root: Path, folder: str) -> dict[str, Any]:
    return {name: Attempt(ranks, root / name / folder, config_of(case)).train() for name, case in cases.items()}


def alone(ranks: RankGroup, root: Path) -> Weights:
    weights = Attempt(ranks, root, config_of({})).train()
    assert weights is not None
    return weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Weights]:
    """Each strategy on four ranks, and one process."""
    root = tmp_path_factory.mktemp("strategies")
    slots = [(os.memfd_create("first"), os.memfd_create("second")) for _ in range(4)]
    return root, run_ranks(straight_and_interrupted, 4, STRATEGIES, root, slots)[0], run_ranks(alone, 1, root)[0]


Trained = tuple[Path, dict[str, Any], Weights]


def test_every_strategy_trains_as_one_process_does(trained: Trained) -> None:
    differences = {name: difference(answer[0], trained[2]) for name, answer in trained[1].items()}
    assert max(differences.values()) < TOLERANCE, differences


def test_every_strategy_goes_on_bit_for_bit_from_disk_and_from_memory(trained: Trained) -> None:
    for name, (straight, from_disk, from_memory) in trained[1].items():
        assert difference(straight, from_disk) == 0.0, name
        assert difference(straight, from_memory) == 0.0, name


def test_every_strategy_goes_on_with_half_the_ranks(trained: Trained) -> None:
    root, _, reference = trained
    halved = {"tensor x pipeline": {"tensor": "all"}}  # four ranks are the least for the product
    answers = run_ranks(resume, 2, {**STRATEGIES, **halved}, root, "half")[0]
    differences = {name: difference(weights, reference) for name, weights in answers.items()}
    assert max(differences.values()) < TOLERANCE, differences


def test_a_checkpoint_serves_another_strategy(trained: Trained) -> None:
    root, _, reference = trained
    others = {"ddp": {"data": "zero3"}, "zero3": {}, "zero1": {"data": "zero2"}, "hsdp": {"data": "zero1"}}
    answers = run_ranks(resume, 2, others, root, "other")[0]
    differences = {name: difference(weights, reference) for name, weights in answers.items()}
    assert max(differences.values()) < TOLERANCE, differences
