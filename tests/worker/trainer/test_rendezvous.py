from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from support.ports import free_port
from torch.distributed import HashStore, TCPStore

from rljob_worker.host.sockets import listen
from rljob_worker.trainer.rendezvous import Notices, rendezvous

SECONDS = timedelta(seconds=5)


def listening() -> set[str]:
    connections = psutil.Process().net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_ranks_of_one_node_meet_without_a_socket(tmp_path: Path) -> None:
    before = listening()
    ranks = [rendezvous(f"file://{tmp_path}/store", rank, SECONDS) for rank in range(2)]
    ranks[0].store.set("key", "value")
    assert ranks[1].store.get("key") == b"value"
    for generation in range(1, 5):
        stores = [rank.make(generation) for rank in ranks]
        stores[1].set("generation", str(generation))
        assert stores[0].get("generation") == str(generation).encode()
        for rank in ranks:
            rank.made(generation)
        del stores
    assert listening() == before
    assert len(list(tmp_path.iterdir())) <= 4


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_tcp_store_listens_on_one_address_only(host: str) -> None:
    before = listening()
    place = f"tcp://[{host}]:{free_port(host)}" if ":" in host else f"tcp://{host}:{free_port(host)}"
    ranks = [rendezvous(place, rank, SECONDS) for rank in range(2)]
    stores = [rank.make(1) for rank in ranks]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    assert listening() - before <= {host}


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}"):
            rendezvous(f"tcp://127.0.0.1:{port}", 0, SECONDS)


@pytest.mark.parametrize("place", ["env://", "tcp://host", "file://"])
def test_other_places_are_refused(place: str) -> None:
    with pytest.raises(ValueError, match=r"expected file:///path or tcp://host:port"):
        rendezvous(place, 0, SECONDS)


def test_a_notice_of_a_stranger_counts_as_none() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=socket.dup(listener.fileno())
        )
    notices = Notices("the job's secret")
    stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    notices.post(store, "rljob/stop/0/1", 7)
    for value in ("0", "7", "7 ", "0 " + store.get("rljob/stop/0/1").decode().split()[1], "x" * 100, b"\xff\xfe"):
        stranger.set("rljob/stop/0/1", value)
        assert notices.read(store, "rljob/stop/0/1") is None
        stranger.set("rljob/stop/0/2", value)
        assert notices.read(store, "rljob/stop/0/2") is None
    Notices("another").post(stranger, "rljob/stop/0/1", 0)
    assert notices.read(store, "rljob/stop/0/1") is None


def test_a_notice_is_bound_to_its_key() -> None:
    store, notices = HashStore(), Notices("secret")
    assert notices.read(store, "a") is None
    notices.post(store, "a", 3)
    assert Notices("secret").read(store, "a") == 3
    store.set("b", store.get("a"))
    assert notices.read(store, "b") is None
