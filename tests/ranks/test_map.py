"""ctx.map, and evaluations that load ahead: the same outputs on any number of ranks and workers, kept at a stop."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness.attempts import STOPPED, attempt, attempt_of_rank
from harness.project import events
from harness.ranks import Team, on_ranks
from harness.slots import Slots, new_slots
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset, default_collate

from jobkit.checkpoint import writer
from jobkit.checkpoint.storage import write_items
from jobkit.errors import JobkitError
from jobkit.train import outputs
from jobkit.train.batches import NOT_YET, DynamicBatches
from jobkit.train.evaluate import evaluate


class Augmented(Dataset[Any]):
    """Sample `i` is [i, and a random number of each of the three generators that augmentations draw from]."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


def mixed(samples: list[Tensor]) -> Tensor:
    """A collate function that draws, as mixup does."""
    batch: Tensor = default_collate(samples)
    return batch + torch.rand(()) + random.random()


def noise(batch: Tensor, ids: Tensor) -> Tensor:
    return batch.sum(1) + torch.rand(len(ids))


class Named(NamedTuple):
    clip: Tensor
    texts: list[str]


def everything(batch: Tensor, ids: Tensor) -> dict[str, Any]:
    """Outputs of all kinds, of which the random numbers have a part."""
    value = batch + torch.rand(batch.shape)
    return {
        "named": Named(value.to(torch.bfloat16)[:, None], [f"{one:.9f}" for one in value[:, 0].tolist()]),
        "ragged": [{"row": row[: int(number) % 3], "id": int(number)} for row, number in zip(value, ids, strict=True)],
        "pair": (ids, batch[:, :0]),
        "even": ids % 2 == 0,
    }


def bits(value: Any) -> Any:
    """Nested outputs as something that == compares to the last bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value


def in_all_ways(ctx: Any) -> list[Any]:
    data, state = Augmented(), torch.get_rng_state()
    found = [
        bits(ctx.map(everything, data, batch_size=4)),
        bits(ctx.map(everything, data, batch_size=4, to="main")),
        ctx.evaluate(noise, data, batch_size=4, collate_fn=mixed),
        ctx.evaluate(noise, data, batch_size=4, collate_fn=mixed, num_workers=1, prefetch_factor=3),
        bits(ctx.map(lambda batch, ids: batch * 2, 3, batch_size=2)),
        ctx.map(lambda texts, ids: [text.upper() for text in texts], ["a", "b", "c", "d"]),
        ctx.map(lambda batch, ids: None, range(3)),
        ctx.map(lambda batch, ids: {"score": None, "id": ids.tolist()}, range(2)),
    ]
    outputs.PIECE_BYTES, outputs.INLINE_BYTES = 100, 0  # as large outputs are sent
    found += [bits(ctx.map(everything, data, batch_size=4)), bits(ctx.map(everything, data, batch_size=4, to="main"))]
    assert torch.equal(torch.get_rng_state(), state)
    assert multiprocessing.active_children() == []
    return found


def test_outputs_are_bit_identical_for_any_number_of_ranks_and_workers(tmp_path: Path) -> None:
    (alone,) = attempt(1, tmp_path / "1", in_all_ways)
    assert alone[0] == alone[1] == alone[8] == alone[9]
    assert alone[0]["named"][0][:2] == ("torch.bfloat16", (23, 1, 4))
    assert [one["id"] for one in alone[0]["ragged"]] == list(range(23))
    assert alone[2] == alone[3] == evaluate(noise, Augmented(), batch_size=4, collate_fn=mixed, num_workers=2)
    assert alone[4:7] == [bits(torch.tensor([0, 2, 4])), ["A", "B", "C", "D"], [None] * 3]
    assert alone[7] == {"score": [None] * 2, "id": [0, 1]}
    on_others = [None if number in (1, 9) else value for number, value in enumerate(alone)]  # to="main"
    for ranks in (2, 3, 5):
        assert attempt(ranks, tmp_path / str(ranks), in_all_ways) == [alone] + [on_others] * (ranks - 1)


# What stops it, and what is refused


def interrupted(ctx: Any, folder: Path) -> Any:
    """Two maps in step 1, the second of which is told to stop once, with workers that have loaded more by then."""
    os.environ["JOBKIT_CODE"] = "/code/one"  # what is kept belongs to a snapshot of the code

    def count(name: str, ids: Tensor) -> None:
        with (folder / f"{name}_{ctx.rank}").open("a") as file:
            file.write("".join(f"{one}\n" for one in ids.tolist()))

    def first(batch: Tensor, ids: Tensor) -> Tensor:
        count("first", ids)
        return batch[:, :2] + torch.rand(len(ids), 1)

    def second(batch: Tensor, ids: Tensor) -> dict[str, Any]:
        count("second", ids)
        if ctx.attempt == 1 and len((folder / f"second_{ctx.rank}").read_text().split()) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return everything(batch, ids)

    result: list[Any] = []
    for step in ctx.steps(3):
        if step == 1:
            result = [bits(ctx.map(first, Augmented(), batch_size=5, to="main"))]
            result += [bits(ctx.map(second, Augmented(), batch_size=2, num_workers=1, prefetch_factor=4))]
            assert multiprocessing.active_children() == []
    return result


def computed(folder: Path, name: str) -> Counter[int]:
    return Counter(int(line) for file in folder.glob(f"{name}_*") for line in file.read_text().split())


def test_a_map_that_was_stopped_goes_on_where_it_was_and_repeats_nothing(tmp_path: Path) -> None:
    (whole,) = attempt(1, tmp_path / "whole", interrupted, tmp_path)
    assert whole == STOPPED
    (whole,) = attempt(1, tmp_path / "whole", interrupted, tmp_path)
    assert computed(tmp_path, "second") == computed(tmp_path, "first") == dict.fromkeys(range(23), 1)

    folder = tmp_path / "two"
    folder.mkdir()
    assert attempt(2, folder / "runs", interrupted, folder) == [STOPPED, STOPPED]
    assert 4 <= computed(folder, "second").total() <= 12
    assert attempt(2, folder / "runs", interrupted, folder) == [whole, [None, whole[1]]]
    assert computed(folder, "second") == computed(folder, "first") == dict.fromkeys(range(23), 1)


TRAINED: list[nn.Module] = []
"""What `after_the_last_step` trains; the functions do not hold it, so that they are the same whatever its weights."""


def after_the_last_step(ctx: Any, folder: Path, last: float) -> Any:
    """Two maps after the loop, the second of which is told to stop once; `last` is the last step's gradient."""
    os.environ["JOBKIT_CODE"] = "/code/one"
    model = nn.Linear(2, 1)
    TRAINED[:] = [model]
    ctx.track(model=model)

    def count(name: str, ids: Tensor) -> None:
        with (folder / f"{name}_{ctx.rank}").open("a") as file:
            file.write("".join(f"{one}\n" for one in ids.tolist()))

    def first(batch: Tensor, ids: Tensor) -> Any:
        count("first", ids)
        return TRAINED[0](batch[:, :2])

    def second(batch: Tensor, ids: Tensor) -> dict[str, Any]:
        count("second", ids)
        if ctx.attempt == 1 and len((folder / f"second_{ctx.rank}").read_text().split()) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return {**everything(batch, ids), "of": TRAINED[0](batch[:, :2])}

    seen = -1
    for step in ctx.steps(4):
        if step == 3:
            ctx.map(first, Augmented(), batch_size=23)  # in the step that is repeated
            count("last", torch.tensor([0]))
        with torch.no_grad():
            model.weight += last if step == 3 else 1.0
        seen = step
    found = [bits(ctx.map(first, Augmented(), batch_size=5)), bits(ctx.map(second, Augmented(), batch_size=2))]
    return [*found, seen]


def test_a_map_after_the_last_step_goes_on_when_that_step_was_repeated(tmp_path: Path) -> None:
    for ranks in (1, 2):
        whole, folder = tmp_path / f"whole {ranks}", tmp_path / f"stopped {ranks}"
        for one in (whole, folder):
            one.mkdir()
        (whole / "second_0").write_text("0\n" * 5)  # it is not told to stop
        (whole / "second_1").write_text("0\n" * 5)
        expected = attempt(ranks, whole / "runs", after_the_last_step, whole, 1.0)
        assert attempt(ranks, folder / "runs", after_the_last_step, folder, 1.0) == [STOPPED] * ranks
        assert 4 <= computed(folder, "second").total() <= 12
        assert attempt(ranks, folder / "runs", after_the_last_step, folder, 1.0) == expected
        assert computed(folder, "second") == dict.fromkeys(range(23), 1)
        assert computed(folder, "first") == dict.fromkeys(range(23), 3), "twice in the repeated step"
        assert computed(folder, "last") == {0: 2 * ranks}


def test_a_map_after_the_last_step_begins_again_where_the_repeated_step_led_elsewhere(tmp_path: Path) -> None:
    assert attempt(1, tmp_path / "runs", after_the_last_step, tmp_path, 1.0) == [STOPPED]
    ((*_, seen),) = attempt(1, tmp_path / "runs", after_the_last_step, tmp_path, 2.0)
    assert seen == 3
    assert computed(tmp_path, "second") == Counter([*range(23), *range(4)])


def with_a_table(ctx: Any, last: float) -> list[float]:
    """A map after the loop, of a table of which the last step changes one row in the midst."""
    os.environ["JOBKIT_CODE"] = "/code/one"
    table = nn.Embedding.from_pretrained(torch.zeros(1000, 8), freeze=False)
    TRAINED[:] = [table]
    ctx.track(table=table)

    def row(batch: Tensor, ids: Tensor) -> Tensor:
        if ctx.attempt == 1 and ids[0] == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return TRAINED[0](torch.full_like(ids, 100))[:, 0]

    for step in ctx.steps(4):
        with torch.no_grad():
            table.weight[100] += last if step == 3 else 1
    return ctx.map(row, 20, batch_size=2).tolist()  # type: ignore[no-any-return]


def test_weights_that_differ_in_one_row_of_many_are_other_weights(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, with_a_table, 1.0) == [STOPPED]
    assert attempt(1, tmp_path, with_a_table, 2.0) == [[5.0] * 20]


def with_a_death_before(ctx: Any) -> list[int]:
    """A map after the loop: the first attempt fails in it, the second is told to stop."""
    os.environ["JOBKIT_CODE"] = "/code/one"
    model = nn.Linear(2, 1)
    ctx.track(model=model)
    for _ in ctx.steps(4):
        with torch.no_grad():
            model.weight += 1

    def some(batch: Tensor, ids: Tensor) -> Tensor:
        if ctx.attempt == 1:
            ctx.ending.wait_for_checkpoint()
            raise JobkitError("a node has died")
        if ctx.attempt == 2 and ids[0] == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return ids

    return ctx.map(some, 20, batch_size=2).tolist()  # type: ignore[no-any-return]


def with_slots(team: Team, slots: Slots, runs: Path) -> Any:
    os.environ.update(slots.environment(team.rank))
    return attempt_of_rank(team, runs, with_a_death_before, (), "")


def test_a_map_after_the_last_step_stops_also_where_the_attempt_began_from_memory(tmp_path: Path) -> None:
    with new_slots(1) as slots:
        assert on_ranks(1, with_slots, slots, tmp_path) == ["JobkitError: a node has died"]
        assert on_ranks(1, with_slots, slots, tmp_path) == [STOPPED]
        assert on_ranks(1, with_slots, slots, tmp_path) == [list(range(20))]
    (run,) = tmp_path.glob("run-*")
    (second, _) = [event for event in events(run) if event["event"] == "resumed"][1:]
    assert second["memory"] and second["durable_step"] == second["step"] == 3


def with_a_full_disk(ctx: Any) -> list[int]:
    """A map after the loop that is told to stop, where the checkpoint before the last step could not be written."""
    model = nn.Linear(2, 1)
    ctx.track(model=model)
    for step in ctx.steps(4):
        if step == 2:
            writer.write_items = refuse  # type: ignore[assignment]
    ctx.ending.wait_for_checkpoint()
    writer.write_items = write_items

    def some(batch: Tensor, ids: Tensor) -> Tensor:
        if ids[0] == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return ids

    return ctx.map(some, 20, batch_size=2).tolist()  # type: ignore[no-any-return]


def refuse(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_map_after_the_last_step_goes_on_where_no_checkpoint_would_lead_there_again(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, with_a_full_disk) == [list(range(20))]


class Broken(Augmented):
    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise OSError("sample 7 cannot be read")
        return super().__getitem__(index)


def refused(ctx: Any) -> list[str]:
    """What this rank is told of what fails on one rank alone, and of wrong arguments, in this order."""

    def fails(batch: Tensor, ids: Tensor) -> Tensor:
        if 7 in ids:
            raise ValueError(f"no output of {ids.tolist()}")
        return ids

    told = []
    for call in (
        lambda: ctx.map(fails, 23),
        lambda: ctx.evaluate(noise, Broken(), batch_size=1, num_workers=1),
        lambda: ctx.map(lambda batch, ids: ["a", "b"] if 7 in ids else ["a"], 23),
        lambda: ctx.map(lambda batch, ids: [lambda: None] if 7 in ids else ["a"], 23),
        lambda: ctx.map(lambda batch, ids: torch.zeros(1, int(ids) + 1), 5),
        lambda: ctx.map(fails, 0),
        lambda: ctx.map(fails, iter([])),
        lambda: ctx.map(fails, 23, to="rank 0"),
    ):
        with pytest.raises(Exception) as raised:
            call()
        assert multiprocessing.active_children() == []
        told.append(f"{type(raised.value).__name__}: {raised.value}")
    assert ctx.map(lambda batch, ids: ids, 4).tolist() == [0, 1, 2, 3]  # and the ranks are in step still
    return told


def test_what_one_rank_cannot_do_is_raised_on_all_of_them(tmp_path: Path) -> None:
    expected = [
        "ValueError: no output of [7]",
        "OSError: sample 7 cannot be read",
        "ValueError: function returned a list of 2, expected a tensor [1, ...] or a list of 1",
        "ValueError: function returned what cannot be sent from rank to rank: Can't pickle local object",
        "for another batch",
    ]
    for message, *told in zip(expected, *attempt(2, tmp_path, refused), strict=False):
        assert all(message in one for one in told), told
    wrong = [
        "ValueError: the dataset is empty",
        "UsageError: ctx.map: found a list_iterator as items, expected a dataset or a sequence",
        "UsageError: ctx.map(to=...): found 'rank 0', allowed: 'all', 'main'",
    ]
    (alone,) = attempt(1, tmp_path / "alone", refused)
    assert [message in one for message, one in zip([*expected, *wrong], alone, strict=True)] == [True] * 8, alone


# Models


def own_models(ctx: Any) -> list[Any]:
    """Means through DDP models of the user's own, with statistics that differ from rank to rank, of one batch."""
    data = TensorDataset(torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    nets = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    wrapped = [DistributedDataParallel(net) for net in nets]
    ctx.track(wrapped=wrapped[0], inside=nets[1])
    found: list[Any] = []
    for _ in ctx.steps(2):
        for net, model in zip(nets, wrapped, strict=True):
            model.train()
            model(torch.randn(8, 4) + ctx.rank).sum().backward()
            model.eval()
            statistics = net[1].running_mean.tolist()
            try:
                found.append(ctx.evaluate(lambda batch, ids, model=model: model(batch[0]).sum(1), data, batch_size=2))
            except Exception as error:
                found.append(str(error).split(": ", 1)[-1])
            if net is nets[2]:
                assert net[1].running_mean.tolist() == statistics
    return found


def test_ranks_evaluate_a_users_own_ddp_models_each_for_itself_with_the_same_batch_norm(tmp_path: Path) -> None:
    one, other = attempt(2, tmp_path, own_models)
    means = [value for value in one if isinstance(value, float)]
    assert len(means) == 4 and [value for value in other if isinstance(value, float)] == means
    assert all("ctx.track(model=...) it first" in both[number] for both in (one, other) for number in (2, 5))


def differentiating_early(ctx: Any) -> list[float]:
    """Between DDP's first backward pass and its second forward, which exchanges how gradients lie in buckets."""
    model = ctx.parallelize(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    data = TensorDataset(torch.ones(2, 4))

    def slope(batch: Any, ids: Tensor) -> Tensor:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (found,) = torch.autograd.grad(model(x).square().sum(), x)
        return found.sum(1)

    for step in ctx.steps(3):
        if step == 1:
            ctx.evaluate(slope, data, batch_size=2)  # one batch, on two ranks
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(one.sum()) for one in model.parameters()]


def test_a_function_may_differentiate_before_ddp_has_settled(tmp_path: Path) -> None:
    one, other = attempt(2, tmp_path, differentiating_early)
    assert one == other


# The hand-out


def turns(batches: int, pace: list[int], ahead: int) -> int:
    """After how many turns all is computed, where a rank needs so many for a batch and loads so many ahead."""
    store, turn = HashStore(), 0
    hand_outs = [DynamicBatches(range(batches), store, "counter", ranks=len(pace)) for _ in pace]
    held, computed = [0] * len(pace), 0
    while computed < batches:
        for rank, hand_out in enumerate(hand_outs):
            if turn % pace[rank] == 0 and held[rank]:
                held[rank] -= 1
                computed += 1
            while held[rank] <= ahead and hand_out.take(held[rank]) not in (None, NOT_YET):
                held[rank] += 1
        turn += 1
    return turn


@pytest.mark.parametrize("batches", [12, 40, 120])
@pytest.mark.parametrize("pace", [[1, 1, 1, 3], [4, 1]])
def test_nobody_waits_at_the_end_for_what_a_slow_rank_has_loaded_ahead(batches: int, pace: list[int]) -> None:
    assert turns(batches, pace, ahead=8) <= turns(batches, pace, ahead=0) + max(pace)  # one batch of the slow rank's


def test_a_rank_that_is_alone_loads_ahead_to_the_end() -> None:
    hand_out = DynamicBatches(range(5), HashStore(), "counter")
    assert [hand_out.take(held) for held in range(6)] == [0, 1, 2, 3, 4, None]
