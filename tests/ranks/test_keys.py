"""Keys of a YAML that a rank obeys: what they change in a Context, and on torch's objects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import make_context, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from jobkit.config.schema import CheckpointConfig, CommConfig, Config, ParallelConfig
from jobkit.data.seeds import generator_state
from jobkit.errors import DistributedError, UsageError
from jobkit.loop.context import Context
from jobkit.loop.health import NotFinite
from jobkit.loop.step import GradientStep
from jobkit.parallel import fsdp
from jobkit.parallel.devices import choose_device, group_backend
from jobkit.parallel.parallelizer import Parallelizer
from jobkit.parallel.pipeline import OLDEST_TORCH
from jobkit.wire.group import RankGroup

CPU = torch.device("cpu")
EACH_STEP = CheckpointConfig(every=1, memory="off", keep=2)


def config(**values: Any) -> Config:
    return Config(name="test", task="module:function", **{"checkpoint": EACH_STEP, **values})


def context(folder: Path, **values: Any) -> Context:
    return make_context(folder, RankGroup.alone(), config(**values))


def test_a_seed_decides_the_weights_and_null_leaves_all_generators_alone(tmp_path: Path) -> None:
    def weights(folder: str, seed: int | None) -> Tensor:
        ctx = context(tmp_path / folder, seed=seed)
        model = nn.Linear(2, 2)
        ctx.track(model=model)
        next(iter(ctx.steps(1)))
        ctx.close()
        return model.weight.detach()

    assert torch.equal(weights("a", 1), weights("b", 1))
    assert not torch.equal(weights("c", 1), weights("d", 2))
    torch.manual_seed(5)
    expected = nn.Linear(2, 2).weight.detach()
    state = generator_state()
    torch.manual_seed(5)
    assert torch.equal(weights("e", None), expected)
    assert generator_state()["torch"] == state["torch"]


def test_weights_of_the_meta_device_are_drawn_from_the_seed(tmp_path: Path) -> None:
    def weights(folder: str, seed: int) -> Tensor:
        ctx = context(tmp_path / folder, seed=seed)
        torch.rand(len(folder))  # nothing else counts
        with torch.device("meta"):
            model = nn.Linear(2, 2)
        ctx.close()
        return ctx.parallelize(model).weight.detach()

    assert torch.equal(weights("a", 1), weights("bb", 1))
    assert not torch.equal(weights("ccc", 1), weights("dddd", 2))


@pytest.mark.parametrize("on_nan", ["stop", "ignore"])
def test_on_nan_says_whether_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, on_nan: Any) -> None:
    ctx = context(tmp_path, on_nan=on_nan)
    ctx.track(model=nn.Linear(1, 1))

    def train() -> int:
        for step in ctx.steps(6):
            ctx.log({"train/loss": math.nan if step == 3 else 1.0})
        return ctx.step

    if on_nan == "ignore":
        assert train() == 6
    else:
        with pytest.raises(Exception, match="step 3"):
            train()
    ctx.close()


def test_a_loss_that_is_no_number_is_not_saved_where_a_break_leaves_its_step(tmp_path: Path) -> None:
    ctx = context(tmp_path)
    ctx.track(model=nn.Linear(1, 1))
    for _ in ctx.steps(6):
        ctx.log({"train/loss": math.nan})
        break
    with pytest.raises(NotFinite):
        ctx.finish()
    ctx.close()


def options_of_torch(ranks: RankGroup) -> dict[str, Any]:
    model, optimizer = nn.Linear(4, 4), torch.optim.SGD
    parallelizer = Parallelizer(config(comm=CommConfig(hook="powersgd", powersgd_rank=3, bucket_cap_mb=7)), CPU, ranks)
    ddp: Any = parallelizer.parallelize(model)
    parallelizer.optimizer(ddp, optimizer, lr=0.1)
    power: Any = parallelizer.compressions[0]._power_sgd
    policies: list[Any] = []
    real = fsdp.fully_shard
    fsdp.fully_shard = lambda *a, **k: policies.append(k["offload_policy"]) or real(*a, **k)  # type: ignore[assignment]
    offloads = config(parallel=ParallelConfig(data="zero3", offload=True))
    Parallelizer(offloads, CPU, ranks).parallelize(nn.Linear(4, 4))
    piped = config(parallel=ParallelConfig(pipeline=2, microbatches=5))
    parallelizer = Parallelizer(piped, CPU, ranks)
    pipeline = parallelizer.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    batch = torch.ones(12, 4), torch.ones(12, 4)
    with pytest.raises(UsageError) as refused:
        GradientStep(piped, parallelizer).backward(pipeline, batch, nn.functional.mse_loss, global_batch_size=12)
    return {
        "comm.powersgd_rank": power.matrix_approximation_rank,
        "comm.bucket_cap_mb": ddp.bucket_bytes_cap,
        "parallel.offload": [isinstance(policy, CPUOffloadPolicy) for policy in policies],
        "parallel.microbatches": "5" in str(refused.value),
    }


OPTIONS = {
    "comm.powersgd_rank": 3,
    "comm.bucket_cap_mb": 7 << 20,
    "parallel.offload": [True],
    "parallel.microbatches": True,  # 12 samples are no 5
}


@pytest.mark.skipif(torch.__version__ < OLDEST_TORCH, reason="torch is too old for pipelines")
@pytest.mark.parametrize("key", OPTIONS)
def test_options_reach_torch(once: Callable[..., Path], key: str) -> None:
    def make(folder: Path) -> None:
        (folder / "options.json").write_text(json.dumps(run_ranks(options_of_torch, 2)))

    ranks = json.loads((once("options", make) / "options.json").read_text())
    assert [rank[key] for rank in ranks] == [OPTIONS[key]] * 2


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [
        ("cpu", "auto", "gloo"),
        ("cuda", "auto", "cpu:gloo,cuda:nccl"),
        ("cuda", "gloo", "cpu:gloo,cuda:gloo"),
        ("cuda", "cpu:gloo,cuda:ucc", "cpu:gloo,cuda:ucc"),
        ("cpu", "smoke", None),
    ],
)
def test_the_backend_is_the_devices_or_what_the_yaml_says(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, expected: str | None
) -> None:
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: name != "smoke")
    if expected is None:
        with pytest.raises(DistributedError, match="smoke"):
            group_backend(torch.device(device), backend)
    else:
        assert group_backend(torch.device(device), backend) == expected


class Accelerators:
    """torch.accelerator on a node with four GPUs."""

    index: int | None = None

    def current_accelerator(self, check_available: bool) -> torch.device:
        return torch.device("cuda")

    def device_count(self) -> int:
        return 4

    def set_device_index(self, index: int) -> None:
        self.index = index


@pytest.mark.parametrize(
    ("name", "gpus_per_task", "local_rank", "expected"),
    [
        ("auto", 0, 1, "cpu"),
        ("cpu", 1, 1, "cpu"),
        ("auto", 1, 1, "cuda:1"),
        ("cuda", 2, 1, "cuda:2"),
        ("cuda", 4, 1, "cuda:0"),  # a launcher shows the task its own alone
        ("cuda", 1, 4, None),
        ("cuda", 0, 0, None),
        ("npu", 1, 0, None),
    ],
)
def test_the_device_of_a_rank(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus_per_task: int, local_rank: int, expected: str | None
) -> None:
    node = Accelerators()
    monkeypatch.setattr("torch.accelerator", node)
    if expected is None:
        with pytest.raises(DistributedError, match="gpus_per_task"):
            choose_device(name, gpus_per_task, local_rank)
    else:
        assert choose_device(name, gpus_per_task, local_rank) == torch.device(expected)
        assert node.index == torch.device(expected).index
