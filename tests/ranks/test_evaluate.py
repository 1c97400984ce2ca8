"""Evaluation: the same number whatever the ranks, their speed, and what interrupts them."""

from __future__ import annotations

import contextlib
import json
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.project import Project, describe, events, logged_steps, names, status, wait_for, weights
from harness.ranks import Team, on_ranks
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import Dataset

from jobkit.display import Display
from jobkit.group import RankGroup
from jobkit.run.config import CommConfig, Config, ParallelConfig
from jobkit.run.files import write_json
from jobkit.run.layout import Layout
from jobkit.run.records import Progress
from jobkit.run.rundir import RunDir
from jobkit.train.batches import DynamicBatches, LockstepBatches
from jobkit.train.data_parallel import data_parallel, send_first
from jobkit.train.ddp_buffers import independent_forwards
from jobkit.train.evaluate import evaluate
from jobkit.train.outputs import Outputs
from jobkit.train.parallel import Parallel
from jobkit.worker.evaluation import Evaluator
from jobkit.worker.launcher import Topology
from jobkit.worker.rank import Rank
from jobkit.worker.rendezvous import shared_store
from jobkit.worker.reporter import RunReporter
from jobkit.worker.stop import Stopped, StopSignals

LENGTHS = [1, 2, 4, 17, 29]
"""Of datasets in batches of 4: with 5 ranks most of them leave some without a batch."""


class Indexed(Dataset[Any]):
    """Sample `i` is [i, and a random number of each of the three generators that augmentations draw from]."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def noisy(batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A value a sample that depends on the sample, its batch and random numbers, and does not add up exactly."""
    assert torch.equal(batch[:, 0].long(), ids)
    return (batch.sum(1).float() + 0.1) / 3 + torch.rand(len(ids)) * batch.shape[0]


def first_column(batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return batch[:, 0]


# The same number


def in_all_ways(team: Team) -> list[tuple[Any, Any, Any]]:
    """For each length what a rank gets with batches dealt out beforehand, on demand, and in rounds."""
    found = []
    for length in LENGTHS:
        numbers = range(math.ceil(length / 4))
        dynamic = DynamicBatches(numbers, shared_store(team.world_size), f"counter/{length}")
        lockstep = LockstepBatches(numbers, team.rank, team.world_size)
        ways = [evaluate(noisy, Indexed(length), batch_size=4, batches=way) for way in (None, dynamic, lockstep)]
        found.append(tuple(ways))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_mean_is_bit_identical_for_any_number_of_ranks_and_any_hand_out(world_size: int) -> None:
    alone = [evaluate(noisy, Indexed(length), batch_size=4) for length in LENGTHS]
    assert on_ranks(world_size, in_all_ways) == [[(value,) * 3 for value in alone]] * world_size


def batches_computed(team: Team, batches: int) -> list[int]:
    """This rank's, where rank 0 holds its first one until the others are through with all the rest."""
    computed: list[int] = []
    store = shared_store(team.world_size)

    def value(batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        computed.append(int(ids[0]) // 2)
        if team.rank == 0:
            store.set("rank 0 has one", "")
            deadline = time.monotonic() + 20
            while store.add("done by others", 0) < batches - 1 and time.monotonic() < deadline:
                time.sleep(0.01)
        else:
            store.wait(["rank 0 has one"], timedelta(seconds=240))
            store.add("done by others", 1)
        return first_column(batch, ids)

    mean = evaluate(value, Indexed(2 * batches), batch_size=2, batches=DynamicBatches(range(batches), store, "counter"))
    assert mean == batches - 0.5
    return computed


def test_the_others_compute_what_a_slow_rank_does_not_come_to() -> None:
    slow, *others = on_ranks(3, batches_computed, 9)
    assert len(slow) == 1
    assert sorted(slow + [number for computed in others for number in computed]) == list(range(9))


def strange_floats(team: Team) -> list[bytes]:
    """The bits of every value that is gathered from two ranks, a batch each."""
    scores, ranks = Outputs(4, 2), RankGroup.of(team.group)
    mine = [[-0.0, float("nan")], [float("-inf"), 5e-324]][team.rank]
    scores.add(team.rank, {"b": torch.tensor(mine, dtype=torch.float64), "a": torch.tensor([1, 2])})
    scores.agree(ranks)
    together = scores.gathered(ranks)
    return [together["b"].numpy().tobytes(), together["a"].tolist()]


def test_gathered_values_keep_every_bit() -> None:
    expected = np.array([-0.0, float("nan"), float("-inf"), 5e-324]).tobytes()
    assert on_ranks(2, strange_floats) == [[expected, [1.0, 2.0, 1.0, 2.0]]] * 2


def test_a_mean_with_an_infinite_value_is_what_it_is() -> None:
    def value(batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.where(ids == 0, math.inf, torch.where(ids == 1, -math.inf, 0.0))

    assert evaluate(value, Indexed(1), batch_size=1) == math.inf
    assert math.isnan(evaluate(value, Indexed(3), batch_size=1))  # type: ignore[arg-type]


def test_several_metrics_have_a_mean_each() -> None:
    def metrics(batch: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"index": ids, "is even": ids % 2 == 0}

    assert evaluate(metrics, Indexed(5), batch_size=2) == {"index": 2.0, "is even": 0.6}


# Forward passes that are collectives


@pytest.mark.parametrize("count", [1, 3, 4, 10])
@pytest.mark.parametrize("data_ranks", [1, 3, 4])
def test_in_lockstep_every_rank_has_equally_many_batches_and_none_is_left_out(count: int, data_ranks: int) -> None:
    numbers = range(100, 100 + count)
    dealt = [list(LockstepBatches(numbers, data_rank, data_ranks)) for data_rank in range(data_ranks)]
    assert {len(one) for one in dealt} == {math.ceil(count / data_ranks)}
    assert {number for one in dealt for number in one} == set(numbers)


def with_a_collective(team: Team, num_workers: int) -> float:
    """Of a function in which all ranks must meet; the ranks of one pair have the same batches."""

    def value(batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        return noisy(batch, ids)

    lockstep = LockstepBatches(range(5), team.rank // 2, team.world_size // 2)
    mean = evaluate(value, Indexed(17), batch_size=4, batches=lockstep, num_workers=num_workers)
    assert isinstance(mean, float)
    return mean


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_in_which_all_ranks_meet_gives_the_same_number_in_lockstep(num_workers: int) -> None:
    assert on_ranks(4, with_a_collective, num_workers) == [evaluate(noisy, Indexed(17), batch_size=4)] * 4


def stopped_in_lockstep(team: Team) -> list[int]:
    computed = []
    lockstep = LockstepBatches(range(10), team.rank, team.world_size, RankGroup.of_world().anywhere)
    for number in lockstep:
        computed.append(number)
        if number == 3:
            lockstep.stop()
    return computed


def test_a_stop_on_one_rank_ends_the_lockstep_of_all_after_the_same_round() -> None:
    assert on_ranks(2, stopped_in_lockstep) == [[0, 2], [1, 3]]


def test_a_stop_on_one_rank_ends_the_dynamic_hand_out_for_all() -> None:
    store = HashStore()
    one, other = DynamicBatches(range(10), store, "counter"), DynamicBatches(range(10), store, "counter")
    batches, others = iter(one), iter(other)
    assert [next(batches), next(others)] == [0, 1]
    one.stop()
    assert [*batches, *others] == []


# Models whose buffers DDP keeps equal


def normalising() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    return net


def with_batch_norm(team: Team, batches: int) -> tuple[Any, list[float]]:
    """A mean through a DDP model, and rank-dependent statistics after two more steps of training."""
    model = data_parallel(normalising(), torch.device("cpu"))
    statistics = model.module[1].running_mean
    statistics.fill_(float(team.rank))  # as after a step of training, which each rank has its own samples for
    model.eval()
    send_first(model.buffers())
    with independent_forwards([model]):
        mean = evaluate(lambda batch, ids: model(batch.float()).sum(1), Indexed(2 * batches), batch_size=2)
    model.train()
    for _ in range(2):
        model(torch.full((2, 4), float(team.rank))).sum().backward()
    return mean, statistics.tolist()


@pytest.mark.parametrize("batches", [1, 4])
def test_ranks_evaluate_a_ddp_model_a_different_number_of_times_with_the_same_batch_norm(batches: int) -> None:
    net = normalising().eval()
    alone = evaluate(lambda batch, ids: net(batch.float()).sum(1), Indexed(2 * batches), batch_size=2)
    found = on_ranks(3, with_batch_norm, batches)
    assert [mean for mean, _ in found] == [alone] * 3
    # Before each forward pass of the training rank 0's are sent again: 0, and 10 % of the way to a rank's own samples.
    assert [statistics for _, statistics in found] == [[pytest.approx(0.1 * rank)] * 4 for rank in range(3)]


def differentiating(team: Team) -> tuple[Any, list[float]]:
    """A mean of gradients by the input, as of an adversarial attack, and the gradients of a step of training after."""
    model = data_parallel(normalising().eval(), torch.device("cpu"))
    send_first(model.buffers())

    def slope(batch: Any, ids: Any) -> Any:
        with torch.enable_grad():
            x = batch.float().requires_grad_()
            model(x).square().sum().backward()
        model.zero_grad()
        return x.grad.sum(1)  # type: ignore[union-attr]

    with independent_forwards([model]):
        mean = evaluate(slope, Indexed(6), batch_size=2)  # three batches, on two ranks
    model(torch.full((2, 4), float(team.rank))).sum().backward()
    return mean, model.module[0].bias.grad.tolist()


def test_a_function_may_differentiate_through_a_ddp_model_on_each_rank_for_itself() -> None:
    one, other = on_ranks(2, differentiating)
    assert one == other


# What is left alone, and what is refused


def generators() -> tuple[Any, ...]:
    """The state of this process's random numbers, to compare."""
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, list(keys), *rest)


def test_the_trainings_random_numbers_and_gradients_are_left_alone() -> None:
    weight = torch.ones(1, requires_grad=True)
    before = generators()

    def value(batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        random.random(), np.random.rand()
        product = noisy(batch, ids) * weight
        assert not product.requires_grad
        return product

    assert evaluate(value, Indexed(9), batch_size=4) == evaluate(noisy, Indexed(9), batch_size=4)
    assert generators() == before
    assert torch.is_grad_enabled() and weight.grad is None


def test_another_seed_gives_other_random_numbers() -> None:
    assert len({evaluate(noisy, Indexed(9), batch_size=4, seed=seed) for seed in (1, 2, 1)}) == 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda ids: torch.zeros(()), "function returned shape (), expected one value for each of 4 samples"),
        (lambda ids: torch.zeros(4, 2), "function returned shape (4, 2), expected one value for each of 4 samples"),
        (lambda ids: 1.0, "function returned float, expected one value for each of 4 samples"),
        (
            lambda ids: {"loss": ids[:1]},
            "function returned shape (1,) as 'loss', expected one value for each of 4 samples",
        ),
        (lambda ids: {}, "function returned an empty dict, expected a tensor for each name in it"),
        (lambda ids: {f"{ids[0]}": ids}, "function returned a dict of 4, and a dict of 0 for another batch"),
    ],
)
def test_a_function_that_does_not_return_one_value_a_sample_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        evaluate(lambda batch, ids: value(ids), Indexed(8), batch_size=4)
    assert str(raised.value) == message


def of_other_names(team: Team) -> str:
    with pytest.raises(ValueError) as raised:
        evaluate(lambda batch, ids: {f"rank {team.rank}": ids}, Indexed(2), batch_size=1)
    return str(raised.value)


def test_ranks_that_return_other_names_are_told_so_on_all_of_them() -> None:
    message = "function returned a dict of rank 0 on one rank, and a dict of rank 1 on another"
    assert on_ranks(2, of_other_names) == [message] * 2


@pytest.mark.parametrize(
    ("length", "batch_size", "message"), [(0, 4, "the dataset is empty"), (4, 0, "batch_size is 0")]
)
def test_an_evaluation_of_nothing_is_refused_in_a_line(length: int, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        evaluate(noisy, Indexed(length), batch_size=batch_size)
    assert "\n" not in str(raised.value)


def test_a_hand_out_that_leaves_a_batch_out_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank computed batch 1 of 3"):
        evaluate(noisy, Indexed(9), batch_size=4, batches=[0, 2])


# What an attempt keeps for the next


class Run:
    """Attempts at evaluations in this process, the only rank."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDir(path)
        self.run.checkpoints.mkdir(parents=True)
        self.computed: list[int] = []
        self.stop_after: int | None = None
        self.batch_size = 2
        self.signals = StopSignals()
        monkeypatch.setenv("JOBKIT_CODE", str(path / "code" / "one"))

    def attempt(self, number: int, checkpoint: int | None) -> Evaluator:
        """The evaluations of an attempt that begins with this checkpoint."""
        write_json(self.run.lease_file, {"attempt": number})
        config, device = Config(name="toy", task="mytask:train"), torch.device("cpu")
        rank = Rank(self.run, config, number, Topology(), device, RankGroup.alone())

        def fail(error: Exception) -> None:
            raise error

        reporter = RunReporter(self.run, number, True, on_lost_lease=fail)
        self.signals = StopSignals()
        parallel = Parallel(Layout(), ParallelConfig(), CommConfig(), device)
        return Evaluator(rank, reporter, parallel, self.signals, checkpoint)

    def evaluate(
        self,
        evaluations: Evaluator,
        *,
        step: int,
        stop_after: int | None = None,
        checkpoint: int | None = None,
        batch_size: int = 2,
        may_stop: bool = True,
        false_alarm: bool = False,
    ) -> torch.Tensor:
        """The values of 20 samples; told to stop after so many batches, and continued from `checkpoint` then."""
        self.computed, self.stop_after, self.batch_size = [], stop_after, batch_size
        RUNS[:] = [self]

        def stop() -> None:
            if not false_alarm:
                raise Stopped("preempted", step, checkpoint)
            self.signals.clear()

        result = evaluations.run(
            counted,
            Indexed(20),
            batch_size=batch_size,
            step=step,
            equal=[],
            may_stop=lambda: may_stop,
            stop_if_told=stop,
        )
        assert isinstance(result, torch.Tensor)
        return result

    def stop_at(self, step: int, checkpoint: int | None) -> None:
        """Attempt 1, which is stopped after 3 of an evaluation's 10 batches."""
        with pytest.raises(Stopped):
            self.evaluate(self.attempt(1, None), step=step, stop_after=3, checkpoint=checkpoint)
        assert self.computed == [0, 1, 2]


RUNS: list[Run] = []
"""The one that `counted` writes to; it does not hold it, as what it holds is to be the same in each attempt."""


def counted(batch: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What is evaluated; it notes the batch, and is told to stop."""
    (run,) = RUNS
    run.computed.append(int(ids[0]) // run.batch_size)
    if len(run.computed) == run.stop_after:
        run.signals.signal = signal.SIGTERM
    return noisy(batch, ids)


@pytest.fixture
def one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path / "run", monkeypatch)


@pytest.fixture
def whole(one_run: Run) -> torch.Tensor:
    """The values of an evaluation that nobody interrupted."""
    return one_run.evaluate(one_run.attempt(1, None), step=0)


@pytest.mark.parametrize(("step", "checkpoint"), [(5, 5), (0, 0), (0, None)], ids=["later", "first", "before the loop"])
def test_an_evaluation_that_was_stopped_goes_on_where_it_was(
    one_run: Run, whole: torch.Tensor, step: int, checkpoint: int | None
) -> None:
    one_run.stop_at(step, checkpoint)
    second = one_run.attempt(2, checkpoint)
    with pytest.raises(Stopped):
        one_run.evaluate(second, step=step, stop_after=2, checkpoint=checkpoint)
    assert one_run.computed == [3, 4]
    third = one_run.attempt(3, checkpoint)
    assert torch.equal(one_run.evaluate(third, step=step), whole)
    assert one_run.computed == [5, 6, 7, 8, 9]
    assert [(event["event"], event["done"]) for event in events(one_run.run.path)] == [
        ("evaluation_interrupted", 6),
        ("evaluation_resumed", 6),
        ("evaluation_interrupted", 10),
        ("evaluation_resumed", 10),
    ]
    assert not one_run.run.evaluation_file.exists()


def test_evaluations_that_were_done_before_the_stopped_one_are_not_repeated(one_run: Run, whole: torch.Tensor) -> None:
    first = one_run.attempt(1, None)
    one_run.evaluate(first, step=4)
    one_run.evaluate(first, step=5, batch_size=4)
    with pytest.raises(Stopped):
        one_run.evaluate(first, step=5, stop_after=1, checkpoint=5)
    second = one_run.attempt(2, 5)
    one_run.evaluate(second, step=5, batch_size=4)
    assert one_run.computed == []
    assert torch.equal(one_run.evaluate(second, step=5), whole)
    assert one_run.computed == list(range(1, 10))
    one_run.evaluate(second, step=5)
    assert one_run.computed == list(range(10))


def damage(one_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(one_run.run.evaluation_file.read_bytes())
    content[len(content) // 2] ^= 1
    one_run.run.evaluation_file.write_bytes(content)


def tear(one_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    content = one_run.run.evaluation_file.read_bytes()
    one_run.run.evaluation_file.write_bytes(content[:20])


def change_the_code(one_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBKIT_CODE", str(one_run.run.path / "code" / "other"))


@pytest.mark.parametrize(
    ("spoil", "checkpoint", "step", "batch_size"),
    [
        (damage, 5, 5, 2),
        (tear, 5, 5, 2),
        (change_the_code, 5, 5, 2),
        (lambda *_: None, 4, 5, 2),
        (lambda *_: None, 4, 4, 2),
        (lambda *_: None, 5, 6, 2),
        (lambda *_: None, 5, 5, 5),
    ],
    ids=["damaged", "torn", "other code", "older checkpoint", "other step", "later step", "other batches"],
)
def test_what_does_not_belong_to_an_evaluation_is_not_used(
    one_run: Run, monkeypatch: pytest.MonkeyPatch, spoil: Any, checkpoint: int, step: int, batch_size: int
) -> None:
    one_run.stop_at(5, 5)
    spoil(one_run, monkeypatch)
    one_run.evaluate(one_run.attempt(2, checkpoint), step=step, batch_size=batch_size)
    assert one_run.computed == list(range(20 // batch_size))
    assert names(one_run.run.path) == ["evaluation_interrupted"]


@pytest.mark.parametrize("reason", ["trained since the checkpoint", "code without a snapshot"])
def test_an_evaluation_that_could_not_be_taken_up_is_not_kept(
    one_run: Run, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    checkpoint = 5
    if reason == "code without a snapshot":
        monkeypatch.delenv("JOBKIT_CODE")
    else:
        checkpoint = 4
    one_run.stop_at(5, checkpoint)
    (event,) = events(one_run.run.path)
    assert (event["event"], event["kept"]) == ("evaluation_interrupted", False)
    assert not one_run.run.evaluation_file.exists()


def test_a_false_alarm_loses_nothing(one_run: Run, whole: torch.Tensor) -> None:
    assert torch.equal(one_run.evaluate(one_run.attempt(1, None), step=0, stop_after=3, false_alarm=True), whole)
    assert one_run.computed == list(range(10))
    assert names(one_run.run.path) == []


def test_a_notice_in_a_step_that_would_be_repeated_waits_for_the_end(one_run: Run, whole: torch.Tensor) -> None:
    assert torch.equal(one_run.evaluate(one_run.attempt(1, None), step=0, stop_after=3, may_stop=False), whole)
    assert one_run.computed == list(range(10))


def test_the_bar_says_how_far_an_evaluation_is(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display("toy")
    evaluation = {"done": 120, "total": 500}
    display.show(Progress(attempt=1, time=0.0, step=3, total_steps=9, values={"loss": 0.5}, evaluation=evaluation))
    assert capsys.readouterr().err.split() == ["step", "3/9", "evaluating", "120/500", "samples", "loss", "0.5"]


# Real runs

TASK = """
import os
import signal
import time

import torch
from torch import nn

from jobkit.worker.stop import STOP_SIGNALS
from jobkit.train.optim import fused_ema_adam


def train(ctx):
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    model = ctx.parallelize(net)
    optimizer = ctx.optimizer(model, fused_ema_adam, lr=1e-2, ema_decay=0.5)
    generator = torch.Generator().manual_seed(0)
    training = torch.utils.data.TensorDataset(torch.randn(60, 4, generator=generator))
    held_out = torch.utils.data.TensorDataset(torch.randn(100, 4, generator=generator))
    loader = ctx.loader(training, global_batch_size=12)
    ctx.track(model=model, optimizer=optimizer, loader=loader)

    def count(name, ids):
        with open(ctx.run_dir / f"{name}_{ctx.rank}.txt", "a") as file:
            file.write(f"{int(ids[0])}\\n")

    def at_once(batch, ids):
        count("first", ids)
        return model(batch[0]).flatten()

    def error(batch, ids):
        if ctx.attempt == 1 and ids[0] >= 30:
            while ctx.params.until == "notice" and not STOP_SIGNALS.pending:
                time.sleep(0.01)
            if ctx.params.until == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        count("second", ids)
        with ctx.autocast():
            return {"error": (model(batch[0]) - 1).square().flatten(), "noise": torch.rand(len(ids))}

    for step in ctx.steps(6):
        if step == 3:
            net.eval()
            with ctx.averaged(optimizer):
                first = ctx.evaluate(at_once, held_out, batch_size=30)
                second = ctx.evaluate(error, held_out, batch_size=5)
            net.train()
            ctx.log({f"validation/{name}": value for name, value in second.items()})
        (x,) = next(loader)
        ctx.backward(model, x, lambda output, target: (output - 1).square().mean(), x)
        ctx.update(optimizer)
        with open(ctx.run_dir / f"steps_{ctx.rank}.txt", "a") as file:
            file.write(f"{step}\\n")
    net.eval()
    last = ctx.evaluate_samples(lambda batch, ids: model(batch[0]).flatten(), held_out, batch_size=64)
    return {"first": first, "second": second, "last": last.sum().item(), "samples": len(last)}
"""


def of_project(path: Path, until: str) -> tuple[Project, tuple[str, ...]]:
    project = Project(path)
    (project.path / "mytask.py").write_text(TASK)
    options = ("--local", "resources.nodes=1", "resources.tasks_per_node=2", f"+params={{until: {until}}}")
    return project, (*options, "precision=bf16", "checkpoint.every=2", "parallel=ddp")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, bytes]]:
    project, options = of_project(tmp_path_factory.mktemp("evaluate"), "end")
    project.submit(*options)
    (run,) = project.runs
    yield status(run)["result"], weights(run)


def computed(run: Path, which: str) -> Counter[int]:
    """How often each batch was computed, by its first sample."""
    return Counter(int(line) for file in run.glob(f"{which}_*.txt") for line in file.read_text().split())


def test_a_preemption_within_an_evaluation_loses_none_of_it(tmp_path: Path, uninterrupted: tuple[Any, bytes]) -> None:
    project, options = of_project(tmp_path, "notice")
    process = project.start("submit", "toy.yaml", *options)

    def evaluating() -> bool:
        with contextlib.suppress(OSError, ValueError, IndexError):
            progress = json.loads((project.runs[0] / "progress.json").read_text())
            return progress["step"] == 3 and (progress.get("evaluation") or {}).get("total") == 100
        return False

    wait_for("the evaluation", evaluating)
    (run,) = project.runs
    wait_for("six batches", lambda: len(computed(run, "second")) == 6, run)  # two more are held by the two ranks
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75, describe(run)
    project.submit(*options)

    journal = {event["event"]: event for event in events(run)}
    interrupted, resumed = journal["evaluation_interrupted"], journal["evaluation_resumed"]
    assert (interrupted["step"], interrupted["done"], interrupted["total"]) == (3, 40, 100), describe(run)
    assert interrupted["kept"] and (resumed["step"], resumed["done"]) == (3, 40)
    assert computed(run, "first") == dict.fromkeys(range(0, 100, 30), 1)
    assert computed(run, "second") == dict.fromkeys(range(0, 100, 5), 1)
    assert (status(run)["result"], weights(run)) == uninterrupted
    assert (run / "steps_0.txt").read_text().split() == [str(step) for step in range(6)]
    assert logged_steps(run, "validation/error") == [3]


def test_a_rank_killed_within_an_evaluation_costs_a_repetition_and_gives_the_same_number(
    tmp_path: Path, uninterrupted: tuple[Any, bytes]
) -> None:
    project, options = of_project(tmp_path, "killed")
    project.submit(*options)
    (run,) = project.runs
    assert [attempt["cause"] for attempt in status(run)["attempts"]] == ["killed", "finished"], describe(run)
    assert "evaluation_interrupted" not in names(run) and "evaluation_resumed" not in names(run)
    assert set(computed(run, "second")) == set(range(0, 100, 5)) and computed(run, "second")[0] == 2
    assert (status(run)["result"], weights(run)) == uninterrupted
