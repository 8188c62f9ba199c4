"""Messages that come several at once, in parts, or not whole."""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from rljob_worker.confined.messages import MessageReader, NoMessageError


@pytest.fixture
def ends() -> Iterator[tuple[MessageReader, Connection]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield MessageReader(ours), theirs


def framed(*messages: object) -> bytes:
    """Messages in the form in which `Connection.send_bytes` writes them."""
    texts = [json.dumps(message).encode() for message in messages]
    return b"".join(struct.pack("!i", len(text)) + text for text in texts)


def written(connection: Connection, parts: Sequence[bytes]) -> threading.Thread:
    """Writes all parts, however much of them the other side has read."""

    def write() -> None:
        for part in parts:
            left = part
            while left:
                left = left[os.write(connection.fileno(), left) :]

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_what_came_together_is_taken_together(ends: tuple[MessageReader, Connection]) -> None:
    reader, theirs = ends
    sent = [[number, "stepped"] for number in range(50)]
    theirs.send_bytes(json.dumps(["first"]).encode())
    assert list(reader.messages()) == [["first"]]
    os.write(theirs.fileno(), framed(*sent))
    assert list(reader.messages()) == sent
    os.write(theirs.fileno(), framed(*sent))
    assert [reader.read() for _ in sent] == sent


@pytest.mark.parametrize("cut", [1, 3, 4, 9, 15, 16, 18, 20])
def test_a_message_of_which_a_part_is_there_is_waited_for(ends: tuple[MessageReader, Connection], cut: int) -> None:
    reader, theirs = ends
    whole = framed([1, "one"], [2, "two"])
    os.write(theirs.fileno(), whole[:cut])
    messages = reader.messages()
    thread = written(theirs, [whole[cut:]])
    found = [next(messages)]
    found += messages
    # The second comes with the first, or is the next to be read.
    found += [] if len(found) == 2 else [reader.read()]
    thread.join()
    assert found == [[1, "one"], [2, "two"]]


def test_long_messages_come_in_parts(ends: tuple[MessageReader, Connection]) -> None:
    reader, theirs = ends
    sent = [["a" * 300_000], ["b"], ["c" * 70_000], ["d"]]
    thread = written(theirs, [framed(*sent)])
    found: list[object] = []
    while len(found) < len(sent):
        found += reader.messages()
    thread.join()
    assert found == sent


@pytest.mark.parametrize("wrong", [b"\x00\x00\x00\x02{]", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x02[]"])
def test_what_stands_before_a_wrong_message_counts(ends: tuple[MessageReader, Connection], wrong: bytes) -> None:
    reader, theirs = ends
    os.write(theirs.fileno(), framed([1], [2]) + wrong + framed([3]))
    messages = reader.messages()
    assert [next(messages), next(messages)] == [[1], [2]]
    with pytest.raises(NoMessageError):
        next(messages)


def test_an_end_is_told_and_so_is_a_message_of_no_size(ends: tuple[MessageReader, Connection]) -> None:
    reader, theirs = ends
    os.write(theirs.fileno(), struct.pack("!i", -5) + b"abcde")
    with pytest.raises(EOFError, match="a message of -5 bytes"):
        list(reader.messages())
    os.write(theirs.fileno(), framed([1]) + b"\x00\x00")
    theirs.close()
    messages = reader.messages()
    assert next(messages) == [1]
    with pytest.raises(EOFError, match="the process has ended"):
        next(messages)
    with pytest.raises(EOFError, match="the process has ended"):
        reader.read()
