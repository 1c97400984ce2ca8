"""A state_dict that is spread over ranks, put together in the host memory of rank 0."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from jobkit.checkpoint.state import is_raw
from jobkit.checkpoint.storage import raw
from jobkit.checkpoint.transfer import Transfer, send_all
from jobkit.group import RankGroup
from jobkit.log import log

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a rank's part of a tensor begins, and its shape."""


@dataclass
class Whole:
    """A flat state_dict on rank 0, in its order; nothing on the other ranks."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """On the CPU, contiguous; of names that are one tensor the first."""
    tied: dict[str, str] = field(default_factory=dict)
    """The other names, each with the first."""
    others: dict[str, Any] = field(default_factory=dict)
    """What is no dense tensor."""


@dataclass(frozen=True)
class _Described:
    """What one rank has under a name."""

    shape: tuple[int, ...] | None = None
    """Of the whole tensor; None for what is not a dense one."""
    dtype: torch.dtype | None = None
    box: Box = ((), ())
    same_as: str | None = None
    """The first name of the same memory; None where an empty part cannot tell."""


def gather_whole(ranks: RankGroup, state: Mapping[str, Any]) -> Whole:
    """The whole of a state_dict of which each rank has a part: DTensors, a pipeline's stage, or all of it. Collective.

    Shards go to rank 0 one after the other, in blocks through the host: no device and no other rank takes any of the
    others'. What cannot be pickled is left out with a warning.
    """
    own = ranks.all_or_none(lambda: {name: _local(value) for name, value in state.items()})
    described = ranks.all_or_none(lambda: _describe(state, own))
    every = ranks.gather_on_main(described)
    plan = ranks.on_main(lambda: _plan(every))
    whole = Whole()
    if ranks.is_main:
        whole.tensors = {name: _whole_of(name, described.get(name), own, every) for name in plan.tensors}
        whole.tied = plan.tied
    _receive(ranks, plan, own, whole)
    whole.others = _gather_others(ranks, plan, state)
    return whole


@dataclass
class _Plan:
    tensors: list[str]
    tied: dict[str, str]
    parts: list[tuple[str, Box, tuple[int, ...], int]]
    """What rank 0 lacks: name, place, the ranks that have it, bytes."""
    others: dict[str, int]
    """Names of what is no tensor, and of each the rank that gives it."""


def _local(value: Any) -> torch.Tensor | None:
    """The dense tensor that a rank has of a value; None for anything else."""
    if not isinstance(value, torch.Tensor) or not is_raw(value):
        return None
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value.detach()


def _describe(state: Mapping[str, Any], own: Mapping[str, torch.Tensor | None]) -> dict[str, _Described]:
    found: dict[str, _Described] = {}
    first: dict[Any, str] = {}
    for name, value in state.items():
        local = own[name]
        if local is None:
            found[name] = _Described()
            continue
        box: Box = (0,) * value.dim(), tuple(value.shape)
        spread: Any = ()
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue  # a mesh of other ranks
            (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]  # as DCP asks
            box, spread = (tuple(chunk.offsets), tuple(chunk.sizes)), (value.placements, tuple(value.shape))
        same_as = None
        if local.numel():
            signs = local.is_conj(), local.is_neg()
            memory = local.data_ptr(), local.device, local.dtype, local.shape, local.stride(), signs, spread
            same_as = first.setdefault(memory, name)
        found[name] = _Described(tuple(value.shape), value.dtype, box, same_as)
    return found


def _plan(every: list[dict[str, _Described]]) -> _Plan:
    """On rank 0: in the order in which the ranks have the names, those of the first before those of the next."""
    plan = _Plan([], {}, [], {})
    holders: dict[str, dict[int, _Described]] = {}
    for rank, described in enumerate(every):
        for name, one in described.items():
            holders.setdefault(name, {})[rank] = one
    for name, have in holders.items():
        if any(one.shape is None for one in have.values()):
            plan.others[name] = min(have)
            continue
        same = {one.same_as for one in have.values()} - {None}
        if len(same) == 1 and same != {name}:
            plan.tied[name] = str(same.pop())
            continue
        plan.tensors.append(name)
        boxes: dict[Box, list[int]] = {}
        for rank, one in have.items():
            boxes.setdefault(one.box, []).append(rank)
        dtype = next(iter(have.values())).dtype
        assert dtype is not None
        for box, of in boxes.items():
            nbytes = torch.Size(box[1]).numel() * dtype.itemsize
            if 0 not in of and nbytes:
                plan.parts.append((name, box, tuple(of), nbytes))
    return plan


def _whole_of(
    name: str,
    mine: _Described | None,
    own: Mapping[str, torch.Tensor | None],
    every: list[dict[str, _Described]],
) -> torch.Tensor:
    """On rank 0: a tensor with what this rank has of it; itself where it has it all."""
    local = own.get(name)
    if mine is not None and local is not None and mine.shape is not None:
        if mine.box[1] == mine.shape:
            return local.cpu().resolve_conj().resolve_neg().contiguous()
        whole = torch.empty(mine.shape, dtype=local.dtype)
        _part_of(whole, mine.box).copy_(local)
        return whole
    one = next(described[name] for described in every if name in described)
    assert one.shape is not None and one.dtype is not None
    return torch.empty(one.shape, dtype=one.dtype)


def _part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


class _Parts:
    """The parts that are sent, one after the other: on a rank that has some, and on rank 0."""

    def __init__(self, plan: _Plan, own: Mapping[str, torch.Tensor | None], whole: Whole) -> None:
        self._plan, self._own, self._whole = plan, own, whole
        self._number = -1
        self._part = torch.empty(0)

    def read(self, number: int, start: int, data: memoryview) -> None:
        if number != self._number:
            local = self._own[self._plan.parts[number][0]]
            assert local is not None
            self._part = torch.empty(0)  # one at a time
            self._number, self._part = number, local.cpu().resolve_conj().resolve_neg().contiguous()
        data[:] = raw(self._part)[start : start + len(data)]

    def take(self, number: int, start: int, data: memoryview) -> None:
        name, box, _, nbytes = self._plan.parts[number]
        target = _part_of(self._whole.tensors[name], box)
        if number != self._number:
            self._number = number
            self._part = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
        raw(self._part)[start : start + len(data)] = data
        if start + len(data) == nbytes and self._part is not target:
            target.copy_(self._part)


def _receive(ranks: RankGroup, plan: _Plan, own: Mapping[str, torch.Tensor | None], whole: Whole) -> None:
    parts = _Parts(plan, own, whole)
    transfers = [Transfer(nbytes, holders, (0,)) for _, _, holders, nbytes in plan.parts]
    send_all(ranks, transfers, parts.read, parts.take)


def _gather_others(ranks: RankGroup, plan: _Plan, state: Mapping[str, Any]) -> dict[str, Any]:
    pickled = {}
    for name, rank in plan.others.items():
        if rank == ranks.rank:
            buffer = io.BytesIO()
            try:
                torch.save(state[name], buffer)
            except Exception as error:
                log.warning("%s cannot be pickled, and is not exported: %s", name, error)
            else:
                pickled[name] = buffer.getvalue()
    found = {name: data for one in ranks.gather_on_main(pickled) for name, data in one.items()}
    # Of this run's own ranks.
    return {name: torch.load(io.BytesIO(found[name]), weights_only=False) for name in plan.others if name in found}
