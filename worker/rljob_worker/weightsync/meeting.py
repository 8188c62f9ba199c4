"""Meeting of the parties of a weight sync: on one host by files of a folder, between hosts by a TCP store."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypedDict

import zmq
from torch.distributed import DistError, Store

from rljob_worker.devices.stores import connect_store, serve_store
from rljob_worker.errors import WeightSyncError
from rljob_worker.host.files import write_whole
from rljob_worker.weightsync.mailbox import Mailbox, engine_name, trainer_name
from rljob_worker.weightsync.plan import SyncPlan

# sun_path of unix(7), without the terminating zero.
_LONGEST_SOCKET_PATH = 107
_POLL_SECONDS = 0.005
_LATE = "the first sending trainer did not start"


class Parties(Protocol):
    """One process's view of the others."""

    @property
    def run_name(self) -> str:
        """Name that separates the run's slots in host memory from those of others: letters, digits, `_` and `.`."""
        ...

    def open(self) -> None:
        """Open the place at which the others meet: before anything else, in the first sending trainer."""
        ...

    def publish(self, plan: SyncPlan, slots: Sequence[str]) -> None:
        """Tell the others the plan, and the names of the slots in host memory; they see all of it or nothing."""
        ...

    def find(self, deadline: float) -> tuple[SyncPlan, tuple[str, ...]]:
        """Wait for them until `deadline` (`time.monotonic()`); WeightSyncError when they do not come."""
        ...

    def mailbox(self, name: str, peers: Sequence[str]) -> Mailbox:
        """A peer's mailbox."""
        ...


class _PlanFile(TypedDict):
    plan: str
    slots: list[str]


class _DeviceFile(TypedDict):
    device: str
    handles: list[str]


class HostParties:
    """Finds the others by files, and by sockets that lie in the folder too."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @property
    def run_name(self) -> str:
        """From the folder's own name."""
        return re.sub(r"[^A-Za-z0-9_.]", ".", self._folder.name)[:64] or "run"

    def open(self) -> None:
        """Nothing: the folder is there."""

    def publish(self, plan: SyncPlan, slots: Sequence[str]) -> None:
        """See `Parties`."""
        self._write("plan.json", {"plan": plan.to_json(), "slots": list(slots)})

    def find(self, deadline: float) -> tuple[SyncPlan, tuple[str, ...]]:
        """See `Parties`."""
        value: _PlanFile = json.loads(self._read("plan.json", deadline, _LATE))
        return SyncPlan.from_json(value["plan"]), tuple(value["slots"])

    def mailbox(self, name: str, peers: Sequence[str]) -> Mailbox:
        """See `Parties`; ValueError: the folder's path is too long for a unix socket."""
        return Mailbox(name, peers, _Sockets(self._folder, name))

    def publish_device(self, identity: str, handles: Sequence[str]) -> None:
        """Write where the slots of one device are."""
        self._write(_device_file(identity), {"device": identity, "handles": list(handles)})

    def find_device(self, identity: str, deadline: float) -> list[str]:
        """Wait for a device's slots until `deadline`; WeightSyncError when no trainer has that device."""
        text = self._read(_device_file(identity), deadline, f"no trainer on this host has device {identity}")
        value: _DeviceFile = json.loads(text)
        return value["handles"]

    def publish_memory(self, owner: str, text: str) -> None:
        """Write where the parameters of a trainer, or of the one on a device, are."""
        write_whole(self._folder / _memory_file(owner), text, durable=False)

    def find_memory(self, owner: str, deadline: float) -> str:
        """Wait for that until `deadline`; WeightSyncError when it does not come."""
        return self._read(_memory_file(owner), deadline, f"{owner} has shared no parameters")

    def _write(self, name: str, value: object) -> None:
        write_whole(self._folder / name, json.dumps(value), durable=False)

    def _read(self, name: str, deadline: float, missing: str) -> str:
        path = self._folder / name
        while not path.exists():
            if time.monotonic() > deadline:
                raise WeightSyncError(f"deadline passed while waiting for {path}: {missing}")
            time.sleep(_POLL_SECONDS)
        return path.read_text()


class _Sockets:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def bind(self, inbox: zmq.Socket[bytes]) -> None:
        inbox.bind(self.address(self._name))

    def address(self, peer: str) -> str:
        path = os.path.join(os.path.abspath(self._folder), peer)
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            raise ValueError(
                f"{path} has {len(os.fsencode(path))} bytes, and the path of a unix socket can have "
                f"{_LONGEST_SOCKET_PATH}; use a shorter folder for the weight sync, such as a temporary one in /tmp"
            )
        return f"ipc://{path}"


def _device_file(identity: str) -> str:
    return f"device-{_digest(identity)}.json"


def _memory_file(owner: str) -> str:
    return f"memory-{_digest(owner)}.json"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class NetworkMeeting:
    """A TCP store at the first sending trainer, for engines on other hosts than the trainers.

    The store is unauthenticated: a process that reaches it can block a sync. Messages without the secret's code, the
    trainers' checksums among them, are ignored.
    """

    host: str
    """Address of the trainers' node, on which the first sending trainer opens the store."""
    port: int
    address: str
    """Address of this process's node, which the others reach it at."""
    secret: str
    """The job's."""
    engines: int
    """Number of engines that meet there."""
    workers: int
    """Number of processes of each engine that take weights."""
    seconds: float
    """Time-out of each wait for the store, and of each broadcast."""


class NetworkParties:
    """Finds the others by keys of the store."""

    def __init__(self, meeting: NetworkMeeting) -> None:
        self.meeting = meeting
        self._store: Store | None = None

    @property
    def run_name(self) -> str:
        """From the port, which one run has at a time."""
        return f"port{self.meeting.port}"

    def open(self) -> None:
        """Open the store; OSError when the port is taken."""
        meeting = self.meeting
        self._store = serve_store(meeting.host, meeting.port, timedelta(seconds=meeting.seconds))

    def publish(self, plan: SyncPlan, slots: Sequence[str]) -> None:
        """See `Parties`."""
        value: _PlanFile = {"plan": plan.to_json(), "slots": list(slots)}
        self.store(0.0).set("plan", json.dumps(value))

    def find(self, deadline: float) -> tuple[SyncPlan, tuple[str, ...]]:
        """See `Parties`."""
        value: _PlanFile = json.loads(self._wait_for("plan", deadline, _LATE))
        plan = SyncPlan.from_json(value["plan"])
        for trainer in map(trainer_name, plan.trainers):
            self._wait_for(_inbox(trainer), deadline, f"{trainer} did not start")
        return plan, tuple(value["slots"])

    def mailbox(self, name: str, peers: Sequence[str]) -> Mailbox:
        """See `Parties`."""
        return Mailbox(name, peers, _Ports(self, name), self.meeting.secret)

    def store(self, deadline: float) -> Store:
        """The store, waited for; WeightSyncError when nobody opens it in time."""
        if self._store is None:
            meeting, left = self.meeting, max(0.001, deadline - time.monotonic())
            try:
                self._store = connect_store(meeting.host, meeting.port, timedelta(seconds=left))
            except DistError as error:
                where = f"{meeting.host} port {meeting.port}"
                raise WeightSyncError(f"deadline passed while waiting for {where}: {_LATE}") from error
            self._store.set_timeout(timedelta(seconds=meeting.seconds))
        return self._store

    def _wait_for(self, key: str, deadline: float, missing: str) -> str:
        store = self.store(deadline)
        try:
            store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
            return str(store.get(key).decode())
        except DistError as error:
            raise WeightSyncError(f"deadline passed while waiting for the store's {key}: {missing}") from error


class _Ports:
    """Inboxes at ports that their owners write into the store."""

    def __init__(self, parties: NetworkParties, name: str) -> None:
        self._parties, self._name = parties, name

    def bind(self, inbox: zmq.Socket[bytes]) -> None:
        address = self._parties.meeting.address
        host = f"[{address}]" if ":" in address else address
        port = inbox.bind_to_random_port(f"tcp://{host}")
        store = self._parties.store(time.monotonic() + self._parties.meeting.seconds)
        store.set(_inbox(self._name), f"tcp://{host}:{port}")

    def address(self, peer: str) -> str | None:
        key = _inbox(peer)
        try:
            store = self._parties.store(time.monotonic() + self._parties.meeting.seconds)
            return store.get(key).decode() if store.check([key]) else None
        except DistError:
            # The first trainer is gone, and the store with it.
            return None


def _inbox(name: str) -> str:
    return f"inbox/{name}"


def end_sync(meeting: NetworkMeeting, trainers: int, version: int, reason: str) -> None:
    """Tell the parties of a sync from outside that it is over: one of them is gone, for which they would wait.

    Args:
        meeting: where they meet.
        trainers: how many there are; those that send nothing have no inbox.
        version: the sync.
        reason: what they say of it.

    Raises:
        WeightSyncError: the store cannot be reached.
    """
    peers = [*map(trainer_name, range(trainers)), *map(engine_name, range(meeting.engines))]
    # Nobody answers it: the inbox of its mailbox may be where no other node reaches it.
    parties = NetworkParties(replace(meeting, address="127.0.0.1"))
    box = parties.mailbox("driver", peers)
    try:
        # For those who do not look into their mailboxes just then.
        parties.store(time.monotonic() + meeting.seconds).set(_end(version), reason)
        box.abort(version, reason)
    finally:
        box.close()


def reason_of_end(store: Store, version: int) -> str | None:
    """Why a sync is over that `end_sync` ended, or whose store is gone; None: it goes on."""
    try:
        return str(store.get(_end(version)).decode()) if store.check([_end(version)]) else None
    except DistError as error:
        return f"the store does not answer: {error}"


def _end(version: int) -> str:
    return f"ended/{version}"
