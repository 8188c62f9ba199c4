"""Sockets that listen on one address, and what leads to them."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

LOOPBACK = "lo"
"""The interface that only processes of this machine reach."""


def is_local_name(host: str) -> bool:
    """Whether a host, with or without a port, is this machine's name for itself.

    Another name in a request that came here was made to lead here by somebody's DNS.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on one address of this machine; port 0: any."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host} port {port}: {error}") from error
    return listener
