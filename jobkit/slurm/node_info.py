"""What Slurm says of nodes and partitions."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jobkit.slurm.commands import EVEN_HIDDEN, SHORT_SECONDS, command, config
from jobkit.slurm.job_info import time_of


def dead_node(nodes: str) -> str | None:
    """The first of some nodes, in Slurm's notation, that is down or does not respond; None where all do."""
    rows = command("sinfo", *EVEN_HIDDEN, "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T").splitlines()
    for line in rows:
        name, _, state = line.partition(" ")
        if state.endswith("*") or state.startswith(("down", "fail")):
            return name
    return None


def died_since(node: str, when: float) -> bool:
    """Whether a node is down, or its slurmd was restarted after `when`, in seconds since the epoch."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", command("scontrol", "--oneliner", "show", "node", node)))
    # A node that has rebooted is up again when the job's next start asks: only its slurmd's age tells.
    started = time_of(fields.get("SlurmdStartTime"))
    down = re.search(r"DOWN|NOT_RESPONDING|\*", fields.get("State", "")) is not None
    return down or started is None or started > when


def takes_no_jobs(node: str) -> bool:
    """Whether nothing takes connections where a node's slurmd should: known long before SlurmdTimeout has passed."""
    fields = dict(re.findall(r"(\S+?)=(\S*)", command("scontrol", "--oneliner", "show", "node", node)))
    if not fields.get("NodeAddr") or not fields.get("Port", "").isdigit():
        return False
    try:
        socket.create_connection((fields["NodeAddr"], int(fields["Port"])), timeout=5.0).close()
    except (ConnectionRefusedError, TimeoutError):
        return True
    except OSError as error:  # else nobody knows: its address is none here, or a firewall is between
        return error.errno == errno.EHOSTUNREACH
    return False


def expand(nodes: str) -> list[str]:
    """The names in a list of nodes in Slurm's notation, `node[1-3],node2`, each once."""
    return list(dict.fromkeys(command("scontrol", "show", "hostnames", nodes).split()))


def nodes_left(partition: str, without: Collection[str]) -> int:
    """How many usable nodes of a partition are not among some others."""
    # Drained and down nodes take no job; allocated and completing ones will.
    usable = "--states=idle,mix,alloc,comp"
    names = set(command("sinfo", "--noheader", "--Node", f"--partition={partition}", usable, "--format=%N").split())
    return len(names - set(without))


@dataclass(frozen=True)
class Node:
    """What Slurm has been told that a node has, in whatever state it is."""

    name: str
    cpus: int
    megabytes: int
    gres: Mapping[str, Mapping[str, int]]
    """Its generic resources by name, as `gpu`, and then by type, in small letters; "" where that has none."""

    def count(self, name: str, kind: str = "") -> int:
        """How many resources of a name; of one type, or of any for ""."""
        found = self.gres.get(name, {})
        return found.get(kind, 0) if kind else sum(found.values())


def nodes(partition: str | None, timeout: float = SHORT_SECONDS) -> dict[str, list[Node]]:
    """The nodes of each partition in `a,b`; None is the default one. None are there for what Slurm does not know.

    Where a plugin of the site's may choose another partition than the default one, None is all of them.
    """
    names = set(partition.split(",")) if partition else None
    is_chosen = names is None and config(timeout).get("JobSubmitPlugins") not in (None, "", "(null)")
    found: dict[str, list[Node]] = {}
    rows = command("sinfo", *EVEN_HIDDEN, "--noheader", "--Node", "--format=%P|%N|%c|%m|%G", timeout=timeout)
    for name, *fields in (row.split("|") for row in rows.splitlines() if row.count("|") == 4):
        if name.rstrip("*") in names if names is not None else is_chosen or name.endswith("*"):
            found.setdefault(name.rstrip("*"), []).append(_node(*fields))
    return found


def _node(name: str, cpus: str, megabytes: str, gres: str) -> Node:
    found: dict[str, dict[str, int]] = {}
    for resource, kind, count in re.findall(r"(?:^|,)(\w+):(?:([^:,()]+):)?(\d+)", re.sub(r"\([^)]*\)", "", gres)):
        of_name = found.setdefault(resource, {})
        of_name[kind.lower()] = of_name.get(kind.lower(), 0) + int(count)
    return Node(name, int(cpus), int(megabytes), found)
