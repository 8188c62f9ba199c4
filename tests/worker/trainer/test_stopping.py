from __future__ import annotations

import pytest

from rljob_worker.errors import StopRequested
from rljob_worker.trainer.stopping import StopAgreement


def test_alone_it_skips_from_the_request_on_and_raises_once() -> None:
    stop = StopAgreement(rank=0, world_size=1, leader=0)
    stop.begin_pass()
    assert not stop.skip()
    stop.request()
    assert stop.skip()
    assert stop.skip()
    with pytest.raises(StopRequested):
        stop.finish_pass()
    stop.begin_pass()
    assert not stop.skip()
    stop.finish_pass()


def test_a_request_between_passes_stops_the_next_one() -> None:
    stop = StopAgreement(rank=0, world_size=1, leader=0)
    stop.request()
    stop.begin_pass()
    assert stop.skip()
    with pytest.raises(StopRequested):
        stop.finish_pass()
