"""Ports for servers that cannot find one themselves."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

_LOWEST_OF_KERNEL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_COUNT = 4000
_LANES = 4
_LANE = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw")) % _LANES
"""Each of the pytest processes that run side by side has ports of its own: none is given one that another was given and
that nobody listens on yet."""
_next = itertools.count(_LANE + _LANES * os.getpid() * 97, _LANES)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that nobody listens on, other than those that this process was given before.

    Below those that the kernel gives out: a server may start half a minute later, and until then any connection of any
    process could be given one of the kernel's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_COUNT // _LANES):
        port = _LOWEST_OF_KERNEL - 1 - next(_next) % _COUNT
        with socket.socket(family) as probe:
            # As servers do: what a closed connection left behind is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"all {_COUNT // _LANES} ports of this process below {_LOWEST_OF_KERNEL} are taken on {host}")
