"""What brings filled slots to engines on other nodes: a broadcast, or files in a folder that all nodes see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rljob_worker.devices import Device
from rljob_worker.weightsync.broadcast import ROOT, Broadcast
from rljob_worker.weightsync.meeting import NetworkParties
from rljob_worker.weightsync.plan import Bucket
from rljob_worker.weightsync.shared_disk import SharedDisk
from rljob_worker.weightsync.transport import Transport


class Carrier(Protocol):
    """One member's side: the first sending trainer sends, the workers of all engines receive."""

    def serves(self, version: int) -> bool:
        """Whether it is of use in this sync too."""
        ...

    def send(self, bucket: Bucket, deadline: float, look: Callable[[], None]) -> None:
        """Bring what is in this member's slot to all others by `deadline` (`time.monotonic()`).

        Args:
            bucket: the one that is there.
            deadline: latest return.
            look: called now and then meanwhile; what it raises ends the wait.

        Raises:
            WeightSyncError: it could not be sent, or a member is gone.
        """
        ...

    def expect(self, bucket: Bucket) -> None:
        """The bucket is the next that is received; it may come into its slot from now on."""
        ...

    def receive(self, bucket: Bucket) -> None:
        """Have the bucket in its slot, now that it was filled; WeightSyncError when it does not come."""
        ...

    def close(self) -> None:
        """Leave nothing behind; nothing the second time."""
        ...


def join_carrier(
    device: Device,
    parties: NetworkParties,
    engines: int,
    member: int,
    slots: Transport,
    version: int,
    deadline: float,
) -> Carrier:
    """Become a member of what the meeting brings buckets by; arguments and errors as `Broadcast.join`."""
    folder = parties.meeting.disk
    if folder is None:
        return Broadcast.join(device, parties, engines, member, slots, version, deadline)
    return SharedDisk(Path(folder), version, slots, deadline, first=member == ROOT)
