"""torch's TCP stores, on one address of a node: torch's own default is every address of the machine."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from rljob_worker.host.sockets import listen


def serve_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A store that listens on one address of this machine; port 0: any.

    Raises:
        OSError: it cannot listen there.
    """
    listener = listen(host, port)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Another process's store, waited for as long as any of its keys; torch.distributed.DistNetworkError then."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
