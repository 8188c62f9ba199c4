"""Addresses of Ray clusters, judged before Ray is imported and waits for one."""

from __future__ import annotations

import re
import socket

from rljob_worker.errors import JobError, UserError

_FORM = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65535


def check_ray_address(option: str, address: str) -> None:
    """Refuse what is no address of a Ray cluster; `auto` and Ray's own `ray://` are Ray's to judge.

    Raises:
        UserError: it is not HOST:PORT.
        JobError: there is no such host, which may be so for a while.
    """
    if address == "auto" or address.startswith("ray://"):
        return
    found = _FORM.fullmatch(address)
    if found is None or not 0 < int(found["port"]) <= _MAX_PORT:
        raise UserError(f"{option}: {address!r} is no address of a Ray cluster; HOST:PORT is, such as 10.0.0.1:6379")
    try:
        socket.getaddrinfo(found["host"].strip("[]"), int(found["port"]), type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else "no name of a host"
        raise JobError(f"{option}: {address}: there is no host {found['host']} ({why})") from None
