"""What docs/training.md promises of the loop and of state: calls, stops, curves, the best checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.busy_device import BusyDevice
from harness.ranks import make_context, run_ranks
from harness.training import logged
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from jobkit.config.schema import BestConfig, CheckpointConfig, Config
from jobkit.errors import Stopped, UsageError
from jobkit.loop.health import NotFinite
from jobkit.run import records
from jobkit.run.records import Drill
from jobkit.run.rundir import RunDir
from jobkit.verify.compare import read_trace
from jobkit.wire.group import RankGroup
from jobkit.wire.pages import Phase

SAVES = CheckpointConfig(every=4, memory="off", best=BestConfig(metric="error", mode="min"))


class Buffer:
    """A state of each rank alone, as a replay buffer."""

    def __init__(self, rank: int) -> None:
        self.items, self.tensor = [rank], torch.full((9,), float(rank))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def attempt(ranks: RankGroup, folder: Path, number: int, kind: str = "") -> dict[str, Any]:
    """Train 12 steps; rank 1 is told to stop in the evaluation of step 5, or all leave step 6 as by a kill."""
    ctx = make_context(folder, ranks, Config(name="test", task="m:f", checkpoint=SAVES), number)
    model, buffer, generator = ctx.parallelize(nn.Linear(2, 2)), Buffer(ranks.rank), torch.Generator().manual_seed(3)
    ctx.track(model=model, generator=generator, per_rank={"buffer": buffer})
    state = ctx.values(mine=10 * ranks.rank, seen=torch.zeros(1))
    calls: list[tuple[str, int]] = []
    seen: dict[str, Any] = {
        "calls": calls,
        "buffer": [*buffer.items, *buffer.tensor.tolist()],
        "values": (state.mine, state.seen.item()),
    }
    seen["drawn"] = torch.rand(1, generator=generator).item()

    def validate() -> dict[str, float]:
        calls.append(("validate", ctx.step))
        if kind == "stop" and ctx.step == 5 and ranks.rank == 1:
            ctx._rank.page.ask_to_stop()
        return {"error": abs(ctx.step - 5.0), "at": ctx.step}

    try:
        try:
            for step in ctx.steps(12, every={validate: 5, lambda: calls.append(("sample", ctx.step)): 3}):
                if kind == "kill" and step == 6:
                    ctx._checkpointer.wait()
                    ctx._reporter.flush()
                    return seen
                buffer.items.append(step)
                state.seen += 1
                ctx.log({"train/loss": float(step)})
        except Exception:
            seen["swallowed"] = True
    except Stopped:
        seen["stopped"] = ctx.step
        return seen
    seen["result"] = ctx.finish({"mine": 1})
    return seen


WHOLE = [("validate", 0), ("sample", 0), ("sample", 3), ("validate", 5), ("sample", 6), ("sample", 9), ("validate", 10)]
LAST = [("validate", 12), ("sample", 12)]


def points(folder: Path, tag: str) -> list[int]:
    return sorted(step for step, _ in logged(folder, tag))


def test_functions_are_called_at_their_steps_and_once_after_the_last(tmp_path: Path) -> None:
    for seen in run_ranks(attempt, 3, tmp_path, 1):
        assert seen["calls"] == WHOLE + LAST
        assert seen["result"] == {"error": 7.0, "at": 12.0, "mine": 1}
    run = tmp_path / "test-01234567"
    assert str((run / "checkpoints" / "best").readlink()) == "step_00000005"
    assert {path.name for path in (run / "checkpoints").glob("step_*")} >= {"step_00000011", "step_00000012"}
    assert points(run / "tensorboard", "error") == [0, 5, 10, 12]


def test_a_stop_within_a_function_is_the_same_step_on_all_ranks_and_calls_it_again(tmp_path: Path) -> None:
    assert all(seen["stopped"] == 5 and "swallowed" not in seen for seen in run_ranks(attempt, 3, tmp_path, 1, "stop"))
    for seen in run_ranks(attempt, 3, tmp_path, 2):
        assert seen["calls"] == WHOLE[3:] + LAST


@pytest.mark.parametrize("world_size", [3, 2])
def test_a_kill_leaves_each_rank_its_state_and_each_step_one_point(tmp_path: Path, world_size: int) -> None:
    first = run_ranks(attempt, 3, tmp_path, 1, "kill")
    for rank, seen in enumerate(run_ranks(attempt, world_size, tmp_path, 2)):
        owner = rank if world_size == 3 else 0
        assert (seen["buffer"], seen["values"]) == (
            [owner, 0, 1, 2, 3, 4] + 9 * [float(owner)],
            (10 * owner, 5.0),
        )  # of the best one
        assert seen["drawn"] != first[0]["drawn"]  # the generator goes on
    assert points(tmp_path / "test-01234567" / "tensorboard", "train/loss") == list(range(12))


def alone(folder: Path, every: int | str, number: int = 1) -> Any:
    config = Config(name="test", task="m:f", checkpoint=CheckpointConfig(every=every, memory="off"))
    return make_context(folder, RankGroup.alone(), config, number)


def test_a_function_between_steps_is_no_step_and_quick_steps_have_a_checkpoint_before_the_last(tmp_path: Path) -> None:
    ctx, phases = alone(tmp_path, 1000), []
    ctx.track(model=nn.Linear(1, 1))
    for _ in ctx.steps(300, every={lambda: phases.append(ctx._rank.page.read().phase): 100}):
        pass
    ctx.finish()
    assert phases == [*[Phase.OUTSIDE] * 3, Phase.ENDING]
    assert ctx._rank.run.durable_steps() == [299, 300]


def test_the_time_to_a_checkpoint_counts_from_the_last_one(tmp_path: Path) -> None:
    ctx = alone(tmp_path, "10min")
    ctx.track(model=nn.Linear(1, 1))
    checkpoints = ctx._checkpoints
    for _ in ctx.steps(1):
        checkpoints._disk.since -= 700
        assert checkpoints._disk.is_due_now()
        checkpoints.write(checkpoints.copy_to_host(ctx._loop.boundary), wait=True)
        assert not checkpoints._disk.is_due_now()
    ctx.close()


def test_a_stop_in_a_function_at_the_first_boundary_leaves_a_checkpoint(tmp_path: Path) -> None:
    ctx = alone(tmp_path, 1000)
    ctx.track(model=nn.Linear(1, 1))
    with pytest.raises(Stopped):
        for _ in ctx.steps(3, every={lambda: ctx._rank.page.ask_to_stop(): 2}):
            raise AssertionError("a step")
    assert ctx._rank.run.durable_steps() == [0]


def test_a_loss_that_is_no_number_names_the_samples_of_its_batch(tmp_path: Path) -> None:
    ctx = alone(tmp_path, 100)
    with pytest.raises(NotFinite) as caught:
        for _ in ctx.epochs(1, model=nn.Linear(1, 1)):
            for number, _ in enumerate(ctx.batches(DataLoader(range(40), batch_size=2))):  # type: ignore[arg-type]
                ctx.log({"loss": float("nan") if number == 3 else 1.0})
    ctx.close()
    assert caught.value.samples == [6, 7]


@pytest.mark.parametrize("own", [True, False])
def test_a_loss_that_the_device_has_not_computed_yet_is_waited_for_before_a_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Its samples are those of its step, four steps before the save."""
    device, ctx = BusyDevice(monkeypatch), alone(tmp_path, 6)
    monkeypatch.setattr("jobkit.loop.agreement.AGREEMENT_SECONDS", 0.0)  # each step has an agreement
    waits = []

    def step(number: int) -> None:
        waits.append(device.waits)
        ctx.log({"loss": device.tensor(math.nan if number == 2 else 1.0)})

    with pytest.raises(NotFinite) as caught:
        if own:
            for _ in ctx.epochs(1, model=nn.Linear(1, 1)):
                for number, _ in enumerate(ctx.batches(DataLoader(range(40), batch_size=2))):  # type: ignore[arg-type]
                    step(number)
        else:
            loader = ctx.loader(torch.arange(40), global_batch_size=2, shuffle=False)
            ctx.track(model=nn.Linear(1, 1), loader=loader)
            for number in ctx.steps(20):
                next(loader)
                step(number)
    ctx.close()
    assert waits == [0] * 6 and device.waits > 0
    assert (caught.value.step, caught.value.samples) == (2, [4, 5])
    assert ctx._rank.run.durable_steps() == []


def test_texts_with_which_an_epoch_began_come_back(tmp_path: Path) -> None:
    def words(number: int, stop: int | None) -> list[str]:
        ctx = alone(tmp_path, 1, number)
        state, seen = ctx.values(word="a"), []
        try:
            for _ in ctx.epochs(2, model=nn.Linear(1, 1)):
                seen.append(state.word)
                state.word += "b"
                for _ in ctx.batches(DataLoader(range(4), batch_size=1)):  # type: ignore[arg-type]
                    if ctx.step == stop:
                        ctx._rank.page.ask_to_stop()
        except Stopped:
            pass
        ctx._tracked.close()
        return seen

    assert words(1, stop=1) == ["a"]
    assert words(2, stop=None) == ["a", "ab"]


def drift(ranks: RankGroup, folder: Path) -> None:
    ctx = make_context(folder, ranks, Config(name="test", task="m:f", checkpoint=CheckpointConfig(every=1)))
    model = nn.Linear(1, 1)
    ctx.track(model=model)
    with pytest.raises(UsageError, match="differs between rank"):
        for _ in ctx.steps(6, every={lambda: None: 5}):
            with torch.no_grad():
                model.weight += ranks.rank
    ctx._tracked.close()


def test_a_model_that_drifts_apart_after_a_function_at_step_0_is_refused(tmp_path: Path) -> None:
    run_ranks(drift, 2, tmp_path)


def traced(ranks: RankGroup, folder: Path) -> None:
    run = RunDir(folder / "test-01234567")
    if ranks.is_main:
        run.path.mkdir()
        records.write(run.drill_file, Drill(steps=4, shorten=2))
    ranks.barrier()
    ctx = make_context(folder, ranks, Config(name="test", task="m:f"))
    loader = ctx.loader(torch.arange(12), global_batch_size=3, shuffle=False)
    ctx.track(model=nn.Linear(1, 1), loader=loader)
    for _ in ctx.steps(100, every={lambda: {"error": float(ctx.step)}: 50}):
        next(loader)
    ctx.finish()


def test_a_trace_of_verify_has_each_ranks_samples_and_the_values_of_functions(tmp_path: Path) -> None:
    run_ranks(traced, 3, tmp_path)
    for rank, places in read_trace(RunDir(tmp_path / "test-01234567")).items():
        boundaries = [place for place in places if place.event == "boundary"]
        assert [place.samples for place in boundaries] == [[3 * step + rank] for step in range(4)]
        values = {place.step: place.values.get("error") for place in places if place.event == "evaluated"}
        assert list(values) == [0, 2, 4] and None not in values.values() and len(set(values.values())) == 3


def on_one_rank(
    ranks: RankGroup, folder: Path, rank: int, kind: str, number: int = 1, weights: Path | None = None
) -> str:
    """Track something on one rank alone; returns the words with which a rank refuses it."""
    ctx = make_context(folder, ranks, Config(name="test", task="m:f", checkpoint=SAVES), number)
    if weights is not None:
        ctx._checkpointer.take_weights(weights)
    try:
        ctx.track(model=nn.Linear(1, 1))
        if ranks.rank == rank and kind == "values":
            ctx.values(best=0.0)
        elif ranks.rank == rank:
            ctx.track(**{"ema": {"ema": nn.Linear(1, 1)}, "buffer": {"per_rank": {"buffer": Buffer(rank)}}}[kind])
        for _ in ctx.steps(6):
            raise AssertionError("a step")
    except UsageError as error:
        return str(error)
    finally:
        ctx._tracked.close()
    return ""


@pytest.mark.parametrize(
    ("rank", "kind", "expected"),
    [
        (0, "ema", "rank 0 tracks ema, rank 1 does not: call ctx.track on every rank; what rank 0 alone needs is "),
        (2, "buffer", "rank 2 tracks buffer, rank 0 does not: call ctx.track on every rank; what rank 2 alone needs "),
        (1, "values", "rank 1 calls ctx.values, rank 0 does not: call it on every rank"),
    ],
    ids=["ema", "buffer", "values"],
)
def test_what_some_ranks_alone_track_is_refused_before_the_first_step(
    tmp_path: Path, rank: int, kind: str, expected: str
) -> None:
    refusals = run_ranks(on_one_rank, 3, tmp_path, rank, kind)
    assert [words[: len(expected)] for words in refusals] == [expected] * 3


def average_of_rank_0(ranks: RankGroup, folder: Path, number: int, everywhere: bool) -> float | None:
    """Train 3 steps more with an average; returns where the average begins on a rank that has it."""
    ctx = make_context(folder, ranks, Config(name="test", task="m:f", checkpoint=CheckpointConfig(every=1)), number)
    ema = nn.Linear(1, 1)
    if everywhere:
        ctx.track(model=nn.Linear(1, 1), ema=ema)
    else:  # as the refusal says
        ctx.track(model=nn.Linear(1, 1))
        ctx.track(per_rank={"ema": ema if ctx.rank == 0 else nn.Identity()})
    if number == 1:
        nn.init.constant_(ema.weight, 0)
    began = ema.weight.item()
    for step in ctx.steps(20):
        if step == 3 * number:
            break
        with torch.no_grad():
            ema.weight += 1
    ctx.close()
    return began if everywhere or ctx.is_main else None


@pytest.mark.parametrize("world_size", [3, 2])
def test_what_rank_0_alone_needs_goes_on_with_it(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(average_of_rank_0, 3, tmp_path, 1, False) == [0, None, None]
    assert run_ranks(average_of_rank_0, world_size, tmp_path, 2, False) == [3, *[None] * (world_size - 1)]


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_some_ranks_alone_track_is_refused_before_it_is_read(tmp_path: Path, weights_only: bool) -> None:
    run_ranks(average_of_rank_0, 3, tmp_path, 1, True)
    folder = RunDir(tmp_path / "test-01234567").checkpoint(2)
    where = (tmp_path / "fork", 0, "ema", 1, folder) if weights_only else (tmp_path, 0, "ema", 2)
    refusals = run_ranks(on_one_rank, 3, *where)
    assert ["rank 0 tracks ema, rank 1 does not" in words for words in refusals] == [True] * 3, refusals


def test_a_value_that_a_restore_would_replace_is_refused_at_first_and_said_later(tmp_path: Path) -> None:
    ctx = alone(tmp_path, 1)
    with pytest.raises(UsageError, match="rng is a Generator"):
        ctx.values(rng=np.random.default_rng(0))
    ctx = alone(tmp_path, 1)
    ctx.track(model=nn.Linear(1, 1))
    ctx.values(rng=None)
    for _ in ctx.steps(3):
        pass
    ctx.close()
    ctx = alone(tmp_path, 1, 2)
    ctx.values(rng=np.random.default_rng(0))  # its run began before that was refused
    assert any("rng is a Generator" in text for text in ctx._reporter._warnings)


def test_a_value_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Meter:
        def state_dict(self) -> dict[str, Any]:
            return {"lines": (line for line in "ab")}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    ctx = alone(tmp_path, 1000)
    ctx.track(model=nn.Linear(1, 1), meter=Meter())
    with pytest.raises(UsageError, match="meter: lines: a generator cannot be saved"):
        for _ in ctx.steps(400):
            raise AssertionError("a step")
    ctx._tracked.close()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(1, 1, dtype=torch.complex128), r"model/weight: a tensor of torch\.complex128 cannot be saved"),
        (nn.Embedding.from_pretrained(torch.eye(2).to_sparse()), r"model/weight: a tensor of torch\.sparse_coo"),
    ],
    ids=["complex128", "sparse"],
)
def test_a_tensor_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    tmp_path: Path, model: nn.Module, words: str
) -> None:
    ctx = alone(tmp_path, 1000)
    ctx.track(model=model)
    with pytest.raises(UsageError, match=words):
        for _ in ctx.steps(400):
            raise AssertionError("a step")
    ctx._tracked.close()


class Wrapper:
    """An optimizer around another, as accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class Sharpness(torch.optim.Optimizer):
    """An optimizer that another steps within, as SAM: they share their groups, and not their state."""

    def __init__(self, parameters: Any, momentum: float) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.optimizer = torch.optim.SGD(self.param_groups, momentum=momentum)
        self.param_groups = self.optimizer.param_groups


OPTIMIZERS: dict[str, Any] = {
    "plain": lambda parameters: Wrapper(torch.optim.SGD(parameters, lr=0.1)),
    "state": lambda parameters: Wrapper(torch.optim.Adam(parameters)),
    "sam": lambda parameters: Sharpness(parameters, 0.0),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_is_tracked_by_its_wrapper(tmp_path: Path, kind: str) -> None:
    ctx, model = alone(tmp_path, 1000), nn.Linear(1, 1)
    wrapper = OPTIMIZERS[kind](model.parameters())
    ctx.track(model=model, optimizer=wrapper)
    for _ in ctx.steps(3):
        model(torch.ones(1)).backward()
        wrapper.optimizer.step()
    ctx.finish()


@pytest.mark.parametrize("is_tracked", [True, False])
def test_an_optimizer_with_state_of_its_own_is_not_tracked_by_its_wrapper(tmp_path: Path, is_tracked: bool) -> None:
    ctx, model = alone(tmp_path, 1000), nn.Linear(1, 1)
    wrapper = Sharpness(model.parameters(), 0.9)
    ctx.track(model=model, optimizer=wrapper, **({"inner": wrapper.optimizer} if is_tracked else {}))

    def train() -> None:
        for _ in ctx.steps(3):
            model(torch.ones(1)).backward()
            wrapper.optimizer.step()

    if is_tracked:
        train()
        ctx.finish()
    else:
        with pytest.raises(UsageError, match=r"an optimizer \(SGD\) changes the tracked model and is not tracked"):
            train()
        ctx._tracked.close()


ONES = {
    "array": np.array([0.5]),
    "matrix": np.array([[0.5]], np.float32),
    "plain": np.array(0.5),
    "scalar": np.float32(0.5),
    "tensor": torch.tensor([[0.5]]),
}


def test_one_number_is_logged_in_whatever_holds_it(tmp_path: Path) -> None:
    ctx = alone(tmp_path, 1000)
    ctx.track(model=nn.Linear(1, 1))
    for _ in ctx.steps(1, every={lambda: {f"every/{name}": value for name, value in ONES.items()}: 1}):
        ctx.log(ONES)
        for several in ([0.5], np.array([0.5, 0.5]), np.array([]), torch.zeros(2)):
            with pytest.raises(UsageError, match="wrong at step 0 is not one number"):
                ctx.log({"wrong": several})
    ctx.finish()
    for tag in [*ONES, *(f"every/{name}" for name in ONES)]:
        values = {value.tensor.float_val[0] for _, value in logged(tmp_path / "test-01234567" / "tensorboard", tag)}
        assert values == {0.5}, tag


def test_a_loss_in_an_array_that_is_no_number_is_found(tmp_path: Path) -> None:
    ctx = alone(tmp_path, 1000)
    ctx.track(model=nn.Linear(1, 1))
    with pytest.raises(NotFinite):
        for _ in ctx.steps(3):
            ctx.log({"loss": np.array([math.nan])})
    ctx._tracked.close()


def test_a_value_that_is_none_is_left_out_of_the_curves(tmp_path: Path) -> None:
    ctx = alone(tmp_path, 1000)
    ctx.track(model=nn.Linear(1, 1))
    for step in ctx.steps(3):
        ctx.log({"a": None if step == 1 else 1.0})
    ctx.finish()
    assert points(tmp_path / "test-01234567" / "tensorboard", "a") == [0, 2]


def uneven(ranks: RankGroup, folder: Path, by_hand: bool) -> bool:
    """Train 2 steps of a global batch of 10; returns whether the gradients by hand were refused."""
    ctx = make_context(folder, ranks, Config(name="test", task="m:f", checkpoint=CheckpointConfig(every=100)))
    model = ctx.parallelize(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = ctx.loader(TensorDataset(torch.ones(30, 1), torch.ones(30, 1)), global_batch_size=10)
    ctx.track(model=model, optimizer=optimizer, loader=loader)
    try:
        for _ in ctx.steps(2):
            x, y = next(loader)
            if by_hand:
                nn.functional.mse_loss(model(x), y).backward()
            else:
                ctx.backward(model, (x, y), nn.functional.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        assert "global batch of 10" in str(error)
        return True
    finally:
        ctx._tracked.close()
    return False


@pytest.mark.parametrize("by_hand", [True, False])
def test_uneven_parts_of_a_global_batch_are_weighted_by_ctx_backward_or_refused(tmp_path: Path, by_hand: bool) -> None:
    assert run_ranks(uneven, 3, tmp_path, by_hand) == [by_hand] * 3
    if by_hand:  # two ranks have equal parts
        assert run_ranks(uneven, 2, tmp_path / "even", by_hand) == [False] * 2


def where(ranks: RankGroup, folder: Path, number: int, stop: int | None) -> list[tuple[str, str]]:
    """Return the phases that the watchdog sees in the lines of a script: in steps, and in all that is none."""
    ctx = make_context(folder, ranks, attempt=number)
    seen: list[tuple[str, str]] = []

    def note(line: str, value: Any = None) -> Any:
        seen.append((line, ctx._rank.page.read().phase.name))
        return value

    model = nn.Linear(1, 1)
    try:
        for _ in ctx.epochs(2, model=model):
            note("top")
            for batch in ctx.batches(DataLoader(range(4), batch_size=2)):  # type: ignore[arg-type]
                note("step")
                if ctx.step == 0:
                    ctx.evaluate(lambda batch, ids: note("evaluate", batch.double()), range(2))
                    with ctx.evaluating(model):
                        note("evaluating")
                    note("step")
                if ctx.step == stop:
                    ctx._rank.page.ask_to_stop()
            note("validation")
            for batch in ctx.batches(DataLoader(range(9))):  # type: ignore[arg-type]
                note("step")
                if batch:
                    break  # a pass that is left
            note("validation")
    except Stopped:
        return seen
    note("end")
    ctx.finish()
    note("end")
    return seen


def test_lines_outside_of_steps_are_no_step_that_hangs(tmp_path: Path) -> None:
    first, second = (run_ranks(where, 1, tmp_path, number, stop)[0] for number, stop in ((1, 1), (2, None)))
    first_epoch, rest = first[: first.index(("validation", "OUTSIDE"))], first[first.index(("validation", "OUTSIDE")) :]
    assert [line for line, _ in first_epoch] == ["top", "step", "evaluate", "evaluate", "evaluating", "step", "step"]
    phases = {"step": "STEPPING", "end": "ENDING"}
    for line, phase in [*first_epoch, *rest, *second]:
        assert phase == phases.get(line, "OUTSIDE"), (line, phase)
    assert [line for line, _ in second[-3:]] == ["validation", "end", "end"]


def test_a_step_of_a_pass_of_one_batch_is_measured(tmp_path: Path) -> None:
    def slowest(ranks: RankGroup, folder: Path) -> list[float]:
        ctx, seen = make_context(folder, ranks), []
        for _ in ctx.epochs(3, model=nn.Linear(1, 1)):
            seen.append(ctx._rank.page.read().slowest)
            for _ in ctx.batches(DataLoader(range(2), batch_size=2)):  # type: ignore[arg-type]
                pass
        return seen

    first, *others = run_ranks(slowest, 1, tmp_path)[0]
    assert first == 0 and all(others)
