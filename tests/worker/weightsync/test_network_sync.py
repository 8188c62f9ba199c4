"""Engines on other hosts than the trainers: the same plan, checksums and commit over a broadcast."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import zmq
from peers import Peers, ProcessPeer, broadcast_route, receiver_process, sender_process, threaded_peers
from sync_cases import KeepingEngine, TensorPiece, model_weights, pieces_for
from test_sync import ForgetfulEngine, failed_everywhere

from rljob_worker.weightsync.broadcast import Broadcast
from rljob_worker.weightsync.mailbox import ABORT
from rljob_worker.weightsync.meeting import end_sync
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.protocol import COMMIT
from rljob_worker.weightsync.slots import SLOT_COUNT

SECONDS = 8.0
Look = Callable[[], None]
Send = Callable[[Broadcast, Bucket, float, Look], None]


@pytest.mark.parametrize(
    ("trainers", "engines", "slice_bytes"), [(1, 1, None), (2, 2, None), (3, 1, 1500), (1, 3, 1500)]
)
def test_every_engine_gets_every_tensor(trainers: int, engines: int, slice_bytes: int | None) -> None:
    made = [KeepingEngine() for _ in range(engines)]
    with threaded_peers(trainers, made, slice_bytes=slice_bytes, network=True) as peers:
        for version in (5, 6):
            peers.weights["lm_head.weight"].fill_(version)
            outcomes = peers.sync(version)
            assert [receiver.version for receiver in peers.receivers] == [version] * engines, outcomes
            assert peers.landed_right()
        total = sum(tensor.nbytes for tensor in peers.weights.values())
        sent = [outcomes[f"trainer-{rank}"] for rank in range(trainers)]
        assert sum(report["bytes"] for report in sent) == total
        assert sent[0]["network_seconds"] > 0.0
        assert all(report["network_seconds"] == 0.0 for report in sent[1:])
        assert {outcomes[f"engine-{number}"]["bytes"] for number in range(engines)} == {total}


def test_one_group_is_kept_over_syncs_without_growth() -> None:
    with threaded_peers(2, [KeepingEngine()], network=True) as peers:
        peers.sync_without_growth(30)


def _dropped(original: Send) -> Iterator[Send]:
    yield lambda own, bucket, deadline, look: None


def _twice(original: Send) -> Iterator[Send]:
    def send(own: Broadcast, bucket: Bucket, deadline: float, look: Look) -> None:
        original(own, bucket, deadline, look)
        original(own, bucket, deadline, look)

    yield send


def _flipped(original: Send) -> Iterator[Send]:
    def send(own: Broadcast, bucket: Bucket, deadline: float, look: Look) -> None:
        own._slots.bytes_of(bucket.index % SLOT_COUNT)[bucket.tensors[-1].offset + 3] ^= 64
        original(own, bucket, deadline, look)

    yield send


def _of_the_other_slot(original: Send) -> Iterator[Send]:
    """Leave the bucket before in the slot: it is as stale as it is out of order."""

    def send(own: Broadcast, bucket: Bucket, deadline: float, look: Look) -> None:
        slots = own._slots
        slots.bytes_of(bucket.index % SLOT_COUNT)[:] = slots.bytes_of((bucket.index + 1) % SLOT_COUNT)
        original(own, bucket, deadline, look)

    yield send


def _truncated(original: Send) -> Iterator[Send]:
    def send(own: Broadcast, bucket: Bucket, deadline: float, look: Look) -> None:
        half = Bucket(bucket.index, bucket.nbytes // 2, bucket.tensors)
        original(own, half, deadline, look)

    yield send


@pytest.mark.parametrize("corruption", [_dropped, _twice, _flipped, _of_the_other_slot, _truncated])
@pytest.mark.parametrize("engines", [1, 2])
def test_what_the_network_does_to_a_bucket_fails_the_sync_and_the_next_one_works(
    corruption: Callable[[Send], Iterator[Send]], engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Broadcast.send
    wrong = next(corruption(original))

    def send(own: Broadcast, bucket: Bucket, deadline: float, look: Look) -> None:
        (wrong if bucket.index == 3 else original)(own, bucket, deadline, look)

    with threaded_peers(2, [KeepingEngine() for _ in range(engines)], network=True) as peers:
        peers.sync(1)
        assert peers.landed_right()
        for tensor in peers.weights.values():
            tensor.mul_(2)
        with monkeypatch.context() as patch:
            patch.setattr(Broadcast, "send", send)
            outcomes = peers.sync(2, deadline=3.0)
        failed_everywhere(peers, outcomes, "version 2")
        # What comes twice fills the place of the next: nobody takes that before it is announced.
        reason = "deadline passed" if corruption is _twice else "checksum"
        assert any(reason in str(outcome) for outcome in outcomes.values()), outcomes
        outcomes = peers.sync(3)
        assert [receiver.version for receiver in peers.receivers] == [3] * engines, outcomes
        assert peers.landed_right()


def test_a_group_whose_root_still_holds_it_is_left_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine awaits a bucket in it; gloo ends no group before that came or took 20 s here, and the sync has less."""
    kept = []
    original = Broadcast.send

    def send(own: Broadcast, bucket: Bucket, deadline: float, look: Look) -> None:
        if bucket.index == 3:
            kept.append(own._group)
            raise RuntimeError("no memory")
        original(own, bucket, deadline, look)

    with threaded_peers(1, [KeepingEngine()], network=True) as peers:
        with monkeypatch.context() as patch:
            patch.setattr(Broadcast, "send", send)
            failed_everywhere(peers, peers.sync(1), "bucket 3", "no memory")
        outcomes = peers.sync(2, deadline=15.0)
        kept.clear()
        assert peers.receivers[0].version == 2, outcomes
        assert peers.landed_right()


def test_a_bucket_waits_for_the_slowest_trainer() -> None:
    class SlowPiece(TensorPiece):
        def read(self) -> torch.Tensor:
            time.sleep(0.05)
            return super().read()

        view = read

    weights = model_weights(1)
    pieces = pieces_for(weights, 2)
    pieces[1] = [SlowPiece(p.hf_name, p.hf_shape, p.dim, p.start, p.length, p.whole) for p in pieces[1]]
    with threaded_peers(2, [KeepingEngine()], weights, pieces=pieces, network=True) as peers:
        outcomes = peers.sync(1)
        assert peers.receivers[0].version == 1, outcomes
        assert peers.landed_right()


@pytest.mark.parametrize("fault", ["drop", "raise"])
def test_what_goes_wrong_in_an_engine_is_heard_at_once(fault: str) -> None:
    with threaded_peers(2, [KeepingEngine(), ForgetfulEngine(fault)], network=True) as peers:
        failed_everywhere(peers, peers.sync(1), "bucket 1", "no memory" if fault == "raise" else "worker 0")


class UnreadyEngine(KeepingEngine):
    """Has something against the plan, the first time."""

    failed = False

    def rljob_begin_sync(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self.failed:
            self.failed = True
            raise RuntimeError("no such tensor")
        return super().rljob_begin_sync(message)


def test_an_engine_that_cannot_begin_is_no_riddle_for_those_that_wait_for_it() -> None:
    with threaded_peers(1, [KeepingEngine(), UnreadyEngine()], network=True) as peers:
        outcomes = peers.sync(1, deadline=SECONDS)
        assert "no such tensor" in str(outcomes["trainer-0"])
        assert "no such tensor" in str(outcomes["engine-1"])
        peers.sync(2)
        assert [receiver.version for receiver in peers.receivers] == [2, 2]
        assert peers.landed_right()


def test_peers_that_do_not_come_are_named_at_the_deadline() -> None:
    with threaded_peers(2, [KeepingEngine(), KeepingEngine()], network=True) as peers:
        outcomes = peers.sync(1, deadline=1.0, without=("engine-1", "trainer-1"))
        failed_everywhere(peers, outcomes)
        assert "engine-1" in str(outcomes["trainer-0"])
        peers.sync(2)
        assert [receiver.version for receiver in peers.receivers] == [2, 2]


def test_somebody_from_outside_can_end_a_sync_for_all() -> None:
    """The driver ends a sync when a party is gone: the others would wait for it until their deadline."""
    with threaded_peers(2, [KeepingEngine(), KeepingEngine()], network=True) as peers:
        peers.sync(1)
        outcomes = _ended_without_the_second_engine(peers, 2)
        assert outcomes.keys() == {"trainer-0", "trainer-1", "engine-0"}
        assert all("driver aborted: engine-1 died" in str(outcome) for outcome in outcomes.values()), outcomes


def test_also_while_they_wait_for_one_another_to_make_the_group() -> None:
    with threaded_peers(1, [KeepingEngine(), KeepingEngine()], network=True) as peers:
        outcomes = _ended_without_the_second_engine(peers, 1)
        assert outcomes.keys() == {"trainer-0", "engine-0"}
        assert all("engine-1 died" in str(outcome) for outcome in outcomes.values()), outcomes
        peers.sync(2)
        assert [receiver.version for receiver in peers.receivers] == [2, 2]
        assert peers.landed_right()


def _ended_without_the_second_engine(peers: Peers, version: int) -> dict[str, Any]:
    """Errors of the remaining peers when a sync is ended from outside, long before its deadline."""
    meeting = peers.senders[0].end._network.meeting  # type: ignore[attr-defined]
    timer = threading.Timer(0.3, end_sync, (replace(meeting, engines=2), len(peers.senders), version, "engine-1 died"))
    timer.start()
    return peers.sync(version, deadline=60.0, without=("engine-1",))


def _strangers_messages(inbox: str, stop: threading.Event) -> None:
    """Any message that a peer without the secret can send to an inbox."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.linger = 0
    socket.connect(inbox)
    content = [
        json.dumps({"kind": kind, "sender": "trainer-0", "sync": sync, "body": {"version": sync, "reason": "stranger"}})
        for kind in (ABORT, COMMIT)
        for sync in range(1, 6)
    ]
    frames = [b"", b"\0" * 31, b"\0" * 32, *(code + text.encode() for text in content for code in (b"", b"\0" * 32))]
    while not stop.is_set():
        for frame in frames:
            try:
                socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)
    socket.close()
    context.term()


def test_messages_of_strangers_are_as_if_they_never_came() -> None:
    with threaded_peers(1, [KeepingEngine()], network=True) as peers:
        peers.sync(1)
        stop = threading.Event()
        names = ("trainer-0", "engine-0")
        threads = [
            threading.Thread(target=_strangers_messages, args=(inbox(peers, name), stop), daemon=True) for name in names
        ]
        for thread in threads:
            thread.start()
        try:
            for version in range(2, 6):
                outcomes = peers.sync(version)
                assert peers.receivers[0].version == version, outcomes
                assert peers.landed_right()
            # Nor do they keep a wait from ending.
            outcomes = peers.sync(6, deadline=1.0, without=("engine-0",))
            assert "deadline passed while waiting for room for bucket 0: engine-0" in str(outcomes["trainer-0"])
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)


def inbox(peers: Peers, name: str) -> str:
    address = peers.senders[0].end._parties.mailbox("watcher", [])._endpoints.address(name)
    assert address is not None
    return address


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_a_killed_peer_ends_the_sync_of_the_others_within_the_deadline(victim: str) -> None:
    route = broadcast_route(seconds=4.0)
    trainers = [ProcessPeer(sender_process, route, rank, 2, 2) for rank in range(2)]
    engines = [ProcessPeer(receiver_process, route, i, 4 if victim == "engine" and i == 1 else None) for i in range(2)]
    everybody = [*trainers, *engines]
    try:
        for peer in everybody:
            assert peer.outcome(60) == "up"
        if victim == "trainer":
            for peer in everybody:
                peer.start(1, 20.0)
            assert [peer.outcome(30)[0] for peer in everybody] == ["ok"] * 4
            trainers[0].kill()
        left = [trainers[1], *engines] if victim == "trainer" else [*trainers, engines[0]]
        for peer in left if victim == "trainer" else everybody:
            peer.start(2, 4.0)
        outcomes = [peer.outcome(60) for peer in left]
        assert {kind for kind, _ in outcomes} == {"WeightSyncError"}, outcomes
    finally:
        for peer in everybody:
            peer.stop()
