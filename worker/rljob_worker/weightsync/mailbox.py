"""Small messages among the parties of a weight sync, over ZeroMQ."""

from __future__ import annotations

import hmac
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from rljob_worker.errors import WeightSyncError

_LINGER_MILLISECONDS = 500
_LARGEST_MESSAGE = 64 * 2**20
"""Far above what lists the pieces of a bucket; what a stranger sends is not held in memory without end."""
ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Message:
    """Message of one peer to another about one sync."""

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


class Endpoints(Protocol):
    """Addresses of the peers' inboxes."""

    def bind(self, inbox: zmq.Socket[bytes]) -> None:
        """Open one's own, so that the others can find it."""
        ...

    def address(self, peer: str) -> str | None:
        """A peer's, as ZeroMQ has it; None while it is not known."""
        ...


class Mailbox:
    """One peer's inbox, and a way into every other peer's; for one thread.

    Messages from one peer arrive in order. On one host those for peers that are not there yet wait for them.

    Args:
        name: of this peer.
        peers: all peers' names; this one may be among them.
        endpoints: where their inboxes are.
        secret: what the peers know and nobody else, where others can reach the inbox: each message carries a code of
            it, and those without are as if they never came. Empty where nobody else can.
    """

    def __init__(self, name: str, peers: Iterable[str], endpoints: Endpoints, secret: str = "") -> None:
        self.name = name
        self._endpoints, self._secret = endpoints, secret.encode()
        self._code_bytes = len(self._code(b""))
        self._context = zmq.Context()
        self._ahead: deque[Message] = deque()
        self._peers = [peer for peer in peers if peer != name]
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._inbox: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._inbox.maxmsgsize = _LARGEST_MESSAGE
        self._inbox.ipv6 = True
        endpoints.bind(self._inbox)

    def send(self, peers: Iterable[str], kind: str, sync: int, **body: object) -> None:
        """Queue a message to each of the peers; WeightSyncError when one is not there or has long stopped reading."""
        content = json.dumps({"kind": kind, "sender": self.name, "sync": sync, "body": body}).encode()
        for peer in peers:
            try:
                self._outbox(peer).send(self._code(content) + content, zmq.NOBLOCK)
            except zmq.Again as error:
                raise WeightSyncError(f"{peer} does not read its messages") from error

    def _outbox(self, peer: str) -> zmq.Socket[bytes]:
        if peer not in self._outboxes:
            address = self._endpoints.address(peer)
            if address is None:
                raise WeightSyncError(f"{peer} is not there")
            outbox: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            outbox.linger = _LINGER_MILLISECONDS
            outbox.ipv6 = True
            outbox.connect(address)
            self._outboxes[peer] = outbox
        return self._outboxes[peer]

    def _code(self, content: bytes) -> bytes:
        return hmac.digest(self._secret, content, "sha256") if self._secret else b""

    def abort(self, sync: int, reason: str) -> None:
        """Tell everybody that this sync is over; peers that cannot be reached run into their deadline."""
        for peer in self._peers:
            try:
                self.send([peer], ABORT, sync, reason=reason)
            except WeightSyncError:
                continue

    def receive(self, sync: int, deadline: float, awaited: Callable[[], str]) -> Message:
        """The next message of this sync; those of earlier ones are dropped, those of later ones kept.

        Args:
            sync: number of the running one: its version.
            deadline: latest return, in seconds of `time.monotonic()`.
            awaited: names the peers that have to act, for the error.

        Raises:
            WeightSyncError: the deadline passed, a peer aborted the sync, or a message is not readable.
        """
        message = self._take(sync, lambda: deadline - time.monotonic(), awaited)
        if message is None:
            raise WeightSyncError(f"deadline passed while waiting for {awaited()}")
        return message

    def look(self, sync: int, awaited: Callable[[], str]) -> Message | None:
        """Same as `receive`, but None where nothing is there now."""
        return self._take(sync, lambda: 0.0, awaited)

    def _take(self, sync: int, seconds_left: Callable[[], float], awaited: Callable[[], str]) -> Message | None:
        while (message := self._next(sync, seconds_left)) is not None:
            if message.sync > sync:
                self._ahead.append(message)
            elif message.sync == sync:
                if message.kind == ABORT:
                    raise PeerAborted(
                        f"{message.sender} aborted: {message.body.get('reason')} (here waiting for {awaited()})"
                    )
                return message
        return None

    def _next(self, sync: int, seconds_left: Callable[[], float]) -> Message | None:
        for message in self._ahead:
            if message.sync <= sync:
                self._ahead.remove(message)
                return message
        while True:
            left = seconds_left()
            if not self._inbox.poll(max(0, math.ceil(left * 1000))):
                return None
            received = self._inbox.recv()
            code, content = received[: self._code_bytes], received[self._code_bytes :]
            if hmac.compare_digest(code, self._code(content)):
                return _parse(content)
            if left <= 0:
                return None

    def close(self) -> None:
        """Close all sockets; queued messages get half a second."""
        self._inbox.close(linger=0)
        for outbox in self._outboxes.values():
            outbox.close()
        self._context.term()


class PeerAborted(WeightSyncError):
    """Another peer ended the sync and has notified everybody."""


@contextmanager
def end_for_all(what: str, doing: Callable[[], str], abort: Callable[[str], None]) -> Iterator[None]:
    """Around one party's share of a sync: its end is reported to the others, unless one of them reported it first.

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
