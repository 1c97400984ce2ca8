"""A script's own variables that its loop changes, and no checkpoint has, are named; no others are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import copy, sys, time
import torch
from torch.utils.data import DataLoader
import jobkit

class Meter:
    def __init__(self): self.sum, self.count = 0.0, 0
    def update(self, value): self.sum, self.count = self.sum + value, self.count + 1

class App: # as torchtitan has it: of sharded models its state_dict needs all ranks
    def __init__(self, model, optimizer): self.model, self.optimizer = model, optimizer
    def state_dict(self): print("asked for a state_dict", file=sys.stderr)
    def load_state_dict(self, state): pass

class Average(App):
    def __init__(self, model): self.model = copy.deepcopy(model)
    def update(self, model): self.model.load_state_dict(model.state_dict())

calls = 0
def note(): # state of a module
    global calls
    calls += 1

def main():
    ctx = jobkit.init(params={}, seed=None, runs_dir="runs", gpus=0)
    loader = DataLoader(torch.randn(24, 4), batch_size=4)
    model = torch.nn.Linear(4, 1)
    ema, criterion = copy.deepcopy(model), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    app, average = App(model, optimizer), Average(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    best, history, patience, loss, state = 1e9, [], 0, None, ctx.values(kept=0.0)
    meter, end, epoch, unchanged = Meter(), time.time(), 0, 3
    for epoch in ctx.epochs(3, model=model, optimizer=optimizer):
        running, number = 0.0, 0
        for x in ctx.batches(loader):
            wait = time.time() - end
            loss = criterion(model(x), x[:, :1])
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            running += loss.item()
            meter.update(loss.item())
            state.kept += 1
            note()
            average.update(model)
            with torch.no_grad():
                for own, one in zip(ema.parameters(), model.parameters()): own.lerp_(one, 0.5)
            end = time.time()
        scheduler.step()
        best = min(best, running)
        if running > best: patience += 1
        history.append(running)
    ctx.finish()

main()
"""


def named(line: str) -> set[str]:
    found = re.search(r"py:\d+: (.*?) (?:is|are) changed", line)
    assert found, line
    return set(re.split(r", | and ", re.sub(r" \(.*?\)", "", found[1])))


def test_variables_that_no_checkpoint_has_are_named_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ}, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "changed in the loop" in line]
    objects, batches, of_batches, epochs, of_epochs = lines
    assert (
        named(objects) == {"meter"}
        and "meter (sum, count) is changed" in objects
        and "ctx.epochs(n, ..., meter=meter)" in objects
    )
    assert named(batches) == {"running", "calls"} and "begins with what the lines above set" in batches
    assert "state = ctx.values(" in batches
    assert named(of_batches) == {"average", "ema"} and "ctx.epochs(n, ..., ema=ema)" in of_batches
    assert "asked for a state_dict" not in done.stderr
    assert named(epochs) == {"best", "history"} and "in a later epoch" in epochs
    assert named(of_epochs) == {"scheduler"}


LATE = """\
import copy, random
import torch
from torch.utils.data import DataLoader
import jobkit

ctx = jobkit.init(params={}, seed=None, runs_dir="runs", gpus=0)
loader = DataLoader(torch.arange(24.0).view(-1, 4), batch_size=2)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = ctx.values(history=[])
history, waited, data = state.history, 0, list(range(4))

class EMA:
    def __init__(self, model):
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}
    def update(self, model):
        for name, value in model.state_dict().items():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * value

ema = EMA(model)
for epoch in ctx.epochs(5, model=model, optimizer=optimizer):
    random.shuffle(data)
    for x in ctx.batches(loader):
        loss = model(x).square().mean()
        if ctx.batch % 2 == 0:
            extra = loss.detach()
        (loss + extra).backward(); optimizer.step(); optimizer.zero_grad()
        ema.update(model)
    history.append(loss.item())
    if epoch >= 3: waited += 1
ctx.finish()
"""


def test_a_script_without_functions_is_looked_at_in_each_epoch(tmp_path: Path) -> None:
    (tmp_path / "train-late.py").write_text(LATE)
    done = subprocess.run(
        [sys.executable, "train-late.py"], cwd=tmp_path, env={**os.environ}, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    some, ema, data, waited = [line for line in done.stderr.splitlines() if "the loop" in line and "py:" in line]
    assert "extra is set in some rounds of the loop and used in others" in some
    assert named(ema) == {"ema"} and "ema (shadow) is changed" in ema and "Give the class state_dict()" in ema
    assert named(data) == {"data"} and named(waited) == {"waited"}


HABITS = """\
import collections, copy, itertools
import numpy as np
import torch
from torch.utils.data import DataLoader
import jobkit
import shared

class Config: total = 0.0

def count(): count.calls = getattr(count, "calls", 0) + 1

class Meter:
    sum = 0.0

class Noisy(torch.utils.data.Dataset):
    level = 0.0
    def __len__(self): return 24
    def __getitem__(self, index): return torch.full((4,), self.level)

class Shuffled(torch.utils.data.Sampler):
    def __init__(self, number): self.order = list(range(number))
    def __len__(self): return len(self.order)
    def __iter__(self):
        self.order.reverse() # kept by its loader
        return iter(self.order)

class Trainer:
    def __init__(self):
        self.smooth, self.unchanged = 0.0, 3
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(Noisy(), batch_size=4, sampler=sampler)
        self.others = DataLoader(torch.randn(8, 4))

    def step(self, x):
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()
        count()
        return loss.item()

    def batches(self):
        yield from ctx.batches(self.loader)

    def epoch(self):
        last, meters, mean = collections.deque(maxlen=3), {"loss": Meter()}, np.float32(0.0)
        second, inner, others = 0.0, 0.0, itertools.cycle(self.others)
        def note(loss):
            nonlocal inner
            inner += loss
        loader = self.loader
        for x in self.batches():
            loader.dataset.level += 0.1
            loss = self.step(x)
            self.smooth = 0.9 * self.smooth + 0.1 * loss
            last.append(loss)
            meters["loss"].sum += loss
            mean = np.float32(0.9) * mean + np.float32(0.1)
            second += next(others).sum().item()
            Config.total += loss
            shared.total += loss
            note(loss)

    def run(self):
        best_state, best = copy.deepcopy(self.model.state_dict()), 9
        for parameter in self.model.parameters():
            parameter.requires_grad_(True)
        for epoch in ctx.epochs(2, model=self.model, optimizer=self.optimizer):
            self.epoch()
            if epoch == 0:
                best_state = copy.deepcopy(self.model.state_dict())
            if epoch == 0:
                best = epoch
            else:
                best = epoch
        self.model.load_state_dict(best_state)
        print(best)

for parameter in torch.nn.Linear(1, 1).parameters():
    pass
ctx = jobkit.init(params={}, seed=None, runs_dir="runs", gpus=0)
sampler = Shuffled(24)
Trainer().run()
ctx.finish()
"""


def test_habits_that_hide_a_variable_from_the_loop_are_seen_through(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HABITS)
    (tmp_path / "shared.py").write_text("total = 0.0\n")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ}, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "the loop" in line and "py:" in line]
    assert set.union(*(named(line) for line in lines if "changed" in line)) == {
        *("self", "last", "meters", "mean", "second", "inner", "Config.total", "shared.total", "best_state"),
        *("count.calls", "loader.dataset.level"),
    }
    told = "\n".join(lines)
    assert "self (smooth) is changed" in told and "ctx.epochs(n, ..., trainer=self)" in told
    assert "others is read on in the loop by next()" in told


HEAD = """\
import torch
import jobkit

ctx = jobkit.init(params={}, seed=None, runs_dir="runs", gpus=0)
for epoch in ctx.epochs(2):
"""
GATHERS = """\
    means = [
        x.mean()
        for x in ctx.batches([torch.zeros(2)])
    ]
"""
COUNTS = """\
    batches = iter(ctx.batches([torch.zeros(2)]))
    for i in range(1):
        next(batches)
"""
BY_NEXT = """\
    batches = iter(ctx.batches([torch.zeros(2)] * 3))
    for i in range(ctx.batch, 3):
        next(batches)
print("done", ctx.step)
ctx.finish()
"""


def run_script(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(HEAD + body)
    command = [sys.executable, "train.py"]
    return subprocess.run(command, cwd=folder, env={**os.environ}, text=True, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (GATHERS, "train.py:8: ctx.batches in a comprehension"),
        (COUNTS, "train.py:8: range(1) counts from 0 again"),
    ],
)
def test_loops_that_cannot_be_continued_are_refused_by_file_and_line(tmp_path: Path, body: str, told: str) -> None:
    done = run_script(tmp_path, body)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert told in done.stderr


def test_batches_that_are_read_by_next_need_not_be_read_to_their_end(tmp_path: Path) -> None:
    done = run_script(tmp_path, BY_NEXT)
    assert done.returncode == 0 and "done 6" in done.stdout, done.stderr
    assert "next()" not in done.stderr


MOVING = """\
import weakref
import torch
from torch.utils.data import DataLoader
import jobkit

class Moving: # as by another thread
    def __init__(self): self.held = Held(self)
class Held(dict):
    def __init__(self, owner): self.owner = owner
    def items(self): raise RuntimeError("dictionary changed size during iteration")

class Counts:
    __slots__ = ("seen",)
    def __init__(self): self.seen = 0

ctx = jobkit.init(params={}, seed=None, runs_dir="runs", gpus=0)
counts = Counts()
moving, dead = Moving(), weakref.proxy(Held(None))
for epoch in ctx.epochs(2, model=torch.nn.Linear(1, 1)):
    for x in ctx.batches(DataLoader(torch.zeros(4))):
        counts.seen += 1
ctx.finish()
"""


def test_what_cannot_be_looked_at_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MOVING)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "counts (seen) is changed in the loop" in done.stderr  # with __slots__
