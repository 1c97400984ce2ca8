"""How many ranks and devices a submission has: `auto` in numbers, and in a line what does not fit, or is not used."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobkit.errors import InputError, InvalidValue
from jobkit.run import device_kinds, layout
from jobkit.run.config import AUTO, Config, Resources


@dataclass(frozen=True)
class Room:
    """The devices that there are for the ranks."""

    devices: int | None
    """Of each node; None where only a driver, which is asked later, can tell."""
    said: str
    """Who says so, as in `this machine has 2`."""


def visible_gpus() -> int:
    """NVIDIA GPUs that a local task would see, counted without a CUDA library."""
    return len(device_kinds.of_this_machine("cuda", os.environ)[1] or ())


def fit_here(config: Config, resources: Resources, key_of: Callable[[str], str]) -> tuple[Resources, list[str]]:
    """The resources on this machine, in numbers, and what a person should be told of them.

    `key_of` gives the dotted key by which the command line sets one of them. Raises InputError, with the overrides
    that make it fit, where there are too few devices.
    """
    kind, found = device_kinds.of_this_machine(config.device, os.environ)
    if config.device == device_kinds.CPU:
        return _in_numbers(resources, Room(0, "")), []
    if found is None:
        return _in_numbers(resources, Room(None, "")), []  # each rank looks for itself
    how = f"{kind.visible} allows" if kind.visible in os.environ else "this machine has"
    room = Room(len(found) // resources.nodes, f"{how} {len(found)}")  # nodes are simulated, and divide them
    fitted = _in_numbers(resources, room)
    wanted, unit = fitted.world_size * fitted.devices_per_rank, device_kinds.unit(kind.name)
    if wanted > len(found):
        raise InputError(
            f"resources: {fitted.world_size} rank(s) of {fitted.devices_per_rank} {unit}(s) need {wanted}, "
            f"{room.said}; to make it fit add: {_overrides(config, fitted, len(found), key_of)} "
            f"({key_of('gpus_per_task')}=0 is the CPU)"
        )
    notes = _fewer_ranks(resources, fitted, room, unit)
    if wanted < len(found) and (more := _overrides(config, fitted, len(found), key_of, only_more=True)):
        notes.append(f"resources: {wanted} of {len(found)} {kind.name} device(s) are used ({room.said}); all: {more}")
    return fitted, notes


def fit_on_slurm(
    resources: Resources, parameters: Mapping[str, Any], cluster: str, device: str
) -> tuple[Resources, list[str]]:
    """The resources of a job, in numbers, and notes, by what the cluster's entry asks for: nobody sees a node yet.

    Raises InvalidValue where the entry does not say what is needed, or asks for fewer devices than the ranks need.
    """
    if device == device_kinds.CPU:
        return _in_numbers(dataclasses.replace(resources, gpus_per_task=0), Room(0, "")), []
    asked, unit = asked_for(parameters, device), device_kinds.unit(device)
    if asked is None:
        if (kind := device_kinds.kind(device)) is not None and not kind.is_gpu:
            raise InvalidValue(
                f"clusters.{cluster}.gres",
                f"missing, and to Slurm {kind.name} is no GPU, which gpus_per_task could ask for: set what the cluster "
                f"calls its devices, with their number on a node, as `gres: {kind.gres or kind.name}:8` "
                "(`sinfo --format=%G` shows it)",
            )
        if resources.tasks_per_node == AUTO and resources.gpus_per_task not in (AUTO, 0):
            raise InvalidValue(
                "resources.tasks_per_node",
                f"found {AUTO}, but how many GPUs a node has is not known here: "
                f"set clusters.{cluster}.gpus_per_node, or a number of tasks",
            )
        return _in_numbers(resources, Room(0 if kind is None else None, "")), []
    key, count = asked
    if count is None:
        if AUTO in (resources.tasks_per_node, resources.gpus_per_task):
            names = ", ".join(_gres_names(parameters))
            raise InvalidValue(
                f"clusters.{cluster}.{key}",
                f"found {names}; which of them are the {unit}s is not known here, so auto has no number to go by: set "
                "resources.tasks_per_node and resources.gpus_per_task to numbers, as tasks_per_node=8 gpus_per_task=1",
            )
        return resources, []
    room = Room(count, f"clusters.{cluster}.{key} asks for {count} on each node")
    fitted = _in_numbers(resources, room)
    wanted = fitted.ranks_per_node * fitted.devices_per_rank
    if wanted > count:
        raise InvalidValue(
            f"clusters.{cluster}.{key}",
            f"{count} {unit}(s) on each node, but {fitted.ranks_per_node} task(s) of {fitted.devices_per_rank} need "
            f"{wanted}: set it to that, or tasks_per_node to fit",
        )
    notes = _fewer_ranks(resources, fitted, room, unit)
    if wanted < count:
        all_of_them = "tasks_per_node=auto" if fitted.devices_per_rank else "gpus_per_task=auto"
        notes.append(f"resources: {wanted} of {count} {unit}(s) are used ({room.said}); all: resources.{all_of_them}")
    return fitted, notes


def asked_for(parameters: Mapping[str, Any], device: str = device_kinds.AUTO) -> tuple[str, int | None] | None:
    """(option, devices of each node) that a cluster's entry asks sbatch for; None where it does not.

    The number is None where `gres` has several names, and none that is known for a device that is no GPU.
    """
    for key, value in _given(parameters):
        parts = _parts(value)
        if key.replace("-", "_") == "gpus_per_node":
            return key, sum(_count(part) for part in parts)
        if key == "gres" and (found := _gres_of(device, [_name(part) for part in parts])):
            return key, sum(_count(part) for part in parts if _name(part) == found[0]) if len(found) == 1 else None
    return None


def _gres_of(device: str, names: Sequence[str]) -> list[str]:
    """Which of some names in `gres` may be a device: the kind's own, else `gpu`, and for what is no GPU else any."""
    kind = device_kinds.kind(device)
    kinds = device_kinds.KINDS if kind is None else (kind,)
    usual = [one.gres for one in kinds if one.gres is not None]
    known = [name for name in (*usual, device_kinds.GPU) if name in names]
    return known[:1] or (list(dict.fromkeys(names)) if kind is not None and not kind.is_gpu else [])


def _gres_names(parameters: Mapping[str, Any]) -> list[str]:
    return [_name(part) for key, value in _given(parameters) if key == "gres" for part in _parts(value)]


def _given(parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list({**parameters, **parameters.get("additional_parameters", {})}.items())


def _parts(value: Any) -> list[str]:
    return [part.strip() for part in str(value).split(",")]


def _name(part: str) -> str:
    """`gpu` of `gpu:a100:4`."""
    return part.partition(":")[0]


def _count(text: str) -> int:
    """Of `4`, `a100:4` or `gpu:a100:4`; one where there is no number."""
    last = text.rpartition(":")[2]
    return int(last) if last.isdigit() else 1


def _in_numbers(resources: Resources, room: Room) -> Resources:
    """With `auto` decided for a node with so many devices."""
    each, tasks = resources.gpus_per_task, resources.tasks_per_node
    if each == AUTO:
        each = 1 if room.devices is None or room.devices > 0 else 0
        if each and room.devices is not None and tasks != AUTO:
            tasks = min(int(tasks), room.devices)
    if tasks == AUTO:
        tasks = max(1, (room.devices or 0) // int(each)) if each else 1
    return dataclasses.replace(resources, tasks_per_node=tasks, gpus_per_task=each)


def _fewer_ranks(resources: Resources, fitted: Resources, room: Room, unit: str) -> list[str]:
    if resources.tasks_per_node in (AUTO, fitted.tasks_per_node):
        return []
    asked, now = resources.tasks_per_node, fitted.tasks_per_node
    return [f"resources: tasks_per_node is {now}, not {asked}, so that each rank has one {unit} ({room.said})"]


def _overrides(
    config: Config, fitted: Resources, devices: int, key_of: Callable[[str], str], *, only_more: bool = False
) -> str:
    """What to add to the command line so that the run has as many of this machine's devices as it can use."""
    each = fitted.devices_per_rank or 1
    for tasks in range(devices // each, 0, -1):
        new = {"nodes": 1, "tasks_per_node": tasks, "gpus_per_task": each}
        chosen = dataclasses.replace(fitted, **new)
        if only_more and tasks * each <= fitted.world_size * fitted.devices_per_rank:
            return ""
        try:
            layout.check(config.parallel, config.comm, chosen, config.precision)
        except ValueError:
            continue
        return _words(new, fitted, key_of)
    if only_more:
        return ""
    return _words({"nodes": 1, "tasks_per_node": 1, "gpus_per_task": 0}, fitted, key_of)


def _words(new: Mapping[str, int], fitted: Resources, key_of: Callable[[str], str]) -> str:
    return " ".join(f"{key_of(key)}={value}" for key, value in new.items() if getattr(fitted, key) != value)
