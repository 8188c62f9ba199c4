"""A trainer's end of a route: its mailbox, its slots, and what brings full slots to engines elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.errors import WeightSyncError
from rljob_worker.weightsync.broadcast import ROOT
from rljob_worker.weightsync.device_ipc import DeviceIpc, Exchange
from rljob_worker.weightsync.mailbox import Mailbox, engine_name, trainer_name
from rljob_worker.weightsync.meeting import HostParties, NetworkParties, Parties
from rljob_worker.weightsync.plan import Bucket, SyncPlan
from rljob_worker.weightsync.route import Carrier, MakeCarrier, Place
from rljob_worker.weightsync.shared_memory import SharedMemory
from rljob_worker.weightsync.slots import Slots


class MeetingSender:
    """Common to all routes: the first sending trainer tells the plan, and makes the slots in host memory."""

    spreads = True

    def __init__(
        self, parties: Parties, trainer: int, plan: SyncPlan, own: Slots | None, names: tuple[str, ...] = ()
    ) -> None:
        """Meet the others.

        Args:
            parties: the others.
            trainer: this rank's number in the plan.
            plan: as the engines see it.
            own: slots that this rank alone writes into; None: all ranks write into those of the first.
            names: what tells `own` from others', where they have no names.
        """
        self.mailbox: Mailbox | None = None
        self._parties, self._plan, self._slots = parties, plan, own
        if trainer not in plan.trainers:
            return
        first = trainer == plan.trainers[0]
        if first:
            parties.open()
        peers = [*map(trainer_name, plan.trainers), *map(engine_name, range(plan.engines))]
        self.mailbox = parties.mailbox(trainer_name(trainer), peers)
        if first:
            if self._slots is None:
                self._slots = shared = SharedMemory.create(parties.run_name, plan.slot_bytes)
                names = shared.names
            parties.publish(plan, names)

    def slots(self, deadline: float) -> Slots:
        """See `Sender`."""
        if self._slots is None:
            plan, names = self._parties.find(deadline)
            if plan.fingerprint != self._plan.fingerprint:
                raise WeightSyncError(f"{trainer_name(plan.trainers[0])} works by another plan")
            self._slots = SharedMemory.attach(names, plan.slot_bytes)
        return self._slots

    def close(self) -> None:
        """See `Sender`."""
        if self.mailbox is not None:
            self.mailbox.close()
        if self._slots is not None:
            self._slots.close()


class HostSender(MeetingSender):
    """Sender where engines see the slots that trainers write."""

    delivers = False

    def __init__(self, parties: HostParties, trainer: int, plan: SyncPlan, exchange: Exchange | None) -> None:
        """Meet the others; a rank with slots on its device also says where those are."""
        own = exchange.make_slots(trainer, plan.slot_bytes) if exchange is not None else None
        if exchange is not None and isinstance(own, DeviceIpc):
            parties.publish_device(exchange.device.identity(), own.handles())
        super().__init__(parties, trainer, plan, own)

    def deliver(self, bucket: Bucket, version: int, deadline: float, look: Callable[[], None]) -> None:
        """Nothing: a filled slot is where the engines read it."""

    def abandon(self) -> None:
        """Nothing: slots stay as they are."""


class NetworkSender(MeetingSender):
    """Sender where engines have slots of their own: the first sending trainer brings each bucket there."""

    def __init__(
        self,
        make_carrier: MakeCarrier,
        parties: NetworkParties,
        trainer: int,
        plan: SyncPlan,
        exchange: Exchange | None,
    ) -> None:
        """Meet the others."""
        super().__init__(
            parties, trainer, plan, exchange.make_slots(trainer, plan.slot_bytes) if exchange is not None else None
        )
        self.delivers = trainer in plan.trainers[:1]
        self._make_carrier, self._network = make_carrier, parties
        self._device = CpuDevice() if exchange is None else exchange.device
        self._carrier: Carrier | None = None

    def deliver(self, bucket: Bucket, version: int, deadline: float, look: Callable[[], None]) -> None:
        """Bring a slot to all engines, whose workers join when they are ready for the first bucket."""
        if self._carrier is None or not self._carrier.serves(version):
            self.abandon()
            place = Place(self._device, self._network, self._plan.engines, ROOT, self.slots(deadline))
            self._carrier = self._make_carrier(place, version, deadline)
        self._carrier.send(bucket, deadline, look)

    def abandon(self) -> None:
        """Leave the carrier: what a sync that failed left in it is of no use."""
        if self._carrier is not None:
            self._carrier.close()
        self._carrier = None

    def close(self) -> None:
        """See `Sender`."""
        self.abandon()
        super().close()
