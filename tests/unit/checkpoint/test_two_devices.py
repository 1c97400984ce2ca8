"""A rank whose tensors lie on two devices. Here is no device: stand-ins note what CUDA would be asked for.

tests/cuda has the same on two GPUs of one rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.ranks import make_context
from torch._subclasses.fake_tensor import FakeTensorMode

from jobkit.checkpoint.checkpointer import Checkpointer
from jobkit.checkpoint.leaves import Entry
from jobkit.checkpoint.shard import write_shard
from jobkit.checkpoint.staging import RankPosition, Stager
from jobkit.data.seeds import generator_state, load_generator_state, seed_generators
from jobkit.parallel.devices import devices_of
from jobkit.wire.group import RankGroup

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Event:
    """A torch.cuda.Event that notes the stream that it was recorded on, and whether somebody waited for it."""

    made: list[Event]

    def __init__(self) -> None:
        self.stream, self.waited = "the current device's", False
        self.made.append(self)

    def record(self, stream: str | None = None) -> None:
        self.stream = stream or self.stream

    def synchronize(self) -> None:
        self.waited = True


def on(*devices: str) -> torch.nn.ParameterList:
    return torch.nn.ParameterList([torch.empty(1, device=device) for device in devices])


def test_a_copy_has_an_event_on_each_device_and_is_written_once_all_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "made", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    stager, entries = Stager(RankPosition(), RankGroup.alone()), [Entry(name="model", live=torch.nn.Linear(2, 2))]
    stager.copy_to_host(entries)
    assert Event.made == []
    stager._gpus = [FIRST, SECOND]
    staged = stager.copy_to_host(entries)
    assert [event.stream for event in Event.made] == ["cuda:0", "cuda:1"]
    assert not any(event.waited for event in Event.made)
    write_shard(tmp_path / "shard", staged)
    assert all(event.waited for event in Event.made)


def test_the_devices_of_a_copy_are_those_of_all_its_sources() -> None:
    stager = Stager(RankPosition(), RankGroup.alone())
    for names, expected in ((["cpu"], []), (["cpu", "cuda:1", "cuda:0", "cuda:1"], [SECOND, FIRST])):
        with FakeTensorMode():
            stager._look([Entry(name="model", live=on(*names))])
        assert stager._gpus == expected and stager.has_cuda == bool(expected)


def test_the_thread_that_writes_has_the_device_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    note = lambda device: seen.append((threading.current_thread().name, device))  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "set_device_index", note)
    entries = [Entry(name="model", live=torch.nn.Linear(2, 2))]
    for device in (torch.device("cpu"), SECOND):
        checkpointer = Checkpointer(
            tmp_path / str(device), RankGroup.alone(), RankPosition(), attempt=1, keep=1, device=device
        )
        checkpointer.write(checkpointer.copy_to_host(1, entries, {}), wait=True)
        checkpointer.close()
    assert seen == [("jobkit-checkpoint_0", SECOND)]


class Generators:
    """A device module with a generator on each device; as torch.cuda, `manual_seed` is of the current device."""

    def __init__(self) -> None:
        self.current = 0
        self.generators = [torch.Generator().manual_seed(98), torch.Generator().manual_seed(99)]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def manual_seed(self, seed: int) -> None:
        self.generators[self.current].manual_seed(seed)

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generators[device.index].set_state(state)


def test_the_generators_of_both_devices_are_seeded_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Generators()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    seed_generators(5, FIRST, SECOND)
    state = generator_state(FIRST, SECOND)
    drawn = [torch.rand(2, generator=generator).tolist() for generator in module.generators]
    assert drawn == [torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()] * 2
    load_generator_state(state, FIRST, SECOND)
    assert [torch.rand(2, generator=generator).tolist() for generator in module.generators] == drawn


def test_the_devices_of_a_rank_are_those_of_its_tracked_tensors() -> None:
    with FakeTensorMode():
        model = on("cpu", "cuda:0", "cuda:1")
        optimizer = torch.optim.SGD([model[2]])
        values = {"best": 0.0, "state": {"sum": torch.zeros(1, device="cuda:1")}}
    assert devices_of(model) == [FIRST, SECOND]
    assert devices_of(optimizer) == devices_of(values) == [SECOND]
    assert devices_of(SimpleNamespace()) == devices_of(torch.nn.Linear(1, 1, device="meta")) == []


def test_what_is_tracked_decides_whose_generators_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, module = make_context(tmp_path, RankGroup.alone()), Generators()
    with FakeTensorMode():
        ctx.track(model=on("cpu", "cuda:1", "cuda:0"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    saved = ctx._generators.state_dict()["states"]["devices"]
    assert saved == [generator.get_state().numpy().tobytes() for generator in reversed(module.generators)]
    ctx.close()
