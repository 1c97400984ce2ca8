"""`auto` as numbers, on this machine and on Slurm, without torch."""

from __future__ import annotations

import dataclasses
import os
import resource
from typing import Any

import pytest

from jobkit.config import machine
from jobkit.config.machine import idle_devices, visible_devices, with_counts
from jobkit.config.schema import Config, Resources
from jobkit.errors import InputError


def _config(device: str = "auto", **resources: Any) -> Config:
    return dataclasses.replace(Config(name="toy", task="a:b", resources=Resources(**resources)), device=device)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in machine.KINDS.values():
        monkeypatch.delenv(kind.visible or "x", raising=False)
    monkeypatch.setattr(
        machine,
        "KINDS",
        {
            name: dataclasses.replace(kind, files="/no/*")
            for name, kind in machine.KINDS.items()
            if name in ("cuda", "cpu")
        },
    )
    monkeypatch.setattr(machine, "_driver_count", lambda: 0)


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0,1", ["0", "1"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("GPU-8932f937, MIG-1", ["GPU-8932f937", "MIG-1"]),
    ],
)
def test_the_variable_says_which_devices_are_visible(value: str, devices: list[str]) -> None:
    assert visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": value}) == ("cuda", devices)


def test_auto_is_the_first_kind_with_devices(no_gpus: None) -> None:
    assert visible_devices("auto", {}) == ("cuda", [])
    assert visible_devices("auto", {"CUDA_VISIBLE_DEVICES": "3"}) == ("cuda", ["3"])


def test_devices_that_are_named_and_not_used_are_said(no_gpus: None) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "4,5"}
    words = [idle_devices(_config(gpus_per_task=1), ranks, visible) for ranks in (1, 2)]
    assert ("4,5" in str(words[0]), words[1]) == (True, None)
    assert idle_devices(_config(gpus_per_task=1), 1, {}) is None
    assert "gpus_per_task=1" in str(idle_devices(_config(gpus_per_task=0), 1, visible))
    assert idle_devices(_config("cpu", gpus_per_task=1), 1, os.environ) is None


LOCAL: list[tuple[str, dict[str, Any], tuple[int, int]]] = [  # visible, resources, (tasks, gpus)
    ("0,1,2,3", {"tasks_per_node": "auto", "gpus_per_task": "auto"}, (4, 1)),
    ("0,1,2,3", {"tasks_per_node": "auto", "gpus_per_task": 2}, (2, 2)),
    ("0,1,2,3", {"tasks_per_node": "auto", "gpus_per_task": "auto", "nodes": 2}, (2, 1)),
    ("0", {"tasks_per_node": 2, "gpus_per_task": "auto"}, (1, 1)),
    ("", {"tasks_per_node": "auto", "gpus_per_task": "auto"}, (1, 0)),
    ("", {"tasks_per_node": 2, "gpus_per_task": "auto"}, (2, 0)),
    ("", {"tasks_per_node": 2}, (2, 0)),
]


@pytest.mark.parametrize(("visible", "resources", "expected"), LOCAL)
def test_auto_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, visible: str, resources: dict[str, Any], expected: tuple[int, int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    counted = with_counts(_config("cuda", **resources), "local", None).resources
    assert (counted.ranks_per_node, counted.devices_per_rank) == expected


SLURM: list[tuple[int | None, str, dict[str, Any], tuple[int, int]]] = [
    (8, "auto", {"tasks_per_node": "auto", "gpus_per_task": "auto"}, (8, 1)),
    (8, "auto", {"tasks_per_node": 4, "gpus_per_task": 2}, (4, 2)),
    (None, "auto", {"tasks_per_node": "auto", "gpus_per_task": "auto"}, (1, 0)),
    (None, "auto", {"tasks_per_node": 4, "gpus_per_task": 2}, (4, 2)),
    (None, "cuda", {"tasks_per_node": 4, "gpus_per_task": "auto"}, (4, 1)),
    (8, "cpu", {"tasks_per_node": 4, "gpus_per_task": 1}, (4, 0)),
    (8, "npu", {"tasks_per_node": "auto", "gpus_per_task": "auto"}, (8, 1)),
]


@pytest.mark.parametrize(("asked", "device", "resources", "expected"), SLURM)
def test_auto_on_slurm(asked: int | None, device: str, resources: dict[str, Any], expected: tuple[int, int]) -> None:
    counted = with_counts(_config(device, **resources), "slurm", asked).resources
    assert (counted.ranks_per_node, counted.devices_per_rank) == expected


@pytest.mark.parametrize(
    ("scheduler", "asked", "device", "resources", "key"),
    [
        ("slurm", 4, "auto", {"tasks_per_node": 4, "gpus_per_task": 2}, "resources.gpus_per_task"),
        ("slurm", None, "auto", {"tasks_per_node": "auto", "gpus_per_task": 2}, "resources.tasks_per_node"),
        ("slurm", None, "npu", {"tasks_per_node": 2, "gpus_per_task": 1}, "device"),
        ("local", None, "cuda", {"tasks_per_node": 2, "gpus_per_task": 1}, "resources.gpus_per_task"),
    ],
)
def test_a_lack_of_devices_is_refused(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, asked: int | None, device: str, resources: Any, key: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(InputError) as refused:
        with_counts(_config(device, **resources), scheduler, asked)
    assert refused.value.key == key and refused.value.hint


def test_a_job_gets_no_variable_of_the_rank_that_submits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOBKIT_ATTEMPT", "SUBMITIT_EXECUTOR", "JOBKIT_RUNS", "SECRET"):
        monkeypatch.setenv(name, "1")
    names = machine.clean_environment().keys()
    assert {"JOBKIT_RUNS", "SECRET"} <= names and names.isdisjoint({"JOBKIT_ATTEMPT", "SUBMITIT_EXECUTOR"})


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "few"),
    [
        (64, 4096, 4096, False),
        (1024, 1_073_741_816, 65536, False),  # as in a container: a program may close so many one by one
        (200_000, 1_073_741_816, 200_000, False),
        (64, 128, 128, True),
        (128, 128, 128, True),
        (1024, resource.RLIM_INFINITY, 65536, False),
    ],
)
def test_the_limit_of_open_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, few: bool
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    assert ("at most 128 open files" in machine.raise_open_files()) == few
    assert limits[-1] == (raised, hard)
