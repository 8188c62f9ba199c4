from __future__ import annotations

import time
from pathlib import Path

import pytest

from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.mailbox import PeerAborted
from rljob_worker.weightsync.meeting import HostParties


def nobody() -> str:
    return "engine-9"


def soon() -> float:
    return time.monotonic() + 5.0


def test_messages_of_other_syncs_are_dropped_or_kept(tmp_path: Path) -> None:
    one, two = (HostParties(tmp_path).mailbox(name, ["one", "two"]) for name in ("one", "two"))
    try:
        for sync in (1, 3, 2):
            one.send(["two"], "ready", sync, number=sync)
        one.abort(1, "an earlier one")
        assert two.receive(2, soon(), nobody).body == {"number": 2}
        assert two.receive(3, soon(), nobody).body == {"number": 3}
        with pytest.raises(WeightSyncError, match="waiting for engine-9"):
            two.receive(3, time.monotonic() + 0.05, nobody)
        one.abort(4, "disk full")
        with pytest.raises(PeerAborted, match="one aborted: disk full"):
            two.receive(4, soon(), nobody)
    finally:
        one.close()
        two.close()


def test_a_message_waits_for_a_peer_that_is_not_there_yet(tmp_path: Path) -> None:
    early = HostParties(tmp_path).mailbox("early", ["late"])
    early.send(["late"], "ready", 1)
    late = HostParties(tmp_path).mailbox("late", ["early"])
    try:
        assert late.receive(1, soon(), nobody).sender == "early"
    finally:
        early.close()
        late.close()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="107; use a shorter folder"):
        HostParties(tmp_path / ("x" * 100)).mailbox("one", [])


def test_an_unreadable_message_is_an_error(tmp_path: Path) -> None:
    one, two = (HostParties(tmp_path).mailbox(name, ["one", "two"]) for name in ("one", "two"))
    try:
        one._outbox("two").send(b"\x00not json")
        with pytest.raises(WeightSyncError, match="unreadable message"):
            two.receive(1, soon(), nobody)
    finally:
        one.close()
        two.close()
