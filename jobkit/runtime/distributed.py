"""From the launcher's ranks to one process group: topology, rendezvous through the run directory, devices."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from jobkit.errors import DistributedError
from jobkit.run.files import read_json, write_json

RENDEZVOUS_SECONDS = 300.0
"""How long ranks wait for each other: longer than imports on a cold shared disk, shorter than a time limit."""


@dataclass(frozen=True)
class Topology:
    """Which rank of which world this process is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1

    def check(self, expected: int) -> None:
        """Raise DistributedError unless the launcher started as many tasks as the run was given."""
        if self.world_size != expected:
            raise DistributedError(
                f"this task was started as rank {self.rank} of {self.world_size}, but the run has resources for "
                f"{expected} rank(s): the tasks would train apart from each other. Check resources.nodes, "
                "resources.tasks_per_node and the cluster's own options."
            )


# How launchers say how many tasks they started; more than one where one was expected is two runs in one directory.
_TASK_COUNTS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise DistributedError where a launcher started several tasks, each of which would train alone."""
    in_a_step = "SLURM_STEP_ID" in environ or "SLURM_PROCID" not in environ
    for name in _TASK_COUNTS:
        if name == "SLURM_NTASKS" and not in_a_step:
            continue
        if environ.get(name, "1") not in ("", "1"):
            raise DistributedError(
                f"{name}={environ[name]}: several tasks were started, and each would train alone in the same run "
                "directory. Start one task, or submit the function with python -m jobkit.submit."
            )


def choose_device(gpus_per_task: int, local_rank: int, local_world_size: int) -> torch.device:
    """The device of one local rank: a GPU of its own where the run has any, else the CPU.

    A launcher may show a task its own GPU only, or all of the node's: the first is index 0 for every rank.
    """
    if gpus_per_task == 0:
        return torch.device("cpu")
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    if visible == gpus_per_task:
        index = 0
    elif visible >= gpus_per_task * local_world_size:
        index = local_rank * gpus_per_task
    else:
        raise DistributedError(
            f"rank with local rank {local_rank} of {local_world_size} needs {gpus_per_task} GPU(s) a task and sees "
            f"{visible} (CUDA_VISIBLE_DEVICES: {shown}); set resources.gpus_per_task=0 for the CPU"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def join(topology: Topology, device: torch.device, rendezvous: Path) -> None:
    """Make the one process group of an attempt, and export RANK, WORLD_SIZE, MASTER_ADDR and their family.

    Rank 0 binds a free port and writes where it is to `rendezvous`, a file of this attempt alone; the others read it.
    Raises DistributedError when they do not find each other within RENDEZVOUS_SECONDS.
    """
    timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
    if topology.rank == 0:
        store = TCPStore("127.0.0.1", 0, topology.world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        port, addresses = store.port, _own_addresses(topology.nodes)
        write_json(rendezvous, {"addresses": addresses, "port": port, "host": socket.gethostname()})
        address = addresses[0]
    else:
        address, port = _find_master(rendezvous)
        store = TCPStore(address, port, topology.world_size, is_master=False, timeout=timeout)
    _export(topology, address, port)
    if interface := _interface_towards(address):
        # Gloo would resolve the host's name to find its interface; on many clusters names do not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("jobkit", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(minutes=30),
    )


def _export(topology: Topology, address: str, port: int) -> None:
    os.environ.update(
        RANK=str(topology.rank),
        WORLD_SIZE=str(topology.world_size),
        LOCAL_RANK=str(topology.local_rank),
        LOCAL_WORLD_SIZE=str(topology.local_world_size),
        GROUP_RANK=str(topology.node),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )


def _find_master(rendezvous: Path) -> tuple[str, int]:
    """An address of rank 0 that answers from here, and its port."""
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while time.monotonic() < deadline:
        found = read_json(rendezvous)
        if isinstance(found, dict):
            for address in found["addresses"]:
                with contextlib.suppress(OSError), socket.create_connection((address, found["port"]), timeout=3):
                    return address, int(found["port"])
        time.sleep(0.05)
    raise DistributedError(
        f"rank 0 did not answer within {RENDEZVOUS_SECONDS:g} s ({rendezvous}); its log says why, or a firewall does"
    )


def _own_addresses(nodes: int) -> list[str]:
    """Numeric addresses of this host, best first. Names are not used: nodes of a cluster need not resolve."""
    if nodes == 1:
        return ["127.0.0.1"]
    # The address that the host of srun sees, else the one of the default route: asking the routing table sends nothing.
    towards = [os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""), "8.8.8.8"]
    routed = [address for target in towards if target and (address := _source_address(target))]
    return list(dict.fromkeys([*routed, *_interfaces().values()])) or ["127.0.0.1"]


def _source_address(target: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """IPv4 address of each network interface that has one."""
    SIOCGIFADDR = 0x8915
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _interface_towards(address: str) -> str | None:
    """The name of the interface that traffic to `address` leaves by."""
    source = _source_address(address)
    return next((name for name, own in _interfaces().items() if own == source), None)


class Control:
    """Small agreements among the ranks, on the CPU and in a group of their own: they never wait for a GPU."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.group = dist.new_group(backend="gloo") if world_size > 1 else None

    def maximum(self, *values: float) -> list[float]:
        """The element-wise maximum over all ranks."""
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in tensor.tolist()]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a CPU tensor over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def from_main(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)
