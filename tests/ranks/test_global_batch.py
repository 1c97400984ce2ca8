"""Gradients and loss are those of the mean over the global batch, whatever a rank is given; or a line says why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.ranks import Team, on_ranks
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from jobkit.errors import JobkitError, UsageError
from jobkit.run.config import CommConfig, Config, ParallelConfig
from jobkit.run.layout import factor
from jobkit.run.rundir import RunDir
from jobkit.train.accumulation import backward
from jobkit.train.engine import Engine
from jobkit.train.parallel import Parallel
from jobkit.worker.metrics import MetricLog
from jobkit.worker.reporter import RunReporter

NOWHERE = RunDir(Path("no-such-run"))

WIDTH, BATCH = 4, 11


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))


def data(size: int = BATCH) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def alone(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one process that has the whole batch."""
    model = net()
    loss = mean_square(model(x), x)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except JobkitError as error:
        return str(error)
    return ""


SPLITS: dict[str, tuple[list[int], int | str]] = {
    "the loader's": ([3, 4, 4], BATCH),
    "two views": ([6, 8, 8], 2 * BATCH),
    "filtered": ([1, 7, 3], "sum"),
    "one rank has none": ([0, 9, 2], "sum"),
}


def spread(team: Team, case: dict[str, Any]) -> tuple[Parallel, nn.Module]:
    config = ParallelConfig(**case)
    layout = factor(config, team.world_size, team.world_size)
    parallel = Parallel(layout, config, CommConfig(), torch.device("cpu"), team.rank)
    return parallel, parallel.spread(net())


def take_shares(team: Team) -> dict[str, tuple[Tensor, list[Tensor]]]:
    found = {}
    for strategy in ("ddp", "zero3"):
        parallel, model = spread(team, {"data": strategy})
        for name, (sizes, size) in SPLITS.items():
            first = sum(sizes[: team.rank])
            share = data(sum(sizes))[first : first + sizes[team.rank]]
            loss = parallel.backward(
                model, share, mean_square, share, global_batch_size=size, micro_batch_size=2, autocast=nullcontext
            )
            gradients = [parameter.grad for parameter in model.parameters()]
            whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
            found[f"{strategy}, {name}"] = loss, [one.clone() for one in whole if one is not None]
            model.zero_grad()
    return found


def test_shares_of_any_size_add_up_and_every_rank_gets_the_mean_loss_of_all() -> None:
    found = on_ranks(3, take_shares)
    for name, (loss, gradients) in found[0].items():
        expected, exact = alone(data(sum(SPLITS[name.split(", ")[1]][0])))
        torch.testing.assert_close(loss, expected, msg=name)
        torch.testing.assert_close(gradients, exact, msg=name)
        assert all(torch.equal(other[name][0], loss) for other in found), "it is the same on all ranks"


def in_two_calls(team: Team) -> tuple[list[Tensor], list[Tensor]]:
    parallel, model = spread(team, {})
    share, found = data(8)[4 * team.rank : 4 * team.rank + 4], []
    for part in (share[:1], share[1:]):
        loss = parallel.backward(model, part, mean_square, part, global_batch_size=8, autocast=nullcontext)
        found.append(loss)
    return found, [one.grad for one in model.parameters() if one.grad is not None]


def test_a_global_batch_given_in_two_calls_has_its_gradients_and_each_call_its_own_mean() -> None:
    losses, gradients = on_ranks(2, in_two_calls)[1]
    torch.testing.assert_close(losses, [alone(data(8)[[0, 4]])[0], alone(data(8)[[1, 2, 3, 5, 6, 7]])[0]])
    torch.testing.assert_close(gradients, alone(data(8))[1])


def in_a_pipeline(team: Team) -> Tensor:
    parallel, model = spread(team, {"pipeline": 2})
    share = data(8)[4 * parallel.data_rank : 4 * parallel.data_rank + 4]
    return parallel.backward(
        model, share, mean_square, share, global_batch_size=8, micro_batch_size=2, autocast=nullcontext
    )


def test_a_pipeline_returns_the_mean_loss_of_all_shares_too() -> None:
    found = on_ranks(4, in_a_pipeline)
    torch.testing.assert_close(found[0], alone(data(8))[0])
    assert all(torch.equal(one, found[0]) for one in found)


def loop(team: Team, size: int, by_hand: bool, is_continued: bool) -> tuple[str, list[str]]:
    """What a loop over unequal shares is refused with after its first step, and what rank 0 is told."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("jobkit").addHandler(handler)
    engine = Engine(Config(name="test", task="test:train"), torch.device("cpu"), team.rank, team.world_size)
    loader = engine.loader(torch.utils.data.TensorDataset(data()), global_batch_size=size)
    model = engine.parallelize(net())
    (x,) = next(loader)
    if by_hand:
        mean_square(model(x), x).backward()
    else:
        engine.backward(model, x, mean_square, x)
    refused = refusal(lambda: engine.check_updated(is_continued=is_continued))
    logging.getLogger("jobkit").removeHandler(handler)
    return refused, said


def loops(team: Team) -> list[tuple[str, list[str]]]:
    cases = [(BATCH, True, False), (BATCH, False, False), (9, True, False), (BATCH, True, True)]
    return [loop(team, *case) for case in cases]


def test_a_loop_of_ones_own_has_equal_shares_or_is_told_that_they_are_not() -> None:
    for rank, (unequal, weighted, equal, continued) in enumerate(on_ranks(3, loops)):
        assert "11 samples on 3 ranks are unequal" in unequal[0] and "ctx.backward" in unequal[0]
        assert weighted == equal == ("", [])
        assert continued[0] == "", "a run that lost a node goes on"
        assert len(continued[1]) == (rank == 0)


def test_a_batch_of_another_size_than_the_loaders_needs_to_be_told_of() -> None:
    engine = Engine(Config(name="test", task="test:train"), torch.device("cpu"))
    engine.loader(torch.utils.data.TensorDataset(data()), global_batch_size=BATCH)
    model = engine.parallelize(net())
    for x in (data(2 * BATCH), data(BATCH - 1)):
        said = refusal(lambda: engine.backward(model, x, mean_square, x))  # noqa: B023
        assert f"given {len(x)} sample(s), and this rank's share of the loader's 11 is 11" in said
        assert "global_batch_size" in said and "'sum'" in said
        for size in (len(x), "sum"):
            model.zero_grad()
            loss = engine.backward(model, x, mean_square, x, global_batch_size=size)  # type: ignore[arg-type]
            torch.testing.assert_close((loss, [one.grad for one in model.parameters()]), alone(x))
    assert "each has at most 10" in refusal(
        lambda: engine.backward(model, data(), mean_square, data(), global_batch_size=10)
    )


@pytest.mark.parametrize(
    ("case", "comm", "options", "said"),
    [
        ({"data": "zero3"}, {}, {"static_graph": True}, "static_graph=...) is an option of DDP's, and zero3"),
        ({}, {"local_sgd": 4}, {"broadcast_buffers": False}, "and local SGD does without"),
        ({"pipeline": 2}, {}, {"static_graph": True}, "a pipeline calls a stage several times"),
        ({}, {}, {"bucket_cap_mb": 3}, "bucket_cap_mb=...): it takes DDP's find_unused_parameters, static_graph"),
    ],
)
def test_an_option_that_is_not_the_strategys_is_refused_on_one_rank_too(
    case: dict[str, Any], comm: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    config = ParallelConfig(**case)
    parallel = Parallel(factor(ParallelConfig(), 1, 1), config, CommConfig(**comm), torch.device("cpu"))
    assert said in refusal(lambda: parallel.spread(net(), **options))


def ask_for_options(team: Team) -> list[Any]:
    config = ParallelConfig()
    parallel = Parallel(factor(config, 2, 2), config, CommConfig(), torch.device("cpu"), team.rank)
    options = {"find_unused_parameters": True, "broadcast_buffers": False, "gradient_as_bucket_view": True}
    model: Any = parallel.spread(net(), **options)
    static = parallel.spread(net(), static_graph=True)
    x = data(4)
    say = refusal(
        lambda: parallel.backward(
            static, x, mean_square, x, global_batch_size=8, micro_batch_size=2, autocast=nullcontext
        )
    )
    config = ParallelConfig(tensor=2)
    tensor = Parallel(factor(config, 2, 2), config, CommConfig(), torch.device("cpu"), team.rank)
    refused = "and tensor does without" in refusal(lambda: tensor.spread(net(), static_graph=False))
    passed = [getattr(model, name) == value for name, value in options.items()]
    return [*passed, "leave micro_batch_size out" in say, refused]


def test_ddps_options_pass_through() -> None:
    assert on_ranks(2, ask_for_options) == [[True] * 5] * 2


# What is logged


def log_dtensors(team: Team, folder: Path) -> list[str]:
    reporter = RunReporter(NOWHERE, 1, team.rank == 0, on_lost_lease=lambda error: None)
    if team.rank == 0:
        reporter._metrics = MetricLog(folder, 0, lambda latest: None)
    mesh = init_device_mesh("cpu", (team.world_size,))
    one = torch.ones(1)
    reporter.log({"replicated": DTensor.from_local(one, mesh, [Replicate()], run_check=False), "none": None})
    model: Any = fully_shard(net(), mesh=mesh)
    model(data()).sum().backward()
    values: list[Any] = [
        model[0].weight.grad.norm(),
        DTensor.from_local(one, mesh, [Partial()], run_check=False),
        DTensor.from_local(one[: 1 - team.rank], mesh, [Shard(0)], run_check=False, shape=(1,), stride=(1,)),
    ]
    said = [refusal(lambda value=value: reporter.log({"norm": value})) for value in values]
    reporter.log({"norm": values[0].full_tensor()})
    reporter.log({"total norm": nn.utils.clip_grad_norm_(model.parameters(), 1.0)})
    said.append(refusal(lambda: reporter.log_media("image", "norm", values[0])))
    reporter.end_step(0)
    reporter.close()
    return said


def test_a_dtensor_is_logged_if_a_rank_has_all_of_it_and_refused_on_every_rank_if_not(tmp_path: Path) -> None:
    for said in on_ranks(2, log_dtensors, tmp_path):
        assert len(said) == 4 and all("log its .full_tensor(), which all ranks call" in one for one in said), said
    (file,) = tmp_path.glob("events.*")
    tags = [value.tag for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    assert tags == ["replicated", "norm", "total norm"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2), "'x' is a tensor of torch.float32 [2] and not one number"),
        (torch.ones(1, dtype=torch.complex64), "not one number"),
        ("high", "'x' is no number, but str 'high'"),
        ([1.0], "'x' is no number, but list [1.0]"),
        (10**400, "'x' is no number, but int 1000"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_main", [True, False], ids=["rank 0", "rank 1"])
def test_what_is_no_number_is_refused_where_it_is_logged(value: Any, said: str, is_main: bool) -> None:
    reporter = RunReporter(NOWHERE, 1, is_main, on_lost_lease=lambda error: None)
    assert said in refusal(lambda: reporter.log({"x": value}))


def pairs(output: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    own, table = target
    return (output - own).square().mean() + (output @ table.T).mean()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ((torch.ones(4, 3), torch.ones(7, 3)), {"micro_batch_size": 2}, r"a tensor of \[7, 3\] beside 4 samples"),
        ({"captions": ["a", "b", "c", "d"]}, {"micro_batch_size": 2}, "a list of str"),
        (np.ones(4), {"micro_batch_size": 2}, "an array"),
        (torch.ones(4, 3), {"micro_batch_size": -1}, "micro_batch_size is -1"),
    ],
)
def test_what_cannot_be_cut_with_the_samples_is_refused(target: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        backward(torch.nn.Linear(3, 3), torch.ones(4, 3), pairs, target, **options)


def test_in_one_piece_a_target_may_have_a_table_of_another_length() -> None:
    model = torch.nn.Linear(3, 3)
    target = torch.ones(4, 3), torch.ones(7, 3)
    assert torch.equal(backward(model, torch.ones(4, 3), pairs, target), pairs(model(torch.ones(4, 3)), target))


def test_a_batch_that_tells_no_size_is_refused() -> None:
    with pytest.raises(UsageError, match="no tensor in it that tells how many samples"):
        backward(torch.nn.Linear(3, 3), {"texts": ["a", "b"]}, pairs, None, global_batch_size=2)
