"""How the processes of a host find each other, by files in the sync's folder, and small messages over ZeroMQ."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import zmq

from rljob_worker.errors import WeightSyncError
from rljob_worker.host.files import write_whole
from rljob_worker.weightsync.plan import SyncPlan

# sun_path of unix(7), without the terminating zero.
_LONGEST_SOCKET_PATH = 107
_LINGER_MILLISECONDS = 500
ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Message:
    """What one peer tells another about one sync."""

    kind: str
    sender: str
    sync: int
    body: dict[str, object] = field(default_factory=dict)


def trainer_name(rank: int) -> str:
    """A trainer's name among the peers; also what errors call it."""
    return f"trainer-{rank}"


def engine_name(index: int) -> str:
    """An engine's name among the peers."""
    return f"engine-{index}"


class Mailbox:
    """One peer's inbox, and a way into every other peer's; for one thread.

    Messages from one peer arrive in order. Those for peers that are not there yet wait for them.
    """

    def __init__(self, folder: str | Path, name: str, peers: Iterable[str]) -> None:
        """Bind `folder/name` and connect to the peers.

        Raises:
            ValueError: the folder's path is too long for a unix socket.
        """
        self.name = name
        self._context = zmq.Context()
        self._ahead: deque[Message] = deque()
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        others = [peer for peer in peers if peer != name]
        addresses = {peer: _address(folder, peer) for peer in [name, *others]}
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._inbox.bind(addresses[name])
        for peer in others:
            outbox: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            outbox.linger = _LINGER_MILLISECONDS
            outbox.connect(addresses[peer])
            self._outboxes[peer] = outbox

    def send(self, peers: Iterable[str], kind: str, sync: int, **body: object) -> None:
        """Queue a message to each of the peers; WeightSyncError when a peer has long stopped reading."""
        content = json.dumps({"kind": kind, "sender": self.name, "sync": sync, "body": body}).encode()
        for peer in peers:
            try:
                self._outboxes[peer].send(content, zmq.NOBLOCK)
            except zmq.Again as error:
                raise WeightSyncError(f"{peer} does not read its messages") from error

    def abort(self, sync: int, reason: str) -> None:
        """Tell everybody that this sync is over; peers that cannot be told run into their deadline."""
        for peer in self._outboxes:
            try:
                self.send([peer], ABORT, sync, reason=reason)
            except WeightSyncError:
                continue

    def receive(self, sync: int, deadline: float, awaited: Callable[[], str]) -> Message:
        """The next message of this sync; those of earlier ones are dropped, those of later ones kept.

        Args:
            sync: number of the running one: its version.
            deadline: latest return, in seconds of `time.monotonic()`.
            awaited: says who has to act, for the error.

        Raises:
            WeightSyncError: the deadline passed, a peer aborted the sync, or a message is not readable.
        """
        while True:
            message = self._next(sync, deadline, awaited)
            if message.sync > sync:
                self._ahead.append(message)
            elif message.sync == sync:
                if message.kind == ABORT:
                    raise PeerAborted(
                        f"{message.sender} aborted: {message.body.get('reason')} (here waiting for {awaited()})"
                    )
                return message

    def _next(self, sync: int, deadline: float, awaited: Callable[[], str]) -> Message:
        for message in self._ahead:
            if message.sync <= sync:
                self._ahead.remove(message)
                return message
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not self._inbox.poll(int(remaining * 1000) + 1):
            raise WeightSyncError(f"deadline passed while waiting for {awaited()}")
        return _parse(self._inbox.recv())

    def close(self) -> None:
        """Close all sockets; queued messages get half a second."""
        self._inbox.close(linger=0)
        for outbox in self._outboxes.values():
            outbox.close()
        self._context.term()


class PeerAborted(WeightSyncError):
    """Another peer ended the sync and has told everybody."""


@contextmanager
def end_for_all(what: str, doing: Callable[[], str], abort: Callable[[str], None]) -> Iterator[None]:
    """Around one party's share of a sync: whatever ends it is told to the others, unless one of them said so first.

    Args:
        what: which share, for the message.
        doing: how far it is.
        abort: tells the others why.

    Raises:
        WeightSyncError: for any error, naming what was done.
    """
    try:
        yield
    except PeerAborted as error:
        raise WeightSyncError(f"{what}: {error}") from error
    except Exception as error:
        reason = f"{what}, {doing()}: {error}"
        abort(reason)
        raise WeightSyncError(reason) from error
    except BaseException as error:
        abort(f"{what} was interrupted: {error!r}")
        raise


def _parse(content: bytes) -> Message:
    try:
        value = json.loads(content)
        return Message(str(value["kind"]), str(value["sender"]), int(value["sync"]), dict(value["body"]))
    except (ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(f"unreadable message: {content[:80]!r}") from error


def _address(folder: str | Path, name: str) -> str:
    path = os.path.join(os.path.abspath(folder), name)
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise ValueError(
            f"{path} has {len(os.fsencode(path))} bytes, and the path of a unix socket can have "
            f"{_LONGEST_SOCKET_PATH}; use a shorter folder for the weight sync, such as a temporary one in /tmp"
        )
    return f"ipc://{path}"


class _PlanFile(TypedDict):
    plan: str
    slots: list[str]


class _DeviceFile(TypedDict):
    device: str
    handles: list[str]


_FILE = "plan.json"
_POLL_SECONDS = 0.005


def run_name(folder: str | Path) -> str:
    """The part of the slots' names that tells runs apart, from the folder's own name."""
    return re.sub(r"[^A-Za-z0-9_.]", ".", Path(folder).name)[:64] or "run"


def publish(folder: str | Path, plan: SyncPlan, slot_names: tuple[str, ...]) -> None:
    """Write plan and slots for the others; they see all of it or nothing."""
    _write(Path(folder) / _FILE, {"plan": plan.to_json(), "slots": slot_names})


def find(folder: str | Path, deadline: float) -> tuple[SyncPlan, tuple[str, ...]]:
    """Wait for plan and slots until `deadline` (`time.monotonic()`); WeightSyncError when they do not come."""
    path = Path(folder) / _FILE
    value: _PlanFile = json.loads(_read(path, deadline, "the first sending trainer did not start"))
    return SyncPlan.from_json(value["plan"]), tuple(value["slots"])


def publish_device(folder: str | Path, identity: str, handles: Sequence[str]) -> None:
    """Write where the slots of one device are."""
    _write(_device_file(folder, identity), {"device": identity, "handles": list(handles)})


def find_device(folder: str | Path, identity: str, deadline: float) -> list[str]:
    """Wait for a device's slots until `deadline`; WeightSyncError when no trainer has that device."""
    path = _device_file(folder, identity)
    value: _DeviceFile = json.loads(_read(path, deadline, f"no trainer on this host has device {identity}"))
    return value["handles"]


def _device_file(folder: str | Path, identity: str) -> Path:
    return Path(folder) / f"device-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _write(path: Path, value: object) -> None:
    write_whole(path, json.dumps(value), durable=False)


def _read(path: Path, deadline: float, missing: str) -> str:
    while not path.exists():
        if time.monotonic() > deadline:
            raise WeightSyncError(f"deadline passed while waiting for {path}: {missing}")
        time.sleep(_POLL_SECONDS)
    return path.read_text()
