"""ctx.epochs and ctx.batches: a script's own loaders, samplers and random numbers, interrupted at its batches."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.attempts import STOPPED, attempt, stop_after
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

SAMPLES = 20
SEED = "seed: null\n"


class Noisy(Dataset[Any]):
    """Augments: a sample is another one each time."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + np.random.random() + float(torch.rand(())) + self.own.random()
        return torch.tensor([index + noise / 10, 1.0])


class OwnSampler(Sampler[int]):
    """Has a generator and a count of its own, which no state_dict tells of."""

    def __init__(self) -> None:
        self.generator, self.passes = random.Random(5), 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(self.generator.sample(range(SAMPLES), 10 + self.passes))

    def __len__(self) -> int:
        return 10 + self.passes


class Stream(IterableDataset[Any]):
    """Shuffles by the process's generator, and never twice alike."""

    def __iter__(self) -> Iterator[Any]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        for one in order:
            yield torch.tensor([one + random.random(), 1.0])


def plain(ctx: Any) -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


def of_generator(ctx: Any) -> Any:
    return DataLoader(Noisy(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1), drop_last=True)


def workers(ctx: Any) -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)


def persistent(ctx: Any) -> Any:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)


def own_sampler(ctx: Any) -> Any:
    return DataLoader(Noisy(), batch_size=4, sampler=OwnSampler())


def own_sampler_with_workers(ctx: Any) -> Any:
    return DataLoader(Noisy(), batch_size=4, sampler=OwnSampler(), num_workers=1)


def distributed(ctx: Any) -> Any:
    sampler = DistributedSampler(Noisy(), ctx.world_size, ctx.rank, seed=2)
    return DataLoader(Noisy(), batch_size=2, sampler=sampler)


def stream(ctx: Any) -> Any:
    return DataLoader(Stream(), batch_size=4)


def stream_with_workers(ctx: Any) -> Any:
    return DataLoader(Stream(), batch_size=4, num_workers=1)


def list_of_batches(ctx: Any) -> Any:
    return [torch.tensor([[float(one), 1.0]]) for one in range(5)]


LOADERS = [
    plain,
    of_generator,
    workers,
    persistent,
    own_sampler,
    own_sampler_with_workers,
    distributed,
    stream,
    stream_with_workers,
    list_of_batches,
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(2, 1), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.dropout(x))  # type: ignore[no-any-return]


class Script:
    """A plain script's parts."""

    def __init__(self, ctx: Any) -> None:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        self.ctx = ctx
        self.net = Net()
        self.ema = copy.deepcopy(self.net)
        self.model = nn.parallel.DistributedDataParallel(self.net) if ctx.world_size > 1 else self.net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.seen: list[Any] = []

    @property
    def tracked(self) -> dict[str, Any]:
        return {"model": self.model, "ema": self.ema, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def learn(self, x: torch.Tensor, *, steps: bool = True) -> None:
        self.seen.append([round(float(value), 6) for value in x[:, 0]])
        loss = self.model(x).square().mean()
        loss.backward()
        if steps:
            self.optimizer.step()
            self.optimizer.zero_grad()
        with torch.no_grad():
            for own, one in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                own.lerp_(one, 0.1)

    def weights(self) -> list[float]:
        parameters = [*self.net.parameters(), *self.ema.parameters()]
        return torch.cat([one.detach().flatten() for one in parameters]).tolist()


def train(ctx: Any, make: Any, stop_at: int | None = None, epochs: int = 3) -> Any:
    script = Script(ctx)
    loader = make(ctx)
    state = ctx.values(best=1e9, history=[])
    for epoch in ctx.epochs(epochs, **script.tracked):
        if isinstance(getattr(loader, "sampler", None), DistributedSampler):
            loader.sampler.set_epoch(epoch)
        weight = random.random()  # drawn at the top of an epoch, used in all of it
        for x in ctx.batches(loader):
            script.learn(x * weight)
            if stop_at is not None:
                stop_after(ctx, stop_at)
        with torch.no_grad():
            value = float(script.ema(torch.ones(1, 2)).sum()) ** 2
        script.scheduler.step(value)
        state.best = min(state.best, value)
        state.history.append(value)
    return script.weights(), state.best, state.history, script.seen, script.optimizer.param_groups[0]["lr"]


def assert_goes_on(whole: Any, found: Any, *, whole_seen: bool = True) -> None:
    for rank, (expected, got) in enumerate(zip(whole, found, strict=True)):
        assert got[0] == expected[0], f"weights of rank {rank}"
        assert got[1:3] == expected[1:3] and got[4] == expected[4]
        assert got[3] == expected[3][len(expected[3]) - len(got[3]) :], "the batches after the stop"


@pytest.mark.parametrize("make", LOADERS, ids=lambda one: one.__name__)
def test_an_epoch_is_continued_in_its_middle_and_at_its_end(tmp_path: Path, make: Any) -> None:
    whole = attempt(1, tmp_path / "whole", train, make, config=SEED)
    steps = len(whole[0][3])
    for stop_at in (1, steps // 3 - 1, steps // 3, steps - 3):
        assert attempt(1, tmp_path / "runs", train, make, stop_at, config=SEED) == [STOPPED], stop_at
    assert_goes_on(whole, attempt(1, tmp_path / "runs", train, make, config=SEED))


@pytest.mark.parametrize("make", [distributed, plain, workers], ids=lambda one: one.__name__)
def test_ranks_continue_an_epoch_together(tmp_path: Path, make: Any) -> None:
    whole = attempt(2, tmp_path / "whole", train, make, config=SEED)
    steps = len(whole[0][3])
    assert attempt(2, tmp_path / "runs", train, make, steps // 3 + 1, config=SEED) == [STOPPED] * 2
    assert attempt(2, tmp_path / "runs", train, make, steps // 3 + 2, config=SEED) == [STOPPED] * 2
    assert_goes_on(whole, attempt(2, tmp_path / "runs", train, make, config=SEED))


def test_each_batch_can_be_the_last_of_its_attempt(tmp_path: Path) -> None:
    whole = attempt(1, tmp_path / "whole", train, plain, config=SEED)
    for stop_at in range(14):
        assert attempt(1, tmp_path / "runs", train, plain, stop_at, config=SEED) == [STOPPED]
    assert_goes_on(whole, attempt(1, tmp_path / "runs", train, plain, config=SEED))


def accumulate(ctx: Any, stop_at: int | None = None) -> Any:
    script = Script(ctx)
    loader = plain(ctx)
    for _ in ctx.epochs(2, **script.tracked):
        for number, x in enumerate(ctx.batches(loader), ctx.batch):
            assert number == ctx.batch
            script.learn(x, steps=number % 2 == 1 or number + 1 == len(loader))
            if stop_at is not None:
                stop_after(ctx, stop_at)
        script.scheduler.step(1.0)
    return script.weights(), 0, 0, script.seen, 0


def test_gradients_are_accumulated_over_the_batches_of_two_attempts(tmp_path: Path) -> None:
    whole = attempt(1, tmp_path / "whole", accumulate, config=SEED)
    assert attempt(1, tmp_path / "runs", accumulate, 2, config=SEED) == [STOPPED]
    assert attempt(1, tmp_path / "runs", accumulate, 5, config=SEED) == [STOPPED]
    assert_goes_on(whole, attempt(1, tmp_path / "runs", accumulate, config=SEED))


def several(ctx: Any, stop_at: int | None = None) -> Any:
    """Two loops an epoch, a loader made anew, a schedule that steps at the top, a loop that is left early."""
    script = Script(ctx)
    schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 1, gamma=0.9)
    first = plain(ctx)
    for epoch in ctx.epochs(3, **script.tracked, schedule=schedule):
        schedule.step()
        for x in ctx.batches(first):
            script.learn(x)
            if stop_at is not None:
                stop_after(ctx, stop_at)
            if ctx.batch == 2:
                break
        anew = DataLoader(Noisy(), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for x, y in ctx.batches(anew, list_of_batches(ctx)):
            script.learn(x + y[0])
            if stop_at is not None:
                stop_after(ctx, stop_at)
    return script.weights(), 0, 0, script.seen, script.optimizer.param_groups[0]["lr"]


def test_several_loops_an_epoch_each_go_on(tmp_path: Path) -> None:
    whole = attempt(1, tmp_path / "whole", several, config=SEED)
    assert len(whole[0][3]) == 18
    for stop_at in (1, 3, 5, 7, 12):
        assert attempt(1, tmp_path / "runs", several, stop_at, config=SEED) == [STOPPED], stop_at
    assert_goes_on(whole, attempt(1, tmp_path / "runs", several, config=SEED))


def counted(ctx: Any) -> None:
    for _ in ctx.epochs(1, **Script(ctx).tracked):
        for _number, _x in enumerate(ctx.batches(list_of_batches(ctx))):
            pass


def test_an_enumerate_that_would_count_from_0_again_is_refused(tmp_path: Path) -> None:
    [message] = attempt(1, tmp_path, counted, config=SEED)
    assert message.endswith("write enumerate(ctx.batches(loader), ctx.batch)") and "test_epochs.py:" in message


def nested(ctx: Any) -> None:
    for _ in ctx.epochs(1, **Script(ctx).tracked):
        for _a in ctx.batches(list_of_batches(ctx)):
            for _b in ctx.batches(list_of_batches(ctx)):
                pass


def outside(ctx: Any) -> None:
    ctx.batches(list_of_batches(ctx))


def read_once(ctx: Any) -> None:
    for _ in ctx.epochs(1, **Script(ctx).tracked):
        ctx.batches(iter(list_of_batches(ctx)))


def endless(ctx: Any) -> None:
    loader = ctx.loader(TensorDataset(torch.ones(8, 2)), global_batch_size=4)
    for _ in ctx.epochs(1, **Script(ctx).tracked, loader=loader):
        ctx.batches(loader)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (nested, "UsageError: ctx.batches within ctx.batches: for two loaders at once, ctx.batches(one, other)"),
        (outside, "UsageError: ctx.batches belongs into `for epoch in ctx.epochs(n, model=model, ...):`"),
        (read_once, "UsageError: ctx.batches: a list_iterator can be read once only"),
        (endless, "UsageError: ctx.batches: a loader of ctx.loader has no end: take `for step in ctx.steps(n)`"),
    ],
)
def test_what_cannot_be_continued_is_refused(tmp_path: Path, task: Any, message: str) -> None:
    assert attempt(1, tmp_path, task, config=SEED)[0].startswith(message)


def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    assert attempt(2, tmp_path, train, distributed, 1, 1, config=SEED) == [STOPPED] * 2
    [found] = attempt(1, tmp_path, train, distributed, None, 1, config=SEED)
    batches = found[3]
    assert sum(len(one) for one in batches) == SAMPLES - 2 * 2 * 2


def left_early(ctx: Any) -> int:
    script = Script(ctx)
    for _ in ctx.epochs(3, **script.tracked):
        for x in ctx.batches(plain(ctx)):
            script.learn(x)
            if ctx.step == 6:
                break
        if ctx.step == 6:
            break
    ctx.finish()
    return int(ctx.step)


def test_the_batch_in_which_the_loops_are_left_counts(tmp_path: Path) -> None:
    assert attempt(1, tmp_path, left_early, config=SEED) == [7]


def forgets_set_epoch(ctx: Any) -> None:
    script = Script(ctx)
    loader = distributed(ctx)
    for _ in ctx.epochs(3, **script.tracked):
        for x in ctx.batches(loader):
            script.learn(x)


def test_a_sampler_that_is_not_told_the_epoch_is_named_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attempt(2, tmp_path, forgets_set_epoch, config=SEED)
    said = [line for line in capfd.readouterr().err.splitlines() if "set_epoch" in line]
    assert len(said) == 1 and "epoch is 0 in epoch 1" in said[0]


def uses_last_loss(ctx: Any, stop_at: int | None = None) -> Any:
    """As tutorials do: what the loop over the batches has set is used after it."""
    script = Script(ctx)
    loader = plain(ctx)
    rng = np.random.default_rng(1)
    state = ctx.values(last=[], total=0.0)
    for _ in ctx.epochs(3, **script.tracked, rng=rng):
        state.total = 0.0
        for x in ctx.batches(loader):
            value = float(x.mean()) + rng.random()
            script.learn(x * rng.random())
            state.total += value
            if stop_at is not None:
                stop_after(ctx, stop_at)
        state.last.append((value, state.total))
        script.scheduler.step(state.total)
    return script.weights(), 0, state.last, script.seen, 0


def test_what_follows_the_last_batch_has_what_the_loop_has_set(tmp_path: Path) -> None:
    whole = attempt(1, tmp_path / "whole", uses_last_loss, config=SEED)
    for stop_at in (3, 4, 5, 9):
        assert attempt(1, tmp_path / "runs", uses_last_loss, stop_at, config=SEED) == [STOPPED], stop_at
    assert_goes_on(whole, attempt(1, tmp_path / "runs", uses_last_loss, config=SEED))


def by_progress_bar(ctx: Any, how: str) -> None:
    for _ in ctx.epochs(1, **Script(ctx).tracked):
        if how == "islice":
            for _x in islice(ctx.batches(list_of_batches(ctx)), 3):
                pass
        elif how == "enumerate around":
            bar = iter(enumerate(ctx.batches(list_of_batches(ctx))))
            for _n, _x in bar:
                pass
        elif how == "zip":
            for _n, _x in zip(range(3), ctx.batches(list_of_batches(ctx)), strict=False):
                pass
        else:
            bar = iter(ctx.batches(list_of_batches(ctx)))
            for _n, _x in enumerate(bar):
                pass


@pytest.mark.parametrize("how", ["islice", "zip", "enumerate", "enumerate around"])
def test_what_would_count_batches_from_0_again_is_refused(tmp_path: Path, how: str) -> None:
    [message] = attempt(1, tmp_path, by_progress_bar, how, config=SEED)
    assert f"{how.split()[0]}() counts from 0 again when an epoch is continued in its middle" in message


def uneven(ctx: Any) -> None:
    script = Script(ctx)
    script.model = script.net  # no collective of its own
    for _ in ctx.epochs(2, **{**script.tracked, "model": script.net}):
        for x in ctx.batches([torch.ones(1, 2)] * (5 - ctx.rank)):
            script.net(x).sum().backward()
            stop_after(ctx, -1)
            ctx._loop._timer.agree_at = 0


def test_ranks_whose_loaders_differ_in_length_are_told(tmp_path: Path) -> None:
    for message in attempt(2, tmp_path, uneven, config=SEED):
        assert "all ranks take as many batches in an epoch" in message


class OwnTrainer:
    def __init__(self, ctx: Any) -> None:
        self.script, self.ctx, self.rng = Script(ctx), ctx, np.random.default_rng(0)

    def fit(self) -> None:
        me, best = self, {"loss": 1e9}
        for _ in self.ctx.epochs(3, **self.script.tracked, rng=self.rng):
            for x in self.ctx.batches(plain(self.ctx)):
                me.script.optimizer.zero_grad()
                me.script.model(x + self.rng.random()).sum().backward()
                me.script.optimizer.step()
            best["loss"] -= 1


def fits(ctx: Any) -> None:
    trainer = OwnTrainer(ctx)
    trainer.fit()


def test_an_object_that_holds_what_is_tracked_is_not_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attempt(1, tmp_path, fits, config=SEED)
    said = [line for line in capfd.readouterr().err.splitlines() if "changed in the loop" in line]
    assert len(said) == 1 and ": best is changed in the loop" in said[0]


def shares_generator(ctx: Any, how: str, stop_at: int | None = None) -> Any:
    """A generator of the script's own that several loaders draw from, which the loop is given."""
    script, g = Script(ctx), torch.Generator().manual_seed(4)
    data: Any = [torch.tensor([float(one), 1.0]) for one in range(SAMPLES)]
    made = [DataLoader(data, batch_size=4, shuffle=True, generator=g) for _ in range(2)]
    for epoch in ctx.epochs(4, **script.tracked, g=g):
        loader = made[epoch % 2] if how == "alternating" else made[0]
        if how == "anew":
            loader = DataLoader(data, batch_size=4, shuffle=True, generator=g)
        for x in ctx.batches(loader):
            script.learn(x)
            if how == "shared" and ctx.batch == 1:
                script.seen += [float(one[:, 0].mean()) for one in made[1]]
            if stop_at is not None:
                stop_after(ctx, stop_at)
    return script.weights(), 0, 0, script.seen, 0


@pytest.mark.parametrize("how", ["shared", "alternating", "anew"])
def test_a_tracked_generator_that_loaders_share_goes_on(tmp_path: Path, how: str) -> None:
    whole = attempt(1, tmp_path / "whole", shares_generator, how, config=SEED)
    for stop_at in (2, 6, 9, 12):
        assert attempt(1, tmp_path / "runs", shares_generator, how, stop_at, config=SEED) == [STOPPED], stop_at
    [found] = attempt(1, tmp_path / "runs", shares_generator, how, config=SEED)
    assert found[0] == whole[0][0]
