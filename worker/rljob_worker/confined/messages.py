"""Messages of a confined process as the driver reads them: JSON of a bounded size, within a deadline."""

from __future__ import annotations

import json
import os
import select
import struct
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

STALL_SECONDS = 10
"""Seconds that a process may take over one message: half a message must not hold up the others."""
_MAX_ANSWER_BYTES = 2**26
_READ_BYTES = 65536
_SIZE = struct.Struct("!i")
"""Header of a message."""


class NoMessageError(EOFError):
    """A process sent what is no message: it no longer runs what it was started with, or was never meant to."""


class MessageReader:
    """Reads what a process sends by `Connection.send_bytes`.

    It is JSON, since control of the process must not give control of the driver.

    Args:
        connection: to it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def read(self) -> list[Any]:
        """The next message; EOFError when the process has ended, NoMessageError when it sends something else."""
        try:
            return _parsed(self._whole(bytearray()))
        except OSError as error:
            raise EOFError(str(error)) from error

    def messages(self) -> Iterator[list[Any]]:
        """The next message and those that have come behind it, to be taken to the end; errors as of `read`.

        Many short ones take one look at the connection.
        """
        try:
            come, begin = self._more(time.monotonic() + STALL_SECONDS, _READ_BYTES), 0
            while len(come) >= begin + _SIZE.size:
                end = begin + _SIZE.size + _checked_size(come, begin)
                if len(come) < end:
                    break
                yield _parsed(come[begin + _SIZE.size : end])
                begin = end
            rest = bytearray(come[begin:])
            while rest:
                yield _parsed(self._whole(rest))
        except OSError as error:
            raise EOFError(str(error)) from error

    def _whole(self, come: bytearray) -> bytes:
        """The connection's `recv_bytes`, within one deadline: its parts may come a byte at a time.

        Args:
            come: what was read before and begins with it; what stays there begins with the next one.
        """
        until = time.monotonic() + STALL_SECONDS
        return self._part(come, _checked_size(self._part(come, _SIZE.size, until)), until)

    def _part(self, come: bytearray, size: int, until: float) -> bytes:
        while len(come) < size:
            come += self._more(until, min(size - len(come), _READ_BYTES))
        part = bytes(come[:size])
        del come[:size]
        return part

    def _more(self, until: float, most: int) -> bytes:
        left = until - time.monotonic()
        if left <= 0 or not self._poll.poll(1000 * left):
            raise EOFError(f"a message took longer than {STALL_SECONDS} s")
        more = os.read(self._connection.fileno(), most)
        if not more:
            raise EOFError("the process has ended")
        return more


def _checked_size(come: bytes, begin: int = 0) -> int:
    size: int = _SIZE.unpack_from(come, begin)[0]
    if not 0 <= size <= _MAX_ANSWER_BYTES:
        raise EOFError(f"a message of {size} bytes")
    return size


def _parsed(message: bytes) -> list[Any]:
    try:
        # As text: of bytes `loads` asks first in which of five encodings they are.
        parsed = json.loads(message.decode())
    except (ValueError, RecursionError) as error:
        raise NoMessageError(str(error)) from error
    if not isinstance(parsed, list) or not parsed:
        raise NoMessageError("not a list")
    return parsed
