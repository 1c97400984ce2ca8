"""What the network gives: timed all-reduces over all ranks, inside each node, and between neighbouring nodes."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from jobkit.addresses import own_addresses
from jobkit.errors import JobkitError
from jobkit.worker.disk_probe import probe_disk

if TYPE_CHECKING:
    from jobkit.worker.context import Context

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
"""Bytes: from what only latency counts for, to what only bandwidth does."""

SECONDS = 0.3
"""How long one size is repeated for, at least three times and at most a hundred."""

SLOW_FACTOR = 1.5
"""A node is slow whose bandwidth is the median's divided by more than this."""

Groups = list[list[int]]


def probe(ctx: Context) -> dict[str, Any]:
    """The task of `jobkit doctor`: measure, size by size and round by round; any `params.sizes` instead of SIZES.

    Returns {device, backend, ranks, world: [{bytes, seconds, bus}], nodes: [{node, inside, between}], slow, disk,
    names}: the median seconds of an all-reduce, and bus bandwidths in bytes a second (see `bus_bandwidth`), at the
    largest size for nodes; `disk` is what `probe_disk` found of the run directory, `names` what `probe_names` did.
    """
    sizes = [int(size) for size in ctx.params.get("sizes", SIZES)]
    nodes = ranks_by_node()
    disk = probe_disk(ctx.run_dir / f"disk-probe-{ctx.attempt}", nodes)
    names = probe_names(len(nodes))
    rounds: list[tuple[int, Groups]] = [(size, [list(range(ctx.world_size))]) for size in sizes]
    rounds += [(max(sizes), groups) for groups in node_rounds(list(nodes.values()))]
    found = Results()
    ctx.track(found=found)
    for number in ctx.steps(len(rounds)):
        size, groups = rounds[number]
        found.seconds.append(measure(size, groups, ctx.device))
    world = [
        {"bytes": size, "seconds": seconds[0], "bus": bus_bandwidth(size, seconds[0], ctx.world_size)}
        for size, seconds in zip(sizes, found.seconds, strict=False)
    ]
    rows = by_node(nodes, rounds[len(sizes) :], found.seconds[len(sizes) :])
    about = {"device": ctx.device.type, "backend": dist.get_backend(), "ranks": ctx.world_size}
    return {**about, "world": world, "nodes": rows, "slow": slow_nodes(rows), "disk": disk, "names": names}


class Results:
    """Seconds of each group of each round so far; part of the checkpoint."""

    def __init__(self) -> None:
        self.seconds: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": list(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seconds = [list(one) for one in state["seconds"]]


def ranks_by_node() -> dict[str, list[int]]:
    """The ranks of each node, by the node's name, in the order of the nodes."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    places: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(places, (int(os.environ.get("GROUP_RANK", 0)), name))
    nodes: dict[tuple[int, str], list[int]] = {}
    for rank, place in enumerate(places):
        nodes.setdefault(place, []).append(rank)
    names = [name for _, name in nodes]
    unique = len(set(names)) == len(names)  # nodes simulated on one machine have its name
    return {name if unique else f"{name}#{number}": ranks for (number, name), ranks in sorted(nodes.items())}


def probe_names(nodes: int) -> dict[str, Any]:
    """{address, seconds}: what rank 0 waits for the name of the last rank's address. On all ranks together.

    torch's store asks for the name of each rank's address as it connects, one after the other.
    """
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, own_addresses(nodes)[0])
    found = [{"address": addresses[-1], "seconds": 0.0}]
    if dist.get_rank() == 0:
        started = time.perf_counter()
        with suppress(OSError):  # one without a name is as good as any
            socket.getnameinfo((f"::ffff:{addresses[-1]}", 0), 0)  # as torch's sockets have it
        found[0]["seconds"] = time.perf_counter() - started
    dist.broadcast_object_list(found, src=0)
    return found[0]


def node_rounds(nodes: Sequence[Sequence[int]]) -> list[Groups]:
    """Rounds of disjoint groups, given the ranks of each node: every node alone, then with each neighbour in a ring.

    A node of one rank has no inside, and of two nodes neither can be told from the other by what is between them.
    """
    alone = [list(ranks) for ranks in nodes if len(ranks) > 1]
    rounds = [alone] if alone and len(nodes) > 1 else []
    count = len(nodes)
    if count > 2:
        pairs = [[*nodes[i], *nodes[(i + 1) % count]] for i in range(count)]
        last = pairs.pop() if count % 2 else None  # in a ring of odd length it overlaps with a pair of either round
        rounds += [pairs[0::2], pairs[1::2], *([[last]] if last else [])]
    return rounds


def measure(size: int, groups: Groups, device: torch.device) -> list[float]:
    """Median seconds of an all-reduce of `size` bytes in each of some disjoint groups, all at once; on all ranks."""
    everyone = len(groups[0]) == dist.get_world_size()
    mine, made = dist.group.WORLD, []
    if not everyone:
        mine, made = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    seconds: list[Any] = [0.0] * dist.get_world_size()
    dist.all_gather_object(seconds, 0.0 if mine is None else all_reduce_seconds(size, device, mine))
    for group in made:
        dist.destroy_process_group(group)
    return [max(seconds[rank] for rank in ranks) for ranks in groups]


def all_reduce_seconds(size: int, device: torch.device, group: dist.ProcessGroup) -> float:
    """Median seconds of an all-reduce of `size` bytes over a group, on its ranks together.

    Raises JobkitError where the sum is wrong.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    data = torch.full([max(1, size // 4)], float(rank + 1), device=device)
    _timed(data, group)  # makes the connections
    if not bool((data == ranks * (ranks + 1) / 2).all()):
        raise JobkitError(f"an all-reduce of {size} bytes over {ranks} ranks gave a wrong sum on rank {rank}")
    data.zero_()
    estimate = torch.tensor([_timed(data, group)], device=device)
    dist.all_reduce(estimate, op=dist.ReduceOp.MAX, group=group)
    repeats = min(100, max(3, round(SECONDS / float(estimate))))
    return statistics.median(_timed(data, group) for _ in range(repeats))


def _timed(data: torch.Tensor, group: dist.ProcessGroup) -> float:
    synchronize = torch.get_device_module(data.device).synchronize
    synchronize()
    started = time.perf_counter()
    dist.all_reduce(data, group=group)
    synchronize()
    return time.perf_counter() - started


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes a second that each rank's link carries in a ring, whatever the number of ranks.

    Definition: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    return 2 * (ranks - 1) / ranks * size / seconds


def by_node(
    nodes: Mapping[str, Sequence[int]], rounds: Sequence[tuple[int, Groups]], seconds: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """{node, inside, between} of each node: bus bandwidths, None where nothing was measured.

    Between nodes it is the better one of a node's two neighbours: a node is not to be blamed for a slow neighbour.
    """
    rows: dict[str, dict[str, Any]] = {name: {"node": name, "inside": None, "between": None} for name in nodes}
    for (size, groups), times in zip(rounds, seconds, strict=True):
        for ranks, time_taken in zip(groups, times, strict=True):
            bus = bus_bandwidth(size, time_taken, len(ranks))
            members = [name for name, own in nodes.items() if set(own) <= set(ranks)]
            where = "inside" if len(members) == 1 else "between"
            for name in members:
                rows[name][where] = max(bus, rows[name][where] or 0.0)
    return list(rows.values())


def slow_nodes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The nodes that are slow inside or towards both neighbours, compared with the median node."""
    slow = set()
    for where in ("inside", "between"):
        known = {row["node"]: row[where] for row in rows if row[where] is not None}
        middle = statistics.median_high(known.values()) if known else 0.0
        slow |= {name for name, bus in known.items() if bus * SLOW_FACTOR < middle}
    return [row["node"] for row in rows if row["node"] in slow]
