"""Buckets from the first sending trainer to the workers of all engines, by a broadcast over one process group.

The group is made in the first sync and kept; the first trainer is its rank 0, the workers follow engine by engine. Each
worker has slots of its own. It awaits the next bucket in one while it lands the other, so that a trainer never waits
for a worker that is busy, and hears of what went wrong there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist

from rljob_worker.devices.base import Group
from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.meeting import reason_of_end
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.route import Place
from rljob_worker.weightsync.slots import SLOT_COUNT, Slots

ROOT = 0
_LOOK_SECONDS = 0.0002
_ENDED_SECONDS = 0.05
_PATIENCE = 1.0
"""Seconds after the deadline in which the group's own library may name the missing members."""


class Broadcast:
    """One member of the group.

    Args:
        group: the process group.
        slots: of this member.
        seconds: time-out of a broadcast.
    """

    def __init__(self, group: Group, slots: Slots, seconds: float) -> None:
        self._group: Group | None = group
        self._slots = slots
        self._options = dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = ROOT, 0
        self._options.timeout = timedelta(seconds=seconds)
        self._awaited: dist.Work | None = None

    @classmethod
    def join(cls, place: Place, version: int, deadline: float) -> Broadcast:
        """Make the group, in all its members at once.

        Args:
            place: of this member.
            version: the sync that it is made in, which tells it from one that a failed sync left behind.
            deadline: latest return (`time.monotonic()`).

        Raises:
            WeightSyncError: not all members came in time, or the sync was ended from outside meanwhile.
        """
        device, meeting = place.device, place.parties.meeting
        store = place.parties.store(deadline)
        size = 1 + place.engines * meeting.workers
        seconds = max(0.001, deadline - time.monotonic())

        def make() -> Broadcast:
            device.set_current()
            # A connection of its own: one is taken for as long as somebody waits on it.
            connected = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
            own = dist.PrefixStore(f"broadcast/{version}", connected)
            group = device.join_group(own, place.member, size, meeting.address, timedelta(seconds=seconds))
            made = cls(group, place.slots, meeting.seconds)
            # HCCL and NCCL connect in the first broadcast.
            group.broadcast([torch.zeros(1, device=device.torch_device)], made._options).wait()
            return made

        late = f"the group of the broadcast, {size} processes, did not come together"
        return _unless_ended(make, store, version, deadline, late)

    def serves(self, version: int) -> bool:
        """Any: the group is kept."""
        return True

    def send(self, bucket: Bucket, deadline: float, look: Callable[[], None]) -> None:
        """Bring what is in the root's slot into those of all members, see `Carrier`."""
        work = self._start(bucket)
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise WeightSyncError(f"bucket {bucket.index}: deadline passed while the engines were to take it")
            look()
            time.sleep(_LOOK_SECONDS)
        _finish(work, bucket, "the broadcast to the engines")

    def expect(self, bucket: Bucket) -> None:
        """Have a bucket come into its slot beside whatever this member does, see `Carrier`."""
        self._awaited = self._start(bucket)

    def receive(self, bucket: Bucket) -> None:
        """Wait until the bucket that was expected is there, see `Carrier`."""
        assert self._awaited is not None
        awaited, self._awaited = self._awaited, None
        _finish(awaited, bucket, "the broadcast of the first trainer")

    def close(self) -> None:
        """Leave the group; what it still awaits is waited for by a thread: gloo lets none go before that is over."""
        leaving = [self._awaited, self._group]
        self._awaited = self._group = None
        threading.Thread(target=leaving.clear, name="leave-broadcast", daemon=True).start()

    def _start(self, bucket: Bucket) -> dist.Work:
        assert self._group is not None, "nothing is sent or expected after close"
        content = self._slots.tensor(bucket.index % SLOT_COUNT, 0, torch.uint8, (bucket.nbytes,))
        return self._group.broadcast([content], self._options)


def _unless_ended(
    make: Callable[[], Broadcast], store: dist.Store, version: int, deadline: float, late: str
) -> Broadcast:
    """Object from `make`, made in a thread that is left alone when the sync ends: nothing wakes a wait for a dead peer.

    Raises:
        WeightSyncError: `late`, and why.
    """
    made: Future[Broadcast] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="join-broadcast", daemon=True).start()
    while not wait([made], _ENDED_SECONDS).done:
        if (reason := reason_of_end(store, version)) is not None:
            raise WeightSyncError(f"{late}: {reason}")
        if time.monotonic() > deadline + _PATIENCE:
            raise WeightSyncError(f"{late}: deadline passed")
    try:
        return made.result()
    except RuntimeError as error:
        raise WeightSyncError(f"{late}: {error}") from error


def _finish(work: dist.Work, bucket: Bucket, what: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise WeightSyncError(f"bucket {bucket.index}: {what} failed: {error}") from error
