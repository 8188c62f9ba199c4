"""Sockets that listen on one address."""

from __future__ import annotations

import socket

LOOPBACK = "lo"
"""The interface that only processes of this machine reach."""


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
