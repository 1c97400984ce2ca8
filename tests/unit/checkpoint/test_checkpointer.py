"""A checkpointer of one rank: the best checkpoint, a framework's files, and states that do not fit."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.ranks import make_rank
from torch import nn

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.export import write_final
from jobkit.checkpoint.free_memory import free_bytes
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.memory import RECORD
from jobkit.checkpoint.staging import RankPosition
from jobkit.errors import CheckpointError, JobkitError, LostLease
from jobkit.optim import EmaAdamW
from jobkit.run import records
from jobkit.run.records import Lease
from jobkit.wire.group import RankGroup
from jobkit.wire.pages import Page


def make(folder: Path, attempt: int = 1, keep: int = 2, mode: Any = "min") -> Checkpointer:
    return Checkpointer(folder, RankGroup.alone(), RankPosition(), attempt=attempt, keep=keep, best_mode=mode)


def entries(model: nn.Module, name: str = "model") -> list[Entry]:
    return [Entry(name=name, live=model)]


def save(folder: Path, model: nn.Module, step: int, **options: Any) -> None:
    checkpointer = make(folder)
    checkpointer.write(checkpointer.copy_to_host(step, entries(model), {}, **options), wait=True)
    checkpointer.close()


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 4)])
def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path, mode: str, best: int) -> None:
    checkpointer = make(tmp_path, mode=mode)
    for step, value in enumerate((3.0, 1.0, 2.0, 5.0, math.nan, 2.5, 2.5), start=1):
        pending = checkpointer.copy_to_host(step, entries(nn.Linear(2, 2)), {})
        if step == 7:
            checkpointer.write(pending)
        if checkpointer.is_better(value):
            checkpointer.mark_best(pending, value)
        elif not pending.is_written:
            checkpointer.write(pending)
    checkpointer.wait()
    assert checkpointer.store.best() == (best, {2: 1.0, 4: 5.0}[best])
    assert checkpointer.store.steps() == [7, 6, best]
    again = make(tmp_path, 2, mode=mode)  # another attempt knows the best
    assert not any(map(again.is_better, (2.5, math.inf, -math.inf, math.nan)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_without_room_for_a_byte_stops_no_training(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m,nr_inodes=100", "tmpfs", str(tmp_path)], check=True)
    try:
        checkpointer, tracked = make(tmp_path / "checkpoints"), entries(nn.Linear(500, 500))
        checkpointer.mark_best(checkpointer.copy_to_host(1, tracked, {}), 0.5)
        checkpointer.write(checkpointer.copy_to_host(2, tracked, {}), wait=True)
        filler = (tmp_path / "filler").open("wb", buffering=0)
        with contextlib.suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        pending = checkpointer.copy_to_host(2, tracked, {})
        pending.is_written = True
        checkpointer.mark_best(pending, 0.4)  # not even the metric finds room
        checkpointer.write(checkpointer.copy_to_host(3, tracked, {}))
        checkpointer.mark_best(checkpointer.copy_to_host(4, tracked, {}), 0.3)
        with pytest.raises(OSError, match="No space left"):
            for number in range(100):
                (tmp_path / str(number)).touch()
        checkpointer.write(checkpointer.copy_to_host(5, tracked, {}))  # there is no room for a folder either
        assert [outcome.is_full for outcome in checkpointer.collect()[2:]] == [True] * 3
        assert (checkpointer.store.steps(), checkpointer.store.best()) == ([2, 1], (1, 0.5))
        assert checkpointer.is_better(0.45)
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_frameworks_files_are_in_the_checkpoint_and_are_checked(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, model, 1, write_files=lambda folder: (folder / "state.bin").write_bytes(b"one"))
    save(tmp_path, model, 2, write_files=lambda folder: (folder / "state.bin").write_bytes(b"two"))
    assert (tmp_path / "latest" / "framework" / "state.bin").read_bytes() == b"two"
    (tmp_path / "step_00000002" / "framework" / "state.bin").write_bytes(b"xxx")
    checkpointer = make(tmp_path, 2)
    assert checkpointer.restored is not None
    assert checkpointer.restored.step == 1
    assert [step for step, _ in checkpointer.set_aside] == [2]


def test_damage_in_the_only_state_begins_the_next_attempt_at_step_0(tmp_path: Path) -> None:
    """A snapshot in memory, and no checkpoint: part of it is in the live tensors when the damage shows."""
    slots = os.memfd_create("first"), os.memfd_create("second")

    def attempt(number: int) -> Checkpointer:
        return Checkpointer(tmp_path, RankGroup.alone(), RankPosition(), attempt=number, keep=2, slots=slots)

    first = attempt(1)
    first.snapshot(3, entries(nn.Linear(2, 2)), {}, 0)
    first.close()
    for slot in slots:
        if os.fstat(slot).st_size:
            os.pwrite(slot, b"damage", RECORD + 4)
    second = attempt(2)
    assert second.restored is not None and second.restored.step == 3
    with pytest.raises(JobkitError, match="step 0"):
        second.restore(entries(nn.Linear(2, 2)))
    assert attempt(3).restored is None


def test_a_state_can_be_restored_once_more(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    expected = model.weight.detach().clone()
    save(tmp_path, model, 1)
    checkpointer = make(tmp_path, 2)
    checkpointer.restore(entries(model))
    nn.init.zeros_(model.weight)
    checkpointer.restore_again()
    assert torch.equal(model.weight, expected)


UNFIT: dict[str, tuple[list[Entry], str]] = {
    "another shape": (entries(nn.Linear(2, 3)), "float32 [2, 2], the code float32 [3, 2]"),
    "another dtype": (entries(nn.Linear(2, 2).double()), "the code float64 [2, 2]"),
    "a parameter more": (entries(nn.Sequential(nn.Linear(2, 2))), "0.weight"),
    "another name": (entries(nn.Linear(2, 2), "net"), "it has model"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_state_that_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    save(tmp_path, nn.Linear(2, 2), 1)
    tracked, words = UNFIT[name]
    with pytest.raises(CheckpointError) as error:
        make(tmp_path, 2).restore(tracked)
    assert words in str(error.value)


def test_an_object_that_the_code_forgot_is_named(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), 1)
    assert make(tmp_path, 2).end_restore() == ["model"]


def test_an_unfinished_save_of_a_killed_attempt_counts_for_nothing(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(2, 2), 1)
    make(tmp_path).store.begin(2)
    checkpointer = make(tmp_path, 2)
    assert checkpointer.restored is not None
    assert checkpointer.restored.step == 1
    assert not list(tmp_path.glob(".step*"))


def test_an_attempt_without_the_lease_publishes_no_checkpoint_no_best_one_and_no_weights(tmp_path: Path) -> None:
    rank, model = make_rank(tmp_path), nn.Linear(2, 2)
    run, check = rank.run, rank.check_lease
    records.write(run.lease_file, Lease(attempt=1, writer="w", token="t", job_id="1"))
    checkpointer = Checkpointer(
        run.checkpoints, RankGroup.alone(), RankPosition(), attempt=1, keep=1, check_lease=check
    )
    first = checkpointer.copy_to_host(1, entries(model), {})
    checkpointer.write(first, wait=True)
    records.write(run.lease_file, Lease(attempt=2, writer="other", token="t", job_id="2"))
    for action in (
        lambda: checkpointer.mark_best(first, 0.5),
        lambda: write_final(run, {"model": model}, None, RankGroup.alone(), check),
        lambda: checkpointer.write(checkpointer.copy_to_host(2, entries(model), {}), wait=True),
    ):
        with pytest.raises(LostLease):
            action()
    assert (run.durable_steps(), run.final.exists()) == ([1], False)
    assert [entry.name for entry in run.checkpoints.iterdir() if entry.is_symlink()] == ["latest"]


@pytest.mark.parametrize(("ranks", "free", "fits"), [(1, 1.3, True), (1, 0.9, False), (3, 3.9, True), (3, 2.7, False)])
def test_two_snapshots_of_all_ranks_of_a_node_take_a_quarter_of_its_free_memory_or_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, free: float, fits: bool
) -> None:
    """`free` is in times of eight states of one rank: four times two."""
    state = nn.Linear(1 << 12, 1 << 10)  # 16 MiB, and the slots grow by 4
    monkeypatch.setattr("jobkit.checkpoint.memory.free_bytes", lambda: int(free * 8 * (16 << 20)))
    slots, place = (os.memfd_create("first"), os.memfd_create("second")), RankPosition(0, ranks, ranks)
    checkpointer = Checkpointer(tmp_path, RankGroup.alone(), place, attempt=1, keep=1, slots=slots)
    entry = Entry(name="own", live=Values({"weight": state.weight}), scope="rank")
    assert (checkpointer.snapshot(1, [entry], {}, 0) is not None) == fits
    checkpointer.close()
    assert (sum(os.fstat(slot).st_size for slot in slots) > 0) == checkpointer.snapshots.is_on == fits


def test_the_free_memory_of_a_job_is_what_the_groups_above_it_leave(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable:    800 kB\n",
        "proc/self/cgroup": "0::/slurm/job_7\n",
        "sys/fs/cgroup/slurm/memory.max": "500000",
        "sys/fs/cgroup/slurm/memory.current": "200000",
        "sys/fs/cgroup/slurm/memory.stat": "anon 7\ninactive_file 30000\n",
        "sys/fs/cgroup/slurm/job_7/memory.max": "max",
        "sys/fs/cgroup/slurm/job_7/memory.current": "100",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_bytes(tmp_path) == 330_000
    (tmp_path / "sys/fs/cgroup/slurm/memory.max").write_text("max")
    assert free_bytes(tmp_path) == 800 << 10


def test_snapshots_of_a_list_that_grows_beyond_the_tensors_go_on(tmp_path: Path) -> None:
    slots = os.memfd_create("first"), os.memfd_create("second")
    checkpointer = Checkpointer(tmp_path, RankGroup.alone(), RankPosition(), attempt=1, keep=1, slots=slots)
    values = Values({})
    for step, size in enumerate((1, 400_000, 900_000, 3_000_000), start=1):
        values.state = {"history": [1.25] * size}
        entry = Entry(name="values", live=values)
        assert checkpointer.snapshot(step, [entry], {}, checkpointer.snapshots.complete) is not None
        assert checkpointer.snapshot(9, [entry], {}, step - 1) is None, "another rank completes this one yet"
        checkpointer.snapshots.wait()
    checkpointer.close()
    again = Checkpointer(tmp_path, RankGroup.alone(), RankPosition(), attempt=2, keep=1, slots=slots)
    values.state = {}
    again.restore([Entry(name="values", live=values)])
    assert again.restored is not None
    assert (again.restored.where, again.restored.step) == ("memory", 4)
    assert values.state == {"history": [1.25] * 3_000_000}


class Values:
    """A state of any kind."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_snapshot_of_many_small_tensors_has_room_for_their_names(tmp_path: Path) -> None:
    module = nn.Module()
    for number in range(4000):
        module.register_buffer(f"a_rather_long_name_of_a_buffer_{'x' * 300}_{number}", torch.zeros(1))
    slots = os.memfd_create("first"), os.memfd_create("second")
    page, place = Page.create(), RankPosition()
    note = page.note_snapshot
    checkpointer = Checkpointer(tmp_path, RankGroup.alone(), place, attempt=1, keep=1, slots=slots, note_snapshot=note)
    assert page.snapshot_step is None
    assert checkpointer.snapshot(1, entries(module), {}, 0) is not None
    checkpointer.snapshots.wait()
    assert page.snapshot_step == 1
    checkpointer.close()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, EmaAdamW])
def test_a_fused_optimizer_of_weights_in_channels_last_goes_on_as_if_nothing_had_been(
    tmp_path: Path, kind: Any
) -> None:
    """A fused kernel walks through memory: state in another order than its parameter's trains other weights."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        return model, kind(model.parameters(), lr=0.1, fused=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        model(torch.arange(300.0).view(1, 3, 10, 10).sin()).square().mean().backward()
        optimizer.step()
        return next(model.parameters()).detach().clone()

    straight, resumed = made(), made()
    train(*straight)
    both = [
        [Entry(name="model", live=model), Entry(name="optimizer", live=optimizer)]
        for model, optimizer in (straight, resumed)
    ]
    checkpointer = make(tmp_path)
    checkpointer.write(checkpointer.copy_to_host(1, both[0], {}), wait=True)
    straight[1].zero_grad()
    make(tmp_path, 2).restore(both[1])
    assert torch.equal(train(*straight), train(*resumed))


class Eigenvectors(torch.optim.Optimizer):
    """Keeps a matrix of another shape than its parameter, which lies in memory column by column, and None at first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if state:
                    state["basis"] = torch.linalg.eigh(torch.ones(5, 5) + torch.eye(5)).eigenvectors
                state.setdefault("basis", None)


def test_an_optimizers_state_may_begin_as_none_and_comes_back_in_its_order_in_memory(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    saved, read = (Eigenvectors(model) for model in models)
    checkpointer = make(tmp_path)
    for step in (1, 2):
        saved.step()
        checkpointer.write(checkpointer.copy_to_host(step, [Entry(name="optimizer", live=saved)], {}), wait=True)
    make(tmp_path, 2).restore([Entry(name="optimizer", live=read)])
    expected, basis = saved.state[models[0].weight]["basis"], read.state[models[1].weight]["basis"]
    assert torch.equal(basis, expected)
    assert basis.stride() == expected.stride() == (1, 5)


def test_the_weights_of_another_run_fit_by_name_and_shape(tmp_path: Path) -> None:
    other = nn.Linear(2, 3)
    save(tmp_path / "other", other, 7)

    def taken(model: nn.Module, name: str = "model") -> Checkpointer:
        checkpointer = make(tmp_path / "own")
        checkpointer.take_weights(tmp_path / "other" / "step_00000007")
        checkpointer.restore(entries(model, name))
        return checkpointer

    model = nn.Linear(2, 3)
    checkpointer = taken(model)
    checkpointer.check_weights()
    assert torch.equal(model.weight, other.weight)
    assert checkpointer.restored is None  # the run begins at step 0
    for misfit, name, says in (
        (nn.Linear(2, 4), "model", r"model/weight: .*\[3, 2\].*\[4, 2\]"),
        (nn.Linear(2, 3, bias=False), "model", "model/bias"),
        (nn.Linear(2, 3), "teacher", "teacher"),
    ):
        with pytest.raises(CheckpointError, match=says):
            taken(misfit, name)
    checkpointer = make(tmp_path / "own")
    checkpointer.take_weights(tmp_path / "other" / "step_00000007")
    with pytest.raises(CheckpointError, match="no model"):
        checkpointer.check_weights()
