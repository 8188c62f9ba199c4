"""The end of a route in one worker of an engine: its slots, and what brings the buckets into them."""

from __future__ import annotations

from rljob_worker.devices import Device
from rljob_worker.weightsync.meeting import NetworkParties
from rljob_worker.weightsync.plan import Bucket, SyncPlan
from rljob_worker.weightsync.route import Carrier, MakeCarrier, Place
from rljob_worker.weightsync.slots import Arrived, InSlots, Slots


class HostReceiver:
    """Receiver in the slots that trainers write: a bucket is there when it is filled."""

    def __init__(self, slots: Slots) -> None:
        """With slots that this worker shares with the trainers."""
        self.slots = slots
        self.arrived: Arrived = InSlots(slots)

    def join(self, plan: SyncPlan, engine: int, worker: int, version: int, anew: bool, deadline: float) -> None:
        """Nothing to take part in."""

    def expect(self, bucket: Bucket) -> None:
        """Nothing: trainers fill its slot."""

    def receive(self, bucket: Bucket) -> None:
        """It is there."""

    def close(self) -> None:
        """Give the slots back."""
        self.slots.close()


class NetworkReceiver:
    """Receiver of buckets that come over a network: each is awaited while the one before it lands."""

    def __init__(self, make_carrier: MakeCarrier, parties: NetworkParties, device: Device, slots: Slots) -> None:
        """With slots of this worker's own."""
        self.slots = slots
        self.arrived: Arrived = InSlots(slots)
        self._make_carrier, self._parties, self._device = make_carrier, parties, device
        self._carrier: Carrier | None = None

    def join(self, plan: SyncPlan, engine: int, worker: int, version: int, anew: bool, deadline: float) -> None:
        """See `Receiver`; what was joined for an earlier sync is kept where it is of use."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None and (anew or not carrier.serves(version)):
            carrier.close()
            carrier = None
        if carrier is None:
            member = 1 + engine * self._parties.meeting.workers + worker
            place = Place(self._device, self._parties, plan.engines, member, self.slots)
            carrier = self._make_carrier(place, version, deadline)
        self._carrier = carrier
        carrier.expect(plan.buckets[0])

    def expect(self, bucket: Bucket) -> None:
        """See `Receiver`."""
        self._joined().expect(bucket)

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver`."""
        self._joined().receive(bucket)

    def close(self) -> None:
        """Leave the carrier, and give the slots back."""
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None
        self.slots.close()

    def _joined(self) -> Carrier:
        assert self._carrier is not None, "buckets are asked for after `join`"
        return self._carrier
