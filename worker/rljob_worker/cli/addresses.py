"""Addresses of Ray clusters, judged before Ray is imported and waits for one."""

from __future__ import annotations

import re
import socket
import time

from rljob_worker.errors import JobError, UserError
from rljob_worker.waiting import waiting_for

_FORM = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65535
_CONNECT_SECONDS = 10.0
_REFUSED_SECONDS = 4.0
"""Seconds for which a port is tried where nothing listens: a Ray that is being started will in a moment."""
_POLL_SECONDS = 0.5


def check_ray_address(option: str, address: str) -> None:
    """Refuse what is no address of a Ray cluster; `auto` and Ray's own `ray://` are Ray's to judge.

    Raises:
        UserError: it is not HOST:PORT.
        JobError: there is no such host, or nothing listens there, which may be so for a while.
    """
    if address == "auto" or address.startswith("ray://"):
        return
    found = _FORM.fullmatch(address)
    if found is None or not 0 < int(found["port"]) <= _MAX_PORT:
        raise UserError(f"{option}: {address!r} is no address of a Ray cluster; HOST:PORT is, such as 10.0.0.1:6379")
    host, port = found["host"].strip("[]"), int(found["port"])
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else "no name of a host"
        raise JobError(f"{option}: {address}: there is no host {found['host']} ({why})") from None
    try:
        with waiting_for(f"Ray at {address} ({option})", _CONNECT_SECONDS):
            _connect(host, port)
    except OSError as error:
        hint = "; unset RAY_ADDRESS to have a Ray started for this job alone" if option == "RAY_ADDRESS" else ""
        why = error.strerror or str(error)
        raise JobError(f"{option}: no Ray cluster answers at {address}: {why} (is it still running?){hint}") from None


def _connect(host: str, port: int) -> None:
    end = time.monotonic() + _REFUSED_SECONDS
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)
