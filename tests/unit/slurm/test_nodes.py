"""Nodes and partitions: real records of Slurm 22.05, shortened."""

from __future__ import annotations

import socket

import pytest

from jobkit.slurm import nodes
from jobkit.slurm.commands import fields
from jobkit.slurm.nodes import Needs, Partition, limits_refuse

NODE = (
    "NodeName={} Arch=x86_64 CPUTot=16 Gres=gpu:2 NodeAddr={} Port={} OS=Linux 6.1 #1 SMP  State={} SlurmdStartTime={}"
)


def node(name: str, state: str = "IDLE", address: str = "127.0.0.1", port: int = 1) -> str:
    return NODE.format(name, address, port, state, "2026-03-05T06:27:03")


@pytest.mark.parametrize(
    ("state", "is_dead"),
    [
        ("IDLE", False),
        ("MIXED+DRAIN", False),
        ("IDLE+CLOUD+POWERED_DOWN", False),
        ("DOWN", True),
        ("MIXED*", True),
        ("IDLE+NOT_RESPONDING", True),
        ("DOWN+CLOUD", True),
    ],
)
def test_a_dead_node_is_known_by_its_state(monkeypatch: pytest.MonkeyPatch, state: str, is_dead: bool) -> None:
    monkeypatch.setattr(nodes, "run", lambda *_, **__: f"{node('node1')}\n{node('node2', state)}\n")
    assert nodes.dead_node("node[1-2]") == ("node2" if is_dead else None)
    assert nodes.died_since("node1", 1772692024.0) is False  # a second after its slurmd had started
    assert nodes.died_since("node1", 1772692022.0) is True


@pytest.mark.parametrize(
    ("listed", "address", "listens", "is_alive"),
    [
        ("9.0|node[1-2]\n9.batch|node1\n", "127.0.0.1", True, True),
        ("9.0|node[1-2]\n9.batch|node1\n", "127.0.0.1", False, False),
        ("9.0|node[1-2]\n", "127.0.0.1", True, False),
        ("9.batch|node1\n", "no-such-host.invalid", False, True),  # an address that does not resolve says nothing
    ],
)
def test_the_batch_step_is_alive_while_its_nodes_slurmd_answers(
    monkeypatch: pytest.MonkeyPatch, listed: str, address: str, listens: bool, is_alive: bool
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listens:
            server.listen()
        record = node("node1", address=address, port=server.getsockname()[1])
        monkeypatch.setattr(nodes, "run", lambda *command, **_: listed if command[0] == "squeue" else record)
        assert nodes.batch_step_alive("9") is is_alive


SHORT = (
    "PartitionName=short AllowGroups=ALL AllowQos=ALL Default=NO QoS=N/A DefaultTime=NONE MaxNodes=2 MaxTime=1-00:10:00"
    " MinNodes=1 LLN=NO MaxCPUsPerNode=8 Nodes=node[1-4] OverSubscribe=NO State=UP TotalCPUs=64 TotalNodes=4"
    " DefMemPerNode=UNLIMITED MaxMemPerNode=1000 TRES=cpu=64,mem=4000000M,node=4,billing=64"
)
OPEN = (
    "PartitionName=open Default=YES MaxNodes=UNLIMITED MaxTime=UNLIMITED MaxCPUsPerNode=UNLIMITED Nodes=node[1-3]"
    " State=DOWN TotalCPUs=48 TotalNodes=3 DefMemPerNode=UNLIMITED MaxMemPerCPU=1000"
)


def test_a_partition_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "run", lambda *_, **__: f"{SHORT}\n{OPEN}\n")
    short, default = nodes.partitions("open,short,unknown")
    assert short == Partition("short", 4, min_nodes=1, max_nodes=2, max_seconds=87000, max_cpus=8, max_megabytes=1000)
    assert default == Partition("open", 3, is_default=True, state="DOWN")
    for plugins, names in (("(null)", ["open"]), ("job_submit/lua", ["short", "open"])):
        monkeypatch.setattr(nodes, "config", lambda plugins=plugins: {"JobSubmitPlugins": plugins})
        assert [part.name for part in nodes.partitions(None)] == names


@pytest.mark.parametrize(
    ("names", "needs", "key"),
    [
        ("short", Needs(nodes=2, seconds=87000, cpus=8, megabytes=1000), None),
        ("short", Needs(nodes=3, seconds=60), "resources.nodes"),
        ("short", Needs(nodes=2, seconds=87060), "resources.time"),
        ("short", Needs(nodes=1, seconds=60, cpus=9), "resources.cpus_per_task"),
        ("short", Needs(nodes=1, seconds=60, megabytes=1001), "mem"),
        ("pairs", Needs(nodes=1, seconds=60), "resources.nodes"),
        ("pairs,open", Needs(nodes=1, seconds=60), None),
        ("open", Needs(nodes=3, seconds=9e9, cpus=999, megabytes=9e9), None),
        ("open", Needs(nodes=4, seconds=60), "resources.nodes"),
        ("short,open", Needs(nodes=3, seconds=60), None),  # one of them takes it
        ("short,open", Needs(nodes=5, seconds=60), "resources.nodes"),
        ("", Needs(nodes=5, seconds=60), None),  # partitions that Slurm does not know are sbatch's to refuse
    ],
)
def test_a_job_that_no_partition_ever_starts_is_refused(names: str, needs: Needs, key: str | None) -> None:
    by_name = {"short": nodes.parse_partition(fields(SHORT)), "open": nodes.parse_partition(fields(OPEN))}
    by_name["pairs"] = nodes.parse_partition(fields(SHORT.replace("MinNodes=1", "MinNodes=2")))
    error = limits_refuse([by_name[name] for name in names.split(",") if name], needs)
    assert (error.key if error else None) == key
    if error:
        assert error.found in vars(needs).values() and error.allowed
