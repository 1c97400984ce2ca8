"""Settings of a cluster, and the texts of its configuration files. Nothing here starts a process or writes a file."""

from __future__ import annotations

import os
import pwd
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARKER = "# Written by slurmbox"
ACCOUNT = "slurmbox"  # the account of all users, where accounting is on

SLURM_CONF = """\
{marker}; `slurmbox down` removes this file.
ClusterName={name}
MaxArraySize={max_array_size}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
# A requeued job waits until its old credential has expired.
AuthType=auth/munge
AuthInfo=socket={dir}/munge/socket,cred_expire={cred_expire}
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd.%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/%n.log
MailProg=/bin/true

# No cgroups: they need root. The sizes of the nodes are made up and override what slurmd detects.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu,npu

# Quick answers: tests wait for each of these.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=10000,bf_interval=1
SlurmdTimeout={slurmd_timeout}
MessageTimeout={message_timeout}
KillWait={kill_wait}
OverTimeLimit=0
MinJobAge=300
ReturnToService=2
JobRequeue={requeue:d}
PreemptType=preempt/partition_prio
PreemptMode={preempt}
{options}
{node_lines}
PartitionName=low  Nodes=ALL Default=YES PriorityTier=1 PreemptMode={preempt} GraceTime={grace} MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE
{partitions}
{extra}
"""
NODE = (
    "NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} Sockets=1 CoresPerSocket={cpus}"
    " ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:{gpus},npu:{npus} State=UNKNOWN"
)
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={dir}/munge/socket
AccountingStorageEnforce=limits
JobAcctGatherType=jobacct_gather/linux
"""
SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={dir}/munge/socket
DbdHost=localhost
DbdPort={port}
SlurmUser={user}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={user}
StorageLoc=slurm
PidFile={dir}/run/slurmdbd.pid
LogFile={dir}/log/slurmdbd.log
"""


def option(default: Any, text: str, **more: Any) -> Any:
    """Return a field of `Settings` with its default and its help text."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What may differ between two clusters. Each field is an option of `slurmbox up` too."""

    name: str = option("slurmbox", "ClusterName")
    nodes: int = option(4, "number of nodes: node1, node2 ...")
    gpus: int = option(8, "fake GPUs per node")
    npus: int = option(8, "fake NPUs per node: a Gres that Slurm does not treat as a GPU")
    cpus: int = option(16, "fake CPUs per node")
    grace: int = option(20, "seconds from a preemption's signal to its kill (GraceTime)")
    preempt: str = option("requeue", "what preemption does to the job", choices=["requeue", "cancel"])
    user_signal: bool = option(False, "preemption sends the signal of sbatch --signal instead of SIGTERM")
    requeue: bool = option(True, "jobs may be requeued (JobRequeue)")
    kill_wait: int = option(10, "seconds from SIGTERM to SIGKILL; Slurm's default is 30")
    # The next two are Slurm's defaults: smaller ones would hide what users wait for.
    cred_expire: int = option(120, "seconds that a requeued job waits before it queues again; below 5 Slurm takes 120")
    slurmd_timeout: int = option(300, "seconds of silence until a node is down")
    message_timeout: int = option(10, "seconds that daemons and commands wait for an answer")
    max_array_size: int = option(1001, "MaxArraySize: highest index of a job array, plus 1")
    prolog: str = option("", "program that slurmd runs before the first step of a job")
    partitions: str = option("", "more PartitionName= lines, separated by newlines")
    extra: str = option("", "more lines of slurm.conf, separated by newlines")
    accounting: bool = option(False, "sacct and limits work: slurmdbd and a private MariaDB; only as root")

    @property
    def node_names(self) -> list[str]:
        """All nodes, node1 first."""
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def port_count(self) -> int:
        """How many ports the daemons need: slurmctld, slurmdbd and a slurmd for each node."""
        return 2 + self.nodes


def user_name() -> str:
    """Return the name of the user who runs this process."""
    return pwd.getpwuid(os.getuid()).pw_name


def render(settings: Settings, directory: Path, ports: list[int]) -> dict[str, str]:
    """Return the text of each configuration file by its name; `ports` has `settings.port_count` free ports."""
    controller_port, accounting_port, *node_ports = ports
    common = {"dir": directory, "user": user_name(), "port": accounting_port}
    options = "SlurmctldParameters=preempt_send_user_signal\n" if settings.user_signal else ""
    options += f"Prolog={settings.prolog}\n" if settings.prolog else ""
    options += ACCOUNTING.format(**common) if settings.accounting else ""
    nodes = zip(settings.node_names, node_ports, strict=True)
    slurm_conf = SLURM_CONF.format(
        **common,
        **vars(settings),
        marker=MARKER,
        host=socket.gethostname().partition(".")[0],
        controller_port=controller_port,
        options=options,
        node_lines="\n".join(NODE.format(node=name, port=port, **vars(settings)) for name, port in nodes),
    )
    gpus = f"Name=gpu File={directory}/gpu/[0-{settings.gpus - 1}]\n" if settings.gpus else ""
    npus = f"Name=npu Count={settings.npus}\n" if settings.npus else ""
    return {"slurm.conf": slurm_conf, "gres.conf": gpus + npus, "slurmdbd.conf": SLURMDBD_CONF.format(**common)}
