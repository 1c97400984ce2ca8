"""Where rank 0 listens, and how the other ranks get there: addresses, ports, network interfaces. Without torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from jobkit.errors import DistributedError
from jobkit.run.files import read_json, write_json

RENDEZVOUS_SECONDS = 300.0
"""How long ranks wait for each other: longer than imports on a cold shared disk, shorter than a time limit."""

PORTS = range(20000, 32768)
"""Below what systems give to outgoing connections by themselves, which would take a port in the very last moment."""


def new_token() -> str:
    """What tells this launch's rank 0 from whoever answers on the port that an earlier launch's file names."""
    return secrets.token_hex(8)


def announce(file: Path, port: int, token: str, nodes: int) -> str:
    """Say where rank 0 listens; returns the address that the file gives first. `nodes` is 0 where nobody knows."""
    addresses = own_addresses(nodes)
    write_json(file, {"addresses": addresses, "port": port, "token": token, "host": socket.gethostname()})
    return addresses[0]


def answering(file: Path) -> Iterator[tuple[str, int, str]]:
    """Each (address, port, token) at which somebody answers, again and again, for the caller to see who it is.

    Raises DistributedError after RENDEZVOUS_SECONDS.
    """
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while time.monotonic() < deadline:
        found = read_json(file, fresh=True)
        for address in found["addresses"] if isinstance(found, dict) else ():
            with contextlib.suppress(OSError):
                # Not longer: a firewall that drops packets never answers, and the next address may.
                socket.create_connection((address, found["port"]), timeout=3).close()
                yield address, int(found["port"]), str(found["token"])
        time.sleep(0.05)  # each look at the file asks the file server: many ranks ask at once, and few times
    raise DistributedError(
        f"rank 0 did not answer within {RENDEZVOUS_SECONDS:g} s ({file}); its log says why, or a firewall does"
    )


def free_port() -> int:
    """A port that nobody listens on here, for a program that will."""
    for port in random.SystemRandom().sample(PORTS, 200):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise DistributedError(f"no free port between {PORTS.start} and {PORTS.stop - 1} on {socket.gethostname()}")


def interface_towards(address: str) -> str | None:
    """The name of the network interface that traffic to `address` leaves by."""
    source = _source_address(address)
    return next((name for name, own in _interfaces().items() if own == source), None)


def own_addresses(nodes: int) -> list[str]:
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
    SIOCGIFADDR = 0x8915
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
