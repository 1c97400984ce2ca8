"""Runs that share the devices of a machine: one at a time, first come first served, without a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobkit.agent import devices
from jobkit.agent.devices import Devices
from jobkit.config.schema import Config, Resources
from jobkit.errors import InputError
from jobkit.run.rundir import RunDir
from jobkit.wire.messages import RankPlace

Make = Callable[..., Devices]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(devices, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(devices, "_in_use", lambda names: ({}, {}))
    made = []

    def of_run(name: str, count: int, visible: str = "4,5,6", nodes: int = 1) -> Devices:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        resources = Resources(nodes=nodes, tasks_per_node=count, gpus_per_task=1)
        wanted = devices.of_run(RunDir(tmp_path / name), Config(name="a", device="cuda", resources=resources))
        assert wanted is not None
        made.append(wanted)
        return wanted

    yield of_run
    for item in made:
        item.close()


def visible(held: Devices, node: int = 0) -> str:
    place = RankPlace(rank=0, local_rank=0, local_world_size=held.count, node=node)
    return held.visible_on(place)["CUDA_VISIBLE_DEVICES"]


def test_two_runs_never_have_the_same_device(make: Make) -> None:
    first, second, third = make("first", 2), make("second", 1), make("third", 1)
    assert first.take()
    assert second.take()
    assert [visible(first), visible(second)] == ["4,5", "6"]
    assert not third.take()
    assert devices.turns() == {str(third.run.path): "no. 1 for 1 of cuda 4, 5, 6"}
    first.close()
    assert third.take()
    assert visible(third) == "4"
    assert devices.turns() == {}


def test_first_come_first_served(make: Make) -> None:
    holder, large, small, elsewhere = make("a", 2), make("b", 3), make("c", 1), make("d", 1, "7")
    assert holder.take()
    assert not large.take()
    assert not small.take(), "device 6 is free, but the run before needs it"
    assert elsewhere.take(), "the run before does not want device 7"
    assert not make("e", 1, "6,8").take(), "it does want one of these"
    holder.close()
    assert not small.take()
    assert large.take()
    large.close()
    assert small.take()


def test_a_dead_run_in_the_line_is_passed_over(make: Make, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from jobkit.run.rundir import RunDir
from jobkit.agent.devices import Devices
holder = Devices(RunDir({str(tmp_path / "dead")!r}), "npu", ["4", "5"], 1, devices_per_rank=1)
waiter = Devices(RunDir({str(tmp_path / "dead too")!r}), "npu", ["4", "5"], 2, devices_per_rank=1)
print(holder.take(), waiter.take(), flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) as process:
        assert process.stdout.readline() == "True False\n"
        late = Devices(RunDir(tmp_path / "late"), "npu", ["4", "5"], 2, devices_per_rank=1)
        assert not late.take()
        assert len(devices.turns()) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert late.take()
        late.close()


def test_simulated_nodes_divide_the_devices(make: Make) -> None:
    held = make("a", 2, "0,1,2,3", nodes=2)
    assert held.take()
    places = [RankPlace(rank=2 * node, local_rank=0, local_world_size=2, node=node) for node in (0, 1)]
    assert [held.visible_on(place)["CUDA_VISIBLE_DEVICES"] for place in places] == ["0,1", "2,3"]


def test_a_device_on_which_another_user_computes_is_not_free(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    users = {"4": ["process 1 of eve"], "5": []}
    monkeypatch.setattr(devices, "_in_use", lambda names: ({"4": "GPU-a", "5": "GPU-b"}, users))
    held = make("a", 1)
    assert held.take()
    assert visible(held) == "5"
    other = make("b", 1, "GPU-b")
    monkeypatch.setattr(devices, "_in_use", lambda names: ({"GPU-b": "GPU-b"}, {"GPU-b": []}))
    assert not other.take(), "a number and a UUID are one device"


def test_a_run_on_the_cpu_waits_for_nothing(tmp_path: Path) -> None:
    for device in ("cpu", "auto"):
        config = Config(name="a", device=device, resources=Resources(gpus_per_task=0, tasks_per_node=64))
        assert devices.of_run(RunDir(tmp_path), config) is None


def test_more_devices_than_the_machine_has_are_refused(make: Make) -> None:
    with pytest.raises(InputError) as error:
        make("a", 4)
    assert (error.value.key, error.value.found) == ("resources.gpus_per_task", 4)


def test_the_folder_is_the_user_s_own(make: Make) -> None:
    held = make("a", 1)
    held.take()
    assert held.folder.stat().st_mode & 0o077 == 0


def test_a_user_without_a_home_has_a_folder_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    user = 2**30 + os.getpid()  # no such user, and no other test's
    for name in ("getuid", "geteuid"):
        monkeypatch.setattr(os, name, lambda: user)
    state = Path(f"/tmp/jobkit-{user}")
    assert devices.folder().is_relative_to(state)
    state.mkdir()  # another user's
    try:
        with pytest.raises(InputError, match="it belongs to"):
            devices.folder()
    finally:
        state.rmdir()
