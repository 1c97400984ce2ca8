"""A rank of an attempt, once it has a device and a process group."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from jobkit.group import RankGroup
from jobkit.run.config import Config
from jobkit.run.own_outputs import place_outputs
from jobkit.run.rundir import RunDir
from jobkit.train.devices import check_precision, choose_device, group_backend, report
from jobkit.worker.determinism import set_switches, set_variables
from jobkit.worker.disks import Disks
from jobkit.worker.launcher import Topology
from jobkit.worker.rendezvous import Rendezvous


@dataclass(frozen=True)
class Rank:
    """Which rank of which attempt this process is, and its device and group."""

    run: RunDir
    config: Config
    attempt: int
    topology: Topology
    device: torch.device
    group: RankGroup
    """All ranks, for agreements at step boundaries."""
    joined: float = 0.0
    """When the group had formed, in seconds since the epoch."""
    disks: Disks = ()
    """Which ranks share a run directory, where nodes have one each; empty where there is one for all."""
    owns_process_group: bool = True
    """Whether the process group ends with the attempt; one that the script formed is the script's."""

    @property
    def is_main(self) -> bool:
        return self.topology.rank == 0

    @property
    def devices(self) -> list[torch.device]:
        """`device`, and with several `gpus_per_task` those after it: each has a generator of its own."""
        if self.device.index is None:
            return [self.device]
        first, count = self.device.index, max(1, self.config.resources.devices_per_rank)
        return [torch.device(self.device.type, first + number) for number in range(count)]


def join(found: Rendezvous, run: RunDir, config: Config, attempt: int, disks: Disks = ()) -> Rank:
    """Choose this rank's device and form the process group, on all ranks of a rendezvous together.

    Raises DistributedError on all of them where one has no device.
    """
    topology, config = found.topology, place_outputs(config, run)

    def choose() -> tuple[torch.device, str]:
        gpus = config.resources.devices_per_rank
        set_variables(config.deterministic, os.environ)
        device = choose_device(config.device, gpus, topology.local_rank, topology.local_world_size)
        check_precision(device, config.precision)
        set_switches(config.deterministic)
        return device, group_backend(device, config.backend)

    # Together: a rank that failed alone would leave the others waiting in init_process_group, for minutes.
    device, backend = found.group.all_or_none(choose)
    group = found.form_group(backend)
    rank = Rank(run, config, attempt, topology, device, group, time.time(), disks, found.store is not None)
    where = report(device, backend, topology.rank, topology.nodes, group.gather)
    if rank.is_main or "JOBKIT_LOGS" in os.environ:  # elsewhere all ranks print into one terminal
        print(where, flush=True)
    return rank
