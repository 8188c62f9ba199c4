"""The routes: shared memory or device IPC on one host, a broadcast between hosts, files that all nodes see."""

from __future__ import annotations

import importlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter

from rljob_api.spec import WeightTransport
from rljob_worker.devices import Device
from rljob_worker.weightsync.broadcast import ROOT, Broadcast
from rljob_worker.weightsync.device_ipc import DeviceIpc, Exchange
from rljob_worker.weightsync.in_place import InPlaceReceiver, InPlaceSender
from rljob_worker.weightsync.meeting import HostParties, NetworkMeeting, NetworkParties
from rljob_worker.weightsync.plan import SyncPlan
from rljob_worker.weightsync.receivers import HostReceiver, NetworkReceiver
from rljob_worker.weightsync.route import Carrier, Place, Receiver, Route, Sender
from rljob_worker.weightsync.senders import HostSender, NetworkSender
from rljob_worker.weightsync.shared_disk import SharedDisk
from rljob_worker.weightsync.shared_memory import HostMemory, SharedMemory
from rljob_worker.weightsync.slots import SLOT_COUNT, Held, Slots


@dataclass(frozen=True, slots=True)
class HostRoute:
    """Slots that trainers and engines of one host both see: files in /dev/shm, or memory of the device by its IPC."""

    folder: str
    """A short path, the same for all trainers and engines of the host and for them alone."""

    @property
    def delivers(self) -> bool:
        """False: a filled slot is where the engines read it."""
        return False

    @property
    def in_place(self) -> bool:
        """False: they copy from slots."""
        return False

    def engines(self, on_node: int) -> int:
        """Engines of the node."""
        return on_node

    def senders(
        self, rank: int, nodes: Sequence[list[int]], groups: Sequence[list[int]]
    ) -> tuple[list[int], list[int]]:
        """The nodes that hold models together with this rank's, and the ranks of its own node."""
        return next(group for group in groups if rank in group), next(node for node in nodes if rank in node)

    def parties(self) -> HostParties:
        """Parties of this host."""
        return HostParties(self.folder)

    def make_sender(self, trainer: int, plan: SyncPlan, exchange: Exchange | None, held: Held) -> Sender:
        """See `Route`."""
        return HostSender(self.parties(), trainer, plan, exchange)

    def make_receiver(self, device: Device, names: Sequence[str], slot_bytes: int, deadline: float) -> Receiver:
        """See `Route`."""
        if not device.own_memory:
            return HostReceiver(SharedMemory.attach(names, slot_bytes))
        return HostReceiver(DeviceIpc.open(device, self.parties().find_device(device.identity(), deadline), slot_bytes))

    def to_json(self) -> str:
        """Text that `route_from` reads."""
        return json.dumps({"kind": type(self).__name__, **asdict(self)})


@dataclass(frozen=True, slots=True)
class InPlaceRoute(HostRoute):
    """No slots: engines of the host copy from the trainers' own parameters, each device's from those that are there."""

    @property
    def in_place(self) -> bool:
        """True."""
        return True

    def make_sender(self, trainer: int, plan: SyncPlan, exchange: Exchange | None, held: Held) -> InPlaceSender:
        """See `Route`."""
        return InPlaceSender(self.parties(), trainer, plan, exchange, held)

    def make_receiver(self, device: Device, names: Sequence[str], slot_bytes: int, deadline: float) -> InPlaceReceiver:
        """See `Route`."""
        return InPlaceReceiver(self.parties(), device, deadline)


@dataclass(frozen=True, slots=True)
class NetworkRoute(ABC):
    """To engines that do not see the trainers' memory: they meet at a TCP store of the first sending trainer."""

    meeting: NetworkMeeting

    @classmethod
    def made(cls, meeting: NetworkMeeting, disk: Path) -> NetworkRoute:
        """The route of a job.

        Args:
            meeting: where its members meet.
            disk: folder that all nodes see, of this attempt's routes alone.
        """
        del disk
        return cls(meeting)

    @property
    def delivers(self) -> bool:
        """True: each engine's worker has slots of its own."""
        return True

    @property
    def in_place(self) -> bool:
        """False: nobody else sees the trainers' memory."""
        return False

    def engines(self, on_node: int) -> int:
        """All that meet there."""
        return self.meeting.engines

    def senders(
        self, rank: int, nodes: Sequence[list[int]], groups: Sequence[list[int]]
    ) -> tuple[list[int], list[int]]:
        """The first nodes that hold a whole model, and the ranks of the very first."""
        return groups[0], nodes[0]

    def at(self, address: str) -> Self:
        """The same route as a process on the node with this address takes it."""
        return replace(self, meeting=replace(self.meeting, address=address))

    def parties(self) -> NetworkParties:
        """Parties of all hosts."""
        return NetworkParties(self.meeting)

    def make_sender(self, trainer: int, plan: SyncPlan, exchange: Exchange | None, held: Held) -> NetworkSender:
        """See `Route`."""
        return NetworkSender(self.carrier, self.parties(), trainer, plan, exchange)

    def make_receiver(self, device: Device, names: Sequence[str], slot_bytes: int, deadline: float) -> Receiver:
        """See `Route`."""
        slots: Slots = HostMemory.private(slot_bytes)
        if device.own_memory:
            place = device.torch_device
            memory = [torch.empty(slot_bytes, dtype=torch.uint8, device=place) for _ in range(SLOT_COUNT)]
            slots = DeviceIpc(device, memory)
        return NetworkReceiver(self.carrier, self.parties(), device, slots)

    @abstractmethod
    def carrier(self, place: Place, version: int, deadline: float) -> Carrier:
        """Become a member of what brings buckets.

        Args:
            place: of this member.
            version: the sync that it is made in.
            deadline: latest return (`time.monotonic()`).

        Raises:
            WeightSyncError: not all members came in time, or the sync was ended from outside meanwhile.
        """

    def to_json(self) -> str:
        """Text that `route_from` reads."""
        return json.dumps({"kind": type(self).__name__, **asdict(self)})


@dataclass(frozen=True, slots=True)
class BroadcastRoute(NetworkRoute):
    """A broadcast from the first sending trainer: HCCL, NCCL or gloo."""

    def carrier(self, place: Place, version: int, deadline: float) -> Broadcast:
        """The process group, made in the first sync and kept."""
        return Broadcast.join(place, version, deadline)


@dataclass(frozen=True, slots=True)
class DiskRoute(NetworkRoute):
    """Files of a folder that all nodes see."""

    folder: str
    """The meeting's alone."""

    @classmethod
    def made(cls, meeting: NetworkMeeting, disk: Path) -> DiskRoute:
        """With a new folder of its own below `disk`, which its first member makes."""
        return cls(meeting, str(disk / secrets.token_hex(8)))

    def carrier(self, place: Place, version: int, deadline: float) -> SharedDisk:
        """The files of one sync."""
        return SharedDisk(Path(self.folder), version, place.slots, deadline, first=place.member == ROOT)


_HOST_ROUTES = {WeightTransport.AUTO: HostRoute, WeightTransport.IN_PLACE: InPlaceRoute}


def host_route(transport: WeightTransport) -> type[HostRoute]:
    """The route of a transport between trainers and engines of one host."""
    return _HOST_ROUTES.get(transport, HostRoute)


_NETWORK_ROUTES = {
    WeightTransport.AUTO: f"{__name__}:BroadcastRoute",
    WeightTransport.DISK: f"{__name__}:DiskRoute",
}
"""Class of each transport's route to engines that do not see the trainers' memory; loaded when a job has it."""


def network_route(transport: WeightTransport) -> type[NetworkRoute]:
    """The route of a transport over a network."""
    return _loaded(_NETWORK_ROUTES[transport])


def _loaded(path: str) -> type[NetworkRoute]:
    module, _, name = path.partition(":")
    kind: type[NetworkRoute] = getattr(importlib.import_module(module), name)
    return kind


def route_from(text: str) -> Route:
    """The route that `to_json` wrote."""
    values: dict[str, object] = json.loads(text)
    name = values.pop("kind")
    for kind in _HOST_ROUTES.values():
        if name == kind.__name__:
            return TypeAdapter(kind).validate_python(values)
    (path,) = [path for path in _NETWORK_ROUTES.values() if path.endswith(f":{name}")]
    return TypeAdapter(_loaded(path)).validate_python(values)
