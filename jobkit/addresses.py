"""Addresses of this host, and the network interface towards another one. Names are not used: on many clusters the names
of nodes do not resolve.

The rank's join, the supervisor's listener and `doctor` ask here.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct


def own_addresses(nodes: int) -> list[str]:
    """Numeric addresses of this host, best first; `nodes` is 1 where all processes are on this host."""
    if nodes == 1:
        return ["127.0.0.1"]
    # The address that the host of srun sees, else that of the default route: asking the routing table sends nothing.
    towards = [os.environ.get("SLURM_LAUNCH_NODE_IPADDR", ""), "8.8.8.8"]
    routed = [address for target in towards if target and (address := _source_address(target))]
    return list(dict.fromkeys([*routed, *_interfaces().values()])) or ["127.0.0.1"]


def interface_towards(address: str) -> str | None:
    """The name of the network interface by which traffic to `address` leaves."""
    source = _source_address(address)
    return next((name for name, local in _interfaces().items() if local == source), None)


def _source_address(target: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:  # no route, or a name that does not resolve
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, str]:
    """Interface -> its IPv4 address."""
    SIOCGIFADDR = 0x8915
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses
