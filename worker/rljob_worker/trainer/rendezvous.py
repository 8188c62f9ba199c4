"""Meeting places of the ranks of a job: key-value stores that nobody else can write.

A writer of a store that process groups are made over can take a rank's place. So ranks of one node meet in files of
a folder that belongs to the job's user alone. Ranks of several nodes need a TCP store, which authenticates nobody:
it listens on the node's own address only (torch's default is every address of the machine), and what is decided over
it carries a code of the job's secret.
"""

from __future__ import annotations

import contextlib
import hmac
import os
from datetime import timedelta
from typing import Protocol
from urllib.parse import urlsplit

from torch.distributed import FileStore, Store, TCPStore

from rljob_worker.devices.stores import connect_store, serve_store


class Rendezvous(Protocol):
    """The stores of one rank."""

    store: Store
    """For the life of the job."""

    def make(self, generation: int) -> Store:
        """The store of one generation of process groups, counted from 1; every rank makes each of them once."""
        ...

    def made(self, generation: int) -> None:
        """This rank has joined the groups of a generation: what is two older can go."""
        ...


def rendezvous(init_method: str, rank: int, timeout: timedelta) -> Rendezvous:
    """Rendezvous of an init method.

    Args:
        init_method: `file:///path` in a folder that nobody else can enter, or `tcp://host:port`, where rank 0 listens.
        rank: this process among all.
        timeout: of each wait for a key.

    Raises:
        ValueError: it is neither.
        OSError: rank 0 cannot listen there.
    """
    parts = urlsplit(init_method)
    if parts.scheme == "file" and parts.path:
        return _InFiles(parts.path, rank, timeout)
    if parts.scheme == "tcp" and parts.hostname and parts.port:
        return _OverTcp(parts.hostname, parts.port, rank, timeout)
    raise ValueError(f"init method {init_method!r}: expected file:///path or tcp://host:port")


class _InFiles:
    def __init__(self, path: str, rank: int, timeout: timedelta) -> None:
        self._path, self._rank, self._timeout = path, rank, timeout
        self.store: Store = self._open(path)

    def make(self, generation: int) -> Store:
        return self._open(f"{self._path}.{generation}")

    def made(self, generation: int) -> None:
        if self._rank == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}.{generation - 2}")

    def _open(self, path: str) -> Store:
        store = FileStore(path, -1)
        store.set_timeout(self._timeout)
        return store


class _OverTcp:
    def __init__(self, host: str, port: int, rank: int, timeout: timedelta) -> None:
        self._host, self._rank, self._timeout = host, rank, timeout
        self.store: Store = self._serve(port) if rank == 0 else self._connect(port)

    def make(self, generation: int) -> Store:
        key = _port_key(generation)
        if self._rank == 0:
            store = self._serve(0)
            self.store.set(key, str(store.port))
            return store
        return self._connect(int(self.store.get(key)))

    def made(self, generation: int) -> None:
        if self._rank == 0:
            self.store.delete_key(_port_key(generation - 2))

    def _connect(self, port: int) -> TCPStore:
        return connect_store(self._host, port, self._timeout)

    def _serve(self, port: int) -> TCPStore:
        return serve_store(self._host, port, self._timeout)


class Notices:
    """Small messages in a store that only holders of the job's secret can write; others' count as not there."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def post(self, store: Store, key: str, value: int) -> None:
        """Write a number under a key."""
        store.set(key, f"{value} {self._code(key, value)}")

    def read(self, store: Store, key: str) -> int | None:
        """The number under a key; None while none of the job's ranks wrote one."""
        if not store.check([key]):
            return None
        number, _, code = store.get(key).decode("ascii", "replace").partition(" ")
        if not number.isdecimal() or not hmac.compare_digest(code.encode(), self._code(key, int(number)).encode()):
            return None
        return int(number)

    def _code(self, key: str, value: int) -> str:
        return hmac.new(self._secret, f"{key} {value}".encode(), "sha256").hexdigest()


def _port_key(generation: int) -> str:
    return f"rljob/store/{generation}"
