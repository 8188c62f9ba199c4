from __future__ import annotations

import threading

import pytest

from rljob_worker.errors import StopRequested
from rljob_worker.trainer.megatron.parallel_state import connected
from rljob_worker.trainer.rendezvous import Notices
from rljob_worker.trainer.stopping import StopAgreement


def test_alone_it_skips_from_the_request_on_and_raises_once() -> None:
    requested = threading.Event()
    stop = StopAgreement(requested, rank=0, world_size=1, leader=0, notices=Notices(""))
    stop.begin_pass()
    assert not stop.skip()
    requested.set()
    assert stop.skip()
    assert stop.skip()
    with pytest.raises(StopRequested):
        stop.finish_pass()
    stop.begin_pass()
    assert not stop.skip()
    stop.finish_pass()


def test_a_request_between_passes_stops_the_next_one() -> None:
    requested = threading.Event()
    stop = StopAgreement(requested, rank=0, world_size=1, leader=0, notices=Notices(""))
    requested.set()
    stop.begin_pass()
    assert stop.skip()
    with pytest.raises(StopRequested):
        stop.finish_pass()


def test_ranks_that_wait_for_one_another_through_others_are_connected() -> None:
    peers = [[0, 1], [0, 1, 4], [2, 3], [2, 3], [1, 4]]
    assert connected(0, peers) == connected(4, peers) == {0, 1, 4}
    assert connected(3, peers) == {2, 3}
