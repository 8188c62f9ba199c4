from __future__ import annotations

from types import SimpleNamespace

import pytest

from rljob_worker.rewards.busy_clock import BusyClock


def test_time_in_which_several_are_at_work_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("rljob_worker.rewards.busy_clock.time", SimpleNamespace(perf_counter=lambda: now))
    clock = BusyClock()
    for moment, happens in ((11.0, clock.enter), (12.0, clock.enter), (14.0, clock.exit), (15.0, clock.enter)):
        now = moment
        happens()
    now = 17.0
    assert clock.take() == 6.0, "what goes on counts until now"
    clock.exit()
    now = 18.0
    clock.exit()
    now = 20.0
    with clock:
        now = 20.5
    assert clock.take() == 1.5
    assert clock.take() == 0.0
