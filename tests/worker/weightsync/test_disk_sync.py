"""Buckets as files of a folder that all nodes see: the same plan, checksums and commit as over a broadcast."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peers import Peers, threaded_peers
from sync_cases import KeepingEngine
from test_sync import failed_everywhere

from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.shared_disk import SharedDisk
from rljob_worker.weightsync.slots import SLOT_COUNT

Look = Callable[[], None]


def bucket_files(peers: Peers) -> list[Path]:
    return sorted(Path(peers.folder, "buckets").iterdir())


@pytest.mark.parametrize(
    ("trainers", "engines", "slice_bytes"), [(1, 1, None), (2, 2, None), (3, 1, 1500), (1, 3, 1500)]
)
def test_every_engine_gets_every_tensor(trainers: int, engines: int, slice_bytes: int | None) -> None:
    made = [KeepingEngine() for _ in range(engines)]
    with threaded_peers(trainers, made, slice_bytes=slice_bytes, disk=True) as peers:
        for version in (5, 6):
            peers.weights["lm_head.weight"].fill_(version)
            outcomes = peers.sync(version)
            assert [receiver.version for receiver in peers.receivers] == [version] * engines, outcomes
            assert peers.landed_right()
            assert len(bucket_files(peers)) == SLOT_COUNT, "a file stays until its slot is filled again"
        assert os.stat(peers.folder + "/buckets").st_mode & 0o777 == 0o700
        assert {outcomes[f"engine-{number}"]["bytes"] for number in range(engines)} == {
            sum(tensor.nbytes for tensor in peers.weights.values())
        }


def test_many_syncs_leave_nothing_behind() -> None:
    with threaded_peers(2, [KeepingEngine()], disk=True) as peers:
        peers.sync_without_growth(30)
        assert len(bucket_files(peers)) == SLOT_COUNT


def _dropped(path: Path, before: Path) -> None:
    path.unlink()


def _flipped(path: Path, before: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


def _stale(path: Path, before: Path) -> None:
    """Write the content of the bucket before: out of order, and of the slot's size at least."""
    size = path.stat().st_size
    path.write_bytes((before.read_bytes() * 9)[:size])


def _truncated(path: Path, before: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _a_folder(path: Path, before: Path) -> None:
    path.unlink()
    path.mkdir()


CORRUPTIONS = [
    (_dropped, "No such file"),
    (_flipped, "checksum"),
    (_stale, "checksum"),
    (_truncated, "bytes"),
    (_a_folder, "Is a directory"),
]


@pytest.mark.parametrize(("corruption", "reason"), CORRUPTIONS)
@pytest.mark.parametrize("engines", [1, 2])
def test_what_a_volume_does_to_a_bucket_fails_the_sync_and_the_next_one_works(
    corruption: Callable[[Path, Path], None], reason: str, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SharedDisk.send

    def send(own: SharedDisk, bucket: Bucket, deadline: float, look: Look) -> None:
        original(own, bucket, deadline, look)
        if bucket.index == 3:
            corruption(own._path(3), own._path(2))

    with threaded_peers(2, [KeepingEngine() for _ in range(engines)], disk=True) as peers:
        peers.sync(1)
        assert peers.landed_right()
        for tensor in peers.weights.values():
            tensor.mul_(2)
        with monkeypatch.context() as patch:
            patch.setattr(SharedDisk, "send", send)
            patch.setattr(SharedDisk, "_opened", _at_once)
            outcomes = peers.sync(2, deadline=5.0)
        failed_everywhere(peers, outcomes, "version 2")
        assert any(reason in str(outcome) for outcome in outcomes.values()), outcomes
        peers.sync(3)
        assert [receiver.version for receiver in peers.receivers] == [3] * engines
        assert peers.landed_right()


def _at_once(own: SharedDisk, path: Path) -> Any:
    return path.open("rb")


def test_a_bucket_that_is_written_twice_is_the_same_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SharedDisk.send

    def send(own: SharedDisk, bucket: Bucket, deadline: float, look: Look) -> None:
        original(own, bucket, deadline, look)
        original(own, bucket, deadline, look)

    monkeypatch.setattr(SharedDisk, "send", send)
    with threaded_peers(1, [KeepingEngine()], disk=True) as peers:
        peers.sync(1)
        assert peers.receivers[0].version == 1
        assert peers.landed_right()


def test_a_bucket_that_the_first_trainer_never_writes_ends_the_sync_within_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another trainer has filled it, and says so."""
    original = SharedDisk.send

    def send(own: SharedDisk, bucket: Bucket, deadline: float, look: Look) -> None:
        while bucket.index == 2 and time.monotonic() < deadline:
            look()
            time.sleep(0.01)
        original(own, bucket, deadline, look)

    with threaded_peers(3, [KeepingEngine(), KeepingEngine()], slice_bytes=1500, disk=True) as peers:
        with monkeypatch.context() as patch:
            patch.setattr(SharedDisk, "send", send)
            failed_everywhere(peers, peers.sync(1, deadline=2.0), "version 1")
        peers.sync(2)
        assert peers.landed_right()


def test_nothing_stays_of_a_meeting_that_is_over() -> None:
    with threaded_peers(1, [KeepingEngine()], disk=True) as peers:
        peers.sync(1)
        assert bucket_files(peers)
        peers.senders[0].close()
        assert not Path(peers.folder, "buckets").exists()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with threaded_peers(1, [KeepingEngine()], disk=True) as peers:
        Path(peers.folder, "buckets").write_text("a file")
        outcomes = peers.sync(1, deadline=5.0)
        failed_everywhere(peers, outcomes, "version 1", "buckets cannot be written there")
        Path(peers.folder, "buckets").unlink()
        peers.sync(2)
        assert peers.landed_right()
