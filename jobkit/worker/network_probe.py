"""The task of `jobkit doctor --nodes N`: timed all-reduces over all ranks, and between each node and its neighbours.

    ranks of each node --ring--> pairs of nodes --all-reduce--> bytes a second of each node, slow nodes

cli/doctor.py submits it as a run of its own, and prints its result.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from jobkit.loop.context import Context

SIZES = (1 << 10, 1 << 20, 1 << 26)
"""Bytes: latency alone counts for the first, bandwidth alone for the last."""

REPEATS = 5

SLOW_FACTOR = 1.5
"""A node is slow if the median node is faster by more than this factor."""


def probe(ctx: Context) -> dict[str, Any]:
    """Return {backend, ranks, world: [{bytes, seconds, bus}], nodes: {name: bus}, slow: [name]}.

    `bus` are the bytes a second that the link of a rank carries in a ring (nccl-tests, doc/PERFORMANCE.md). A node has
    the better value of its two neighbours: it is not to be blamed for theirs. Two nodes cannot be told apart.
    """
    if ctx.world_size == 1:
        return {"backend": "none", "ranks": 1, "world": [], "nodes": {}, "slow": []}
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    places: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(places, f"{name} ({os.environ.get('GROUP_RANK', '0')})")
    ranks_of: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault(place, []).append(rank)
    world = [(size, measure(size, None, ctx.device)) for size in SIZES]
    buses: dict[str, float] = {}
    names = list(ranks_of)
    for pairs in rounds(len(names)):
        groups = [[*ranks_of[names[a]], *ranks_of[names[b]]] for a, b in pairs]
        mine, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
        seconds = measure(SIZES[-1], mine, ctx.device) if mine is not None else 0.0
        times: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(times, seconds)
        for pair, group in zip(pairs, groups, strict=True):
            value = bus(SIZES[-1], max(times[rank] for rank in group), len(group))
            for number in pair:
                buses[names[number]] = max(value, buses.get(names[number], 0.0))
    return {
        "backend": dist.get_backend(),
        "ranks": ctx.world_size,
        "world": [{"bytes": size, "seconds": s, "bus": bus(size, s, ctx.world_size)} for size, s in world],
        "nodes": buses,
        "slow": slow_nodes(buses),
    }


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs, in which each node meets both neighbours of a ring; none for two nodes."""
    if nodes < 3:
        return []
    pairs = [(number, (number + 1) % nodes) for number in range(nodes)]
    last = [[pairs.pop()]] if nodes % 2 else []  # in a ring of odd length it overlaps with a pair of either round
    return [pairs[0::2], pairs[1::2], *last]


def measure(size: int, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return the median seconds of an all-reduce of `size` bytes over a group, None for all ranks."""
    data = torch.zeros(size // 4, device=device)
    seconds = []
    for _ in range(1 + REPEATS):  # the first makes the connections
        began = time.perf_counter()
        dist.all_reduce(data, group=group)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def bus(size: int, seconds: float, ranks: int) -> float:
    """Return the bytes a second of each rank's link, whatever the number of ranks."""
    return 2 * (ranks - 1) / ranks * size / seconds


def slow_nodes(buses: Mapping[str, float]) -> Sequence[str]:
    """Return the nodes that are slow towards both neighbours, compared with the median node."""
    middle = statistics.median_high(buses.values()) if buses else 0.0
    return [name for name, value in buses.items() if value * SLOW_FACTOR < middle]
