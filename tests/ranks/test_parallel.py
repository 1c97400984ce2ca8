"""Every way to spread a model over ranks trains as one process does, and resumes on as many ranks and on others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness.ranks import Team, on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from jobkit.checkpoint.whole import gather_whole
from jobkit.errors import UsageError
from jobkit.group import RankGroup
from jobkit.run.config import CommConfig, ParallelConfig, Resources
from jobkit.run.layout import Layout, check, factor
from jobkit.train import schedule
from jobkit.train.accumulation import backward, call
from jobkit.train.gradients import LossScaler, clip_gradients, gradient_norm
from jobkit.train.local_sgd import average_replicas
from jobkit.train.names import module_state
from jobkit.train.optim import fused_ema_adam
from jobkit.train.optimizer_state import parameters_of
from jobkit.train.parallel import Parallel, unwrapped
from jobkit.train.pipeline import Blocks, cut_stages, stage_of
from jobkit.worker.tracked_state import TrackedState

STEPS, BATCH, WIDTH = 6, 12, 8
TOLERANCE = 2e-6
"""Largest difference of a weight from one process's after six steps: sums in another order."""

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
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Sequential):
    def tensor_plan(self) -> dict[str, ParallelStyle]:
        # Only of the last two blocks: the first stage of a pipeline has tensors of one kind, the second one of two.
        return {"[23].up": ColwiseParallel(), "[23].down": RowwiseParallel()}


def net() -> Net:
    torch.manual_seed(0)
    return Net(*[Block() for _ in range(4)])


def data(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step and its target."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, BATCH, WIDTH, generator=generator).unbind()


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Training:
    """A model and its optimizer, spread over the ranks of a team, and what a Context does with them."""

    def __init__(
        self,
        team: Team,
        case: dict[str, Any],
        comm: CommConfig | None = None,
        batches: Callable[[int], tuple[Tensor, Tensor]] = data,
    ) -> None:
        config = ParallelConfig(**case)
        self.group = team.group
        self.layout = factor(config, team.world_size, team.world_size)
        self.comm = comm or CommConfig()
        self.parallel = Parallel(self.layout, config, self.comm, torch.device("cpu"), team.rank)
        self.model = self.parallel.spread(net())
        self.optimizer = self.parallel.optimizer(
            self.model.parameters(), fused_ema_adam, {"lr": 1e-2, "weight_decay": 0.1}
        )
        self.scheduler = schedule.cosine(self.optimizer, steps=3 * STEPS if batches is data else 2 * LONG, warmup=2)
        self.batches = batches
        self.tracking: TrackedState | None = None

    def track(self, tracking: TrackedState) -> None:
        tracking.add_module(self.model)
        tracking.states.name_parameters({})
        tracking.add("model", self.model)
        tracking.add("optimizer", self.optimizer)
        tracking.add("scheduler", self.scheduler)
        tracking.forget_checkpoint()
        self.tracking = tracking

    def steps(self, first: int, last: int, micro: int | None = None) -> None:
        ranks, rank = self.layout.data, self.parallel.data_rank
        for step in range(first, last):
            x, y = (part[BATCH * rank // ranks : BATCH * (rank + 1) // ranks] for part in self.batches(step))
            self.parallel.backward(
                self.model,
                x,
                mean_square,
                y,
                global_batch_size=BATCH,
                micro_batch_size=micro,
                autocast=nullcontext,
            )
            parameters = parameters_of(self.optimizer)
            clip_gradients(parameters, 0.5, self.parallel.norm(parameters))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            if self.parallel.drifts and (step + 1) % self.comm.local_sgd == 0:
                average_replicas([self.model], [self.optimizer], self.parallel.data_group)

    def weights(self) -> dict[str, Tensor]:
        """All of them, on rank 0."""
        whole = gather_whole(RankGroup.of(self.group), module_state(unwrapped(self.model)))
        return {name: tensor.clone() for name, tensor in whole.tensors.items()}

    def own_weights(self) -> dict[str, Tensor]:
        """What this rank has, under plain DDP or local SGD."""
        return copy.deepcopy(unwrapped(self.model).state_dict())

    def averaged_weights(self) -> dict[str, Tensor]:
        with self.optimizer.averaged():  # type: ignore[attr-defined]
            return self.weights()


@cache
def reference() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and averaged weights of one process that takes each global batch as a whole."""
    model = net()
    optimizer = fused_ema_adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = schedule.cosine(optimizer, steps=3 * STEPS, warmup=2)
    for step in range(STEPS):
        x, y = data(step)
        mean_square(model(x), y).backward()
        clip_gradients(list(model.parameters()), 0.5, gradient_norm(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    weights = copy.deepcopy(model.state_dict())
    with optimizer.averaged():
        return weights, copy.deepcopy(model.state_dict())


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest of any element."""
    assert set(left) == set(right)
    return max((left[name] - right[name]).abs().max().item() for name in left)


def train_save_and_go_on(team: Team, cases: list[dict[str, Any]], root: Path) -> list[Any]:
    found = []
    for number, case in enumerate(cases):
        training = Training(team, case)
        checkpointer = team.checkpointer(root / str(number))
        training.track(TrackedState(training.parallel, checkpointer, RankGroup.of(team.group), None))
        training.steps(0, 3, micro=2)
        assert training.tracking is not None
        shared, held_by, own = training.tracking.trees()
        checkpointer.save(3, shared, own, held_by=held_by).wait()
        training.steps(3, STEPS, micro=2)
        found.append((training.weights(), training.averaged_weights()))
    return found


def resume(team: Team, cases: list[dict[str, Any]], root: Path) -> list[Any]:
    found = []
    for number, case in enumerate(cases):
        training = Training(team, case)
        checkpointer = team.checkpointer(root / str(number))
        loaded = checkpointer.load_newest(names=())
        assert loaded is not None and loaded.step == 3 and loaded.shared == {}
        tracking = TrackedState(training.parallel, checkpointer, RankGroup.of(team.group), loaded)
        training.track(tracking)
        if loaded.manifest.world_size == team.world_size:
            tracking.load_own_state(loaded.local)
        training.steps(3, STEPS, micro=2)
        found.append((training.weights(), training.averaged_weights()))
        # A state that was loaded must be the same on all ranks again, or no checkpoint follows.
        shared, held_by, own = tracking.trees()
        again = team.checkpointer(root / f"{number} resumed on {team.world_size}")
        again.save(STEPS, shared, own, held_by=held_by).wait()
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Each strategy trained for six steps on four ranks, with a checkpoint after three."""
    root = tmp_path_factory.mktemp("strategies")
    return root, on_ranks(4, train_save_and_go_on, list(STRATEGIES.values()), root)[0]


def test_every_strategy_trains_as_one_process_does(trained: tuple[Path, list[Any]]) -> None:
    weights, averages = reference()
    for name, (found, found_averages) in zip(STRATEGIES, trained[1], strict=True):
        assert difference(found, weights) < TOLERANCE, name
        assert difference(found_averages, averages) < TOLERANCE, name


def test_with_shards_on_the_host_the_weights_are_those_without_to_the_last_bit(trained: tuple[Path, list[Any]]) -> None:
    found = dict(zip(STRATEGIES, trained[1], strict=True))
    for here, there in zip(found["zero3 offloaded"], found["zero3"], strict=True):
        assert difference(here, there) == 0.0


def test_every_strategy_resumes_bit_for_bit_on_the_same_ranks(trained: tuple[Path, list[Any]]) -> None:
    root, before = trained
    after = on_ranks(4, resume, list(STRATEGIES.values()), root)[0]
    for name, (weights, averages), (again, again_averages) in zip(STRATEGIES, before, after, strict=True):
        assert difference(weights, again) == 0.0, name
        assert difference(averages, again_averages) == 0.0, name


def test_every_strategy_resumes_on_half_the_ranks(trained: tuple[Path, list[Any]]) -> None:
    root, _ = trained
    halved = {"tensor x pipeline": {"tensor": "all"}}  # four ranks are the least for the product
    cases = [halved.get(name, case) for name, case in STRATEGIES.items()]
    weights, averages = reference()
    for name, (found, found_averages) in zip(STRATEGIES, on_ranks(2, resume, cases, root)[0], strict=True):
        assert difference(found, weights) < TOLERANCE, name
        assert difference(found_averages, averages) < TOLERANCE, name


def in_a_group(team: Team, action: Callable[..., list[Any]], *args: Any) -> list[Any]:
    """What `action` returns on one rank, with the process group that jobkit forms for it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return action(team, *args)


def test_a_checkpoint_moves_between_one_rank_with_its_shards_on_the_host_and_others(tmp_path: Path) -> None:
    hosted = [STRATEGIES["zero3 offloaded"]] * 5
    others = [STRATEGIES[name] for name in ("zero3 offloaded", "zero3", "ddp")]
    others += [{"data": "zero2", "offload": True}, {"data": "hsdp", "offload": True, "shards": 1}]
    (one,) = on_ranks(1, in_a_group, train_save_and_go_on, hosted, tmp_path / "one")
    two = on_ranks(2, train_save_and_go_on, others, tmp_path / "two")[0]
    (same,) = on_ranks(1, in_a_group, resume, others, tmp_path / "one")
    onto_two = on_ranks(2, resume, others, tmp_path / "one")[0]
    (from_two,) = on_ranks(1, in_a_group, resume, hosted, tmp_path / "two")
    reached = reference()
    for number in range(len(others)):
        for found in (one, two, same, onto_two, from_two):
            for kind in (0, 1):  # weights, averages
                assert difference(found[number][kind], reached[kind]) < TOLERANCE, number
                assert difference(same[number][kind], one[number][kind]) == 0.0, number


def check_products(cases: dict[str, tuple[dict[str, Any], dict[str, Any]]], root: Path) -> None:
    """Train on eight ranks, resume there and, with the second layout, on two."""
    wide, narrow = [wide for wide, _ in cases.values()], [narrow for _, narrow in cases.values()]
    trained = on_ranks(8, train_save_and_go_on, wide, root)[0]
    same = on_ranks(8, resume, wide, root)[0]
    fewer = on_ranks(2, resume, narrow, root)[0]
    weights, averages = reference()
    for name, before, after, other in zip(cases, trained, same, fewer, strict=True):
        assert difference(before[0], weights) < TOLERANCE and difference(before[1], averages) < TOLERANCE, name
        assert difference(before[0], after[0]) == difference(before[1], after[1]) == 0.0, name
        assert difference(other[0], weights) < TOLERANCE and difference(other[1], averages) < TOLERANCE, name


def test_products_on_eight_ranks_train_as_one_process_does_and_resume(tmp_path: Path) -> None:
    # ddp x tensor x pipeline and hsdp x tensor: tests/soak/test_products.py
    cases = {
        "zero3 x tensor x pipeline": ({"data": "zero3", "tensor": 2, "pipeline": 2}, {"tensor": 2}),
        "hsdp x pipeline": ({"data": "hsdp", "shards": 2, "pipeline": 2}, {"data": "zero3"}),
    }
    check_products(cases, tmp_path)


# Plans that divide the sequence, too


class SequenceDivided(nn.Module):
    """A transformer's feed-forward part, whose stream and norms are divided by tokens, and its matrices by features."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.seen = x.shape[1]
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.last(x))

    def tensor_plan(self) -> dict[str, Any]:
        return {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "last": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


def train_by_sequence(team: Team) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    found, seen = [], 0
    parallel = ParallelConfig(tensor="all")
    layout = factor(parallel, team.world_size, team.world_size)
    for is_divided in (True, False):
        torch.manual_seed(0)
        model: nn.Module = SequenceDivided()
        if is_divided:
            model = Parallel(layout, parallel, CommConfig(), torch.device("cpu"), team.rank).spread(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            tokens = torch.randint(12, (2, 6), generator=torch.Generator().manual_seed(step))
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            parameters = list(model.parameters())
            clip_gradients(parameters, 0.1, gradient_norm(parameters))
            optimizer.step()
            optimizer.zero_grad()
        state = module_state(model)
        found.append({name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()})
        seen = model.seen if is_divided else seen
    return seen, found[0], found[1]


def test_a_tensor_plan_may_divide_the_sequence_between_the_matrices() -> None:
    for seen, divided, dense in on_ranks(2, train_by_sequence):
        assert seen == 3, "half of the tokens"
        assert difference(divided, dense) < TOLERANCE


# Pipelines of blocks with several inputs


class Conditioned(nn.Module):
    """Gives what it is given, `x` changed: by a condition that needs a gradient, numbers and a mask, that need none."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.embed = nn.Linear(WIDTH, WIDTH), nn.Embedding(4, WIDTH)
        self.deepen = nn.Linear(WIDTH, WIDTH) if number == 0 else None

    def forward(self, x: Tensor, condition: Tensor, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        condition = self.deepen(condition) if self.deepen else condition
        changed = torch.tanh(self.linear(x) + condition + self.embed(ids)).masked_fill(mask, 0.0)
        return x + changed, condition, ids, mask


class First(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return x


class TakesTuple(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        return self.block(*inputs)


def blocks(spread: bool) -> nn.Sequential:
    torch.manual_seed(0)
    found: list[nn.Module] = [*(Conditioned(number) for number in range(3)), First()]
    return Blocks(*found) if spread else nn.Sequential(*map(TakesTuple, found))


def conditions(length: int = WIDTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, condition = torch.randn(2, BATCH, length, WIDTH, generator=generator)
    ids = torch.randint(4, (BATCH, length), generator=generator)
    return {"x": x, "condition": condition, "ids": ids, "mask": torch.rand(x.shape, generator=generator) < 0.2}


GIVEN: dict[str, tuple[bool, Callable[[dict[str, Tensor]], Any]]] = {
    "a tuple": (True, lambda inputs: tuple(inputs.values())),
    "a dict": (True, dict),
    "a tuple as the only input": (False, lambda inputs: (tuple(inputs.values()),)),
}


def gradients_and_outputs(team: Team) -> dict[str, Any]:
    found: dict[str, Any] = {}
    config = ParallelConfig(pipeline="all")
    for name, (spread, given) in GIVEN.items():
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(name == "a dict")  # fills memory that nobody has written with wrong numbers
        parallel = Parallel(factor(config, 2, 2), config, CommConfig(), torch.device("cpu"), team.rank)
        model = parallel.spread(blocks(spread))
        for length in (WIDTH, 3):  # of another length the tensors between the stages are others
            inputs = given(conditions(length))
            options: dict[str, Any] = {"global_batch_size": BATCH, "micro_batch_size": 4, "autocast": nullcontext}
            loss = parallel.backward(model, inputs, mean_square, torch.zeros(BATCH, length, WIDTH), **options)
        with torch.no_grad():
            output = call(model, inputs)
        gradients = {key: parameter.grad for key, parameter in unwrapped(model).named_parameters()}
        found[name] = loss, output, gradients
    return found


def test_a_pipeline_takes_blocks_with_several_inputs() -> None:
    stages = on_ranks(2, gradients_and_outputs)
    for name, (spread, given) in GIVEN.items():
        dense, expected = blocks(spread), torch.zeros(())
        for length in (WIDTH, 3):
            output = call(dense, given(conditions(length)))
            expected = mean_square(output, torch.zeros(BATCH, length, WIDTH))
            expected.backward()
        found: dict[str, Tensor] = {}
        for stage in stages:
            loss, outputs, gradients = stage[name]
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(outputs, output.detach())
            found |= gradients
        assert len(stages[0][name][2]) and len(stages[1][name][2])
        for key, parameter in dense.named_parameters():
            torch.testing.assert_close(found[key], parameter.grad, msg=f"{name}: {key}")


def test_what_a_stage_would_not_run_or_could_not_send_is_refused() -> None:
    class OwnForward(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    with pytest.raises(ValueError, match=r"OwnForward has a forward of its own, which no stage would run"):
        stage_of(OwnForward(Block(), Block()), 0, 2)
    with pytest.raises(UsageError, match=r"block 0 gives a NoneType; what goes from one stage to the next"):
        stage_of(Blocks(First(), nn.Linear(1, 1)), 0, 2)(None)


# Communication

LONG = 40
"""Steps after which a model that learns at all has learnt most of it."""


def task(step: int) -> tuple[Tensor, Tensor]:
    """A global batch of something that can be learnt: each row's elements, mixed."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, 0.5 * x.roll(1, dims=1) - x.flip(1)


class Outcome(NamedTuple):
    """What one rank has after training: its own weights, the loss of its model on data not trained on."""

    weights: dict[str, Tensor]
    loss: float


def held_out_loss(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(mean_square(model(x), y).item() for x, y in map(task, range(1000, 1020))) / 20


# DDP compares a hook's annotations with its own types, and those of this file are strings.


def wrong_sign(_, bucket):  # type: ignore[no-untyped-def]
    return default_hooks.allreduce_hook(None, bucket).then(lambda summed: -summed.value())


def noise(_, bucket):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(len(bucket.buffer()))  # the same on all ranks
    strange = torch.randn(bucket.buffer().shape, generator=generator)
    return default_hooks.allreduce_hook(None, bucket).then(lambda summed: strange * summed.value().norm())


def learn(team: Team, comm: CommConfig, hook: Any = None, steps: int = LONG) -> Outcome:
    training = Training(team, {}, comm, task)
    if hook is not None:
        training.model.register_comm_hook(None, hook)
    training.steps(0, steps)
    return Outcome(training.own_weights(), held_out_loss(unwrapped(training.model)))


def learn_with_and_without(team: Team, root: Path) -> dict[str, Any]:
    exact = CommConfig()
    found: dict[str, Any] = {
        "untrained": learn(team, exact, steps=0),
        "exact": learn(team, exact),
        "wrong sign": learn(team, exact, wrong_sign),
        "noise": learn(team, exact, noise),
        "never averaged": learn(team, CommConfig(local_sgd=10 * LONG)),
    }
    for name, comm in COMM.items():
        found[name] = learn(team, comm)
        found[f"{name}, resumed"] = learn_in_two_parts(team, comm, root / name)
    return found


def learn_in_two_parts(team: Team, comm: CommConfig, root: Path) -> Outcome:
    """With a checkpoint in the middle, between two averages of local SGD, that other objects continue from."""
    first, half = Training(team, {}, comm, task), LONG // 2 + 1
    checkpointer = team.checkpointer(root)
    first.track(TrackedState(first.parallel, checkpointer, RankGroup.of(team.group), None))
    first.steps(0, half)
    assert first.tracking is not None
    shared, held_by, own = first.tracking.trees()
    checkpointer.save(half, shared, own, held_by=held_by).wait()

    second = Training(team, {}, comm, task)
    loaded = checkpointer.load_newest(names=())
    assert loaded is not None
    tracking = TrackedState(second.parallel, checkpointer, RankGroup.of(team.group), loaded)
    second.track(tracking)
    tracking.load_own_state(loaded.local)
    second.steps(half, LONG)
    return Outcome(second.own_weights(), held_out_loss(unwrapped(second.model)))


COMM = {
    "fp16": CommConfig(hook="fp16"),
    "powersgd": CommConfig(hook="powersgd", powersgd_start=2),
    "local sgd": CommConfig(local_sgd=4),
}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The outcomes of each way to communicate, and of three that do not work, on two ranks."""
    return on_ranks(2, learn_with_and_without, tmp_path_factory.mktemp("communication"))


def learns_as_well(found: Outcome, exact: Outcome, untrained: Outcome) -> bool:
    """Whether the loss fell by at least nine tenths of what it falls by with whole gradients in every step."""
    return untrained.loss - found.loss > 0.9 * (untrained.loss - exact.loss)


@pytest.mark.parametrize("name", COMM)
def test_less_communication_learns_as_well_and_resumes_bit_for_bit(learnt: list[dict[str, Any]], name: str) -> None:
    for mine in learnt:
        assert difference(mine[name].weights, mine[f"{name}, resumed"].weights) == 0.0
        assert learns_as_well(mine[name], mine["exact"], mine["untrained"])
        assert difference(mine[name].weights, mine["exact"].weights) > 0.0, "it sends less"
    assert difference(learnt[0][name].weights, learnt[1][name].weights) == 0.0


def test_fp16_gradients_stay_near_the_exact_weights(learnt: list[dict[str, Any]]) -> None:
    assert difference(learnt[0]["fp16"].weights, learnt[0]["exact"].weights) < 2e-3


@pytest.mark.parametrize("broken", ["untrained", "wrong sign", "noise"])
def test_what_does_not_learn_is_told_from_what_does(learnt: list[dict[str, Any]], broken: str) -> None:
    """The control: the checks of the test above refuse what they are there to refuse."""
    assert learnt[0]["exact"].loss < 0.5 * learnt[0]["untrained"].loss, "there is something to learn"
    assert not learns_as_well(learnt[0][broken], learnt[0]["exact"], learnt[0]["untrained"])


def test_replicas_that_are_never_averaged_are_told_from_those_that_are(learnt: list[dict[str, Any]]) -> None:
    first, second = (mine["never averaged"].weights for mine in learnt)
    assert difference(first, second) > 1e-3


def drift(team: Team) -> dict[str, Tensor]:
    training = Training(team, {}, CommConfig(local_sgd=3))
    training.steps(0, STEPS)
    with training.optimizer.averaged():  # type: ignore[attr-defined]
        return training.own_weights()


def test_replicas_that_drifted_have_one_moving_average_after_they_met() -> None:
    first, second = on_ranks(2, drift)
    assert difference(first, second) == 0.0


def normalise(team: Team, case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    config = ParallelConfig(**case)
    parallel = Parallel(factor(config, 2, 2), config, CommConfig(), torch.device("cpu"), team.rank)
    model = parallel.spread(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    generator = torch.Generator().manual_seed(team.rank)
    for _ in range(3):
        model(torch.randn(6, 4, generator=generator)).square().sum().backward()
    tracking = TrackedState(parallel, None, RankGroup.of(team.group), None)  # type: ignore[arg-type]
    tracking.add_module(model)
    tracking.states.name_parameters({})
    tracking.add("model", model)
    (mean,) = (buffer for name, buffer in unwrapped(model).named_buffers() if name == "1.running_mean")
    before = mean.clone()
    saved = tracking.trees()[0]["model"]["1.running_mean"].clone()
    return before, mean.clone(), saved


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_ranks_save_the_first_ones_batch_norm_and_go_on_with_their_own(name: str) -> None:
    (first, after, saved), (second, other_after, other_saved) = on_ranks(2, normalise, STRATEGIES[name])
    assert not torch.equal(first, second), "each has seen samples of its own"
    assert torch.equal(saved, first) and torch.equal(other_saved, first)
    assert torch.equal(after, first) and torch.equal(other_after, second)


# Pieces


def test_uneven_micro_batches_add_up_to_the_big_batch() -> None:
    x, y = data(0)
    whole, parts = net(), net()
    mean_square(whole(x), y).backward()
    loss = backward(parts, x, mean_square, y, global_batch_size=BATCH, micro_batch_size=5)
    assert loss.item() == pytest.approx(mean_square(whole(x), y).item(), rel=1e-6)
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad)


def test_only_the_last_micro_batch_is_synchronised() -> None:
    entered = []

    class Unsynchronised(nullcontext[None]):
        def __enter__(self) -> None:
            entered.append(True)

    x, y = data(0)
    backward(net(), x, mean_square, y, global_batch_size=BATCH, micro_batch_size=5, unsynchronised=Unsynchronised)
    assert len(entered) == 2  # of three


def uneven_shares(team: Team) -> dict[str, Tensor]:
    """Gradients of 11 samples on 3 ranks: shares of 3, 4 and 4."""
    parallel = Parallel(Layout(replicas=3), ParallelConfig(), CommConfig(), torch.device("cpu"), team.rank)
    model = parallel.spread(net())
    x, y = (part[:11][11 * team.rank // 3 : 11 * (team.rank + 1) // 3] for part in data(0))
    parallel.backward(model, x, mean_square, y, global_batch_size=11, micro_batch_size=2, autocast=nullcontext)
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}  # type: ignore[union-attr]


def test_uneven_shares_of_the_ranks_add_up_to_the_big_batch() -> None:
    x, y = (part[:11] for part in data(0))
    model = net()
    mean_square(model(x), y).backward()
    for found in on_ranks(3, uneven_shares):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_long_quiet() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=2)
    assert not scaler.accepts(torch.tensor(float("inf")))
    assert scaler.scale == 4.0
    assert scaler.accepts(torch.tensor(1.0)) and scaler.scale == 4.0
    again = LossScaler()
    again.load_state_dict(scaler.state_dict())
    again.growth_interval = 2
    assert again.accepts(torch.tensor(1.0)) and again.scale == 8.0


@pytest.mark.parametrize(
    ("sizes", "stages", "ends"),
    [([1, 1, 1, 1], 2, [2, 4]), ([9, 1, 1, 1], 2, [1, 4]), ([1, 1, 9], 3, [1, 2, 3]), ([5, 1, 1, 5], 3, [1, 3, 4])],
)
def test_stages_are_cut_so_that_the_largest_is_small(sizes: list[int], stages: int, ends: list[int]) -> None:
    assert cut_stages(sizes, stages) == ends


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nn\.Sequential"):
        stage_of(Block(), 0, 2)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are one parameter"):
        stage_of(tied, 0, 2)


# The layout

FOUR_BY_TWO = Resources(nodes=4, tasks_per_node=2)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, Layout(replicas=8)),
        ({"data": "zero3"}, Layout(shards=8)),
        ({"data": "hsdp"}, Layout(replicas=4, shards=2)),
        ({"data": "hsdp", "shards": 4}, Layout(replicas=2, shards=4)),
        ({"tensor": 2, "pipeline": 2}, Layout(pipeline=2, replicas=2, tensor=2)),
        ({"pipeline": "all", "tensor": 2}, Layout(pipeline=4, tensor=2)),
    ],
)
def test_the_axes_follow_from_the_yaml_and_the_world(parallel: dict[str, Any], expected: Layout) -> None:
    assert check(ParallelConfig(**parallel), CommConfig(), FOUR_BY_TWO) == expected


@pytest.mark.parametrize(
    ("parallel", "comm", "said"),
    [
        ({"pipeline": 3}, {}, "8 rank\\(s\\) do not divide by pipeline = 3"),
        ({"data": "hsdp", "shards": 3}, {}, "do not divide by shards = 3"),
        ({"data": "zero1", "tensor": 2}, {}, "zero1 x tensor"),
        ({"tensor": 4}, {}, "at most resources.tasks_per_node"),
        ({"shards": 2}, {}, "shards is for data: hsdp"),
        ({"microbatches": 2}, {}, "microbatches is for a pipeline"),
        ({"offload": True}, {}, "offload is for zero2, zero3, hsdp, without tensor and pipeline; found ddp"),
        ({"data": "zero1", "offload": True}, {}, "offload .*; found zero1"),
        ({"data": "zero3", "offload": True, "tensor": 2}, {}, "offload .*; found zero3 x tensor"),
        ({"data": "zero3", "offload": True, "pipeline": 2}, {}, "offload .*; found zero3 x pipeline"),
        ({"data": "zero2"}, {"hook": "fp16"}, "zero2 does not use DDP"),
        ({}, {"hook": "bf16"}, "gloo cannot add bfloat16"),
        ({"data": "zero1"}, {"local_sgd": 4}, "only with ddp"),
        ({}, {"local_sgd": 4, "hook": "fp16"}, "nothing for comm.hook to compress"),
        ({"pipeline": 2}, {"hook": "powersgd"}, "a memory that a pipeline's schedule would disturb"),
    ],
)
def test_a_product_that_cannot_work_is_refused(parallel: dict[str, Any], comm: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(ParallelConfig(**parallel), CommConfig(**comm), FOUR_BY_TWO)


def test_a_memory_of_compression_and_a_loss_scale_are_refused_together() -> None:
    powersgd = CommConfig(hook="powersgd")
    assert check(ParallelConfig(), powersgd, FOUR_BY_TWO, "bf16").replicas == 8
    with pytest.raises(ValueError, match="also of a step that overflowed in fp16"):
        check(ParallelConfig(), powersgd, FOUR_BY_TWO, "fp16")


def test_ranks_of_a_pipeline_and_of_a_tensor_group_work_on_one_share() -> None:
    layout = Layout(pipeline=2, replicas=2, tensor=2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [layout.stage(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
