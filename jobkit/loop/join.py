"""A rank joins the others: its device, torch's process group, and a group of its own for agreements.

    Rank (environment) --join()--> Joined(device, ranks)

worker/task.py and script.py call this before they make a Context. It is the first code of a rank that needs torch.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from jobkit.addresses import interface_towards
from jobkit.errors import DistributedError, UsageError
from jobkit.loop.rank import Rank
from jobkit.parallel.devices import check_precision, choose_device, group_backend, set_determinism
from jobkit.wire.group import RankGroup

JOIN_SECONDS = 600.0
"""How long ranks wait for each other at the beginning: imports from a cold shared disk take minutes."""


@dataclass(frozen=True)
class Joined:
    """The place of a rank in torch's world."""

    device: torch.device
    ranks: RankGroup
    """All ranks, in a gloo group that the loop alone uses."""


OWN_THREADS = torch.get_num_threads()
"""torch's own number of threads: this module is imported before the user's code is."""


def take_threads(cores: int) -> None:
    """Give torch as many threads as the rank of a `task:` has cores; the rank calls it before it imports the task.

    Not where somebody has set another number: by OMP_NUM_THREADS, or a module of `preload` by torch.set_num_threads.
    """
    if os.environ.get("OMP_NUM_THREADS", str(cores)) == str(cores) and torch.get_num_threads() == OWN_THREADS:
        torch.set_num_threads(cores)


def join(rank: Rank, file: Path | None = None) -> Joined:
    """Form the process group of all ranks, where there are several and it does not stand yet. Raises DistributedError.

    They meet at MASTER_ADDR, or through `file`, a path that all of them see.
    """
    config = rank.config
    for name, value in config.deterministic_variables.items():
        os.environ.setdefault(name, value)
    set_determinism(config.deterministic)
    device = choose_device(config.device, config.resources.devices_per_rank, rank.local_rank)
    check_precision(device, config.precision)
    if rank.world_size > 1 and not dist.is_initialized():
        form_group(rank, group_backend(device, config.backend), device if device.index is not None else None, file)
    return Joined(device, RankGroup.of_world())


def form_group(rank: Rank, backend: str, device: torch.device | None = None, file: Path | None = None) -> None:
    """Form torch's process group of all ranks; they meet as `join` says. Raises DistributedError."""
    typed = os.environ.get("GLOO_SOCKET_IFNAME", "")
    _check_interface(typed)
    # Gloo would resolve the name of the host to find its interface; on many clusters names do not resolve.
    if file is None and (interface := interface_towards(os.environ["MASTER_ADDR"])):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        dist.init_process_group(
            backend,
            init_method=None if file is None else f"file://{file}",
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=JOIN_SECONDS),
            device_id=device,
        )
    except (RuntimeError, ValueError) as error:  # torch's, of a rank that never came
        address = str(file) if file else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DistributedError(
            f"rank {rank.rank} of {rank.world_size} cannot join at {address}"
            f"{f' with GLOO_SOCKET_IFNAME={typed} of your shell' if typed else ''}: {error}"
        ) from error


def _check_interface(names: str) -> None:
    """Refuse interfaces that this host has not: gloo names them, and not the variable of the user's shell."""
    present = [name for _, name in socket.if_nameindex()]
    if names and (missing := [name for name in names.split(",") if name not in present]):
        raise UsageError(
            f"GLOO_SOCKET_IFNAME={names}: {socket.gethostname()} has no interface {', '.join(missing)}, "
            f"but {', '.join(present)}; unset the variable, and jobkit chooses"
        )


def leave() -> None:
    """Take the process group apart, after everything is done."""
    if dist.is_initialized():
        dist.destroy_process_group()
