"""The interface of a route: how weights get from trainers to engines, and what it makes of each end.

The driver chooses one route for a job (`routes.py` has them) and gives the same value to every trainer and engine:

    end = route.make_sender(rank, plan, exchange)        # in a trainer: mailbox, slots, delivery
    parties = route.parties()                            # in an engine: finds plan and mailbox
    receiver = route.make_receiver(device, names, ...)   # in each worker of an engine: slots, arrival

Plan, checksums, verification and commit are the same for all routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rljob_worker.devices import Device
from rljob_worker.weightsync.device_ipc import Exchange
from rljob_worker.weightsync.mailbox import Mailbox
from rljob_worker.weightsync.meeting import NetworkParties, Parties
from rljob_worker.weightsync.plan import Bucket, SyncPlan
from rljob_worker.weightsync.slots import Arrived, Held, Slots


class Route(Protocol):
    """Chosen once for a job; small, and the same in every process but for its own node's address."""

    @property
    def delivers(self) -> bool:
        """Whether engines have slots of their own, to which the first sending trainer brings each bucket."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether engines copy from the trainers' own parameters, whole modules at a time."""
        ...

    def engines(self, on_node: int) -> int:
        """Number of engines that one trainer's sync serves, of which `on_node` are on its node."""
        ...

    def senders(
        self, rank: int, nodes: Sequence[list[int]], groups: Sequence[list[int]]
    ) -> tuple[list[int], list[int]]:
        """Trainers whose pieces make the plan that concerns this rank, and those of them that reach its engines.

        Args:
            rank: of a trainer.
            nodes: the ranks by node.
            groups: the ranks by sets of nodes that hold whole models.
        """
        ...

    def parties(self) -> Parties:
        """A process's way to the others."""
        ...

    def make_sender(self, trainer: int, plan: SyncPlan, exchange: Exchange | None, held: Held) -> Sender:
        """A trainer's end. The first sending trainer makes what the others look for.

        Raises:
            WeightSyncError: no room for the slots, or a parameter cannot be shared.
            OSError: the port of the store is taken.
            ValueError: the folder's path is too long for a socket.
        """
        ...

    def make_receiver(self, device: Device, names: Sequence[str], slot_bytes: int, deadline: float) -> Receiver:
        """The end of one worker of an engine.

        Args:
            device: the worker's.
            names: of the trainers' slots in host memory.
            slot_bytes: size of a slot.
            deadline: latest return (`time.monotonic()`).

        Raises:
            WeightSyncError: the slots are not there.
        """
        ...

    def to_json(self) -> str:
        """Text that `routes.route_from` reads."""
        ...


class Sender(Protocol):
    """A trainer's end of a route."""

    mailbox: Mailbox | None
    """None in a rank that sends nothing."""

    @property
    def delivers(self) -> bool:
        """Whether this rank brings filled buckets to engines with slots of their own."""
        ...

    @property
    def spreads(self) -> bool:
        """Whether ranks of an exchange bring each other's pieces into their slots."""
        ...

    def slots(self, deadline: float) -> Slots:
        """The slots that this rank writes into; WeightSyncError when the rank that makes them has not by `deadline`."""
        ...

    def deliver(self, bucket: Bucket, version: int, deadline: float, look: Callable[[], None]) -> None:
        """Bring a filled bucket to all engines by `deadline` (`time.monotonic()`).

        Args:
            bucket: the one that is in its slot.
            version: of the sync.
            deadline: latest return.
            look: called now and then meanwhile; what it raises ends the wait.

        Raises:
            WeightSyncError: it could not be sent, or an engine is gone.
        """
        ...

    def abandon(self) -> None:
        """Drop what a sync that failed left behind on the way."""
        ...

    def close(self) -> None:
        """Close the sockets and drop the slots; the rank that made them removes them."""
        ...


class Receiver(Protocol):
    """The end of one worker of an engine."""

    slots: Slots
    arrived: Arrived

    def join(self, plan: SyncPlan, engine: int, worker: int, version: int, anew: bool, deadline: float) -> None:
        """Take part in what brings the buckets here; collective over the workers of all engines.

        Args:
            plan: that of the sync.
            engine: number of the worker's engine.
            worker: rank of the worker in it.
            version: of the sync.
            anew: the sync before did not end well, and neither did what it used.
            deadline: latest return (`time.monotonic()`).

        Raises:
            WeightSyncError: not all others came in time.
        """
        ...

    def expect(self, bucket: Bucket) -> None:
        """The bucket is the next that is received; it may come into its slot from now on."""
        ...

    def receive(self, bucket: Bucket) -> None:
        """Have the bucket in its slot, now that the trainers filled it; WeightSyncError when it does not come."""
        ...

    def close(self) -> None:
        """Give the slots back, and leave what brought the buckets."""
        ...


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one member among those that a network brings buckets to."""

    device: Device
    """Device of its slots."""
    parties: NetworkParties
    engines: int
    """Engines of the plan."""
    member: int
    """0: the first sending trainer; the workers follow engine by engine."""
    slots: Slots


class Carrier(Protocol):
    """One member of what brings buckets over a network: member 0 sends, the workers of all engines receive."""

    def serves(self, version: int) -> bool:
        """Whether it is of use in this sync too."""
        ...

    def send(self, bucket: Bucket, deadline: float, look: Callable[[], None]) -> None:
        """See `Sender.deliver`."""
        ...

    def expect(self, bucket: Bucket) -> None:
        """See `Receiver.expect`."""
        ...

    def receive(self, bucket: Bucket) -> None:
        """See `Receiver.receive`."""
        ...

    def close(self) -> None:
        """Leave nothing behind; nothing the second time."""
        ...


MakeCarrier = Callable[[Place, int, float], Carrier]
"""(place, version, deadline): becomes a member of a carrier, see `routes.BroadcastRoute.carrier`."""
