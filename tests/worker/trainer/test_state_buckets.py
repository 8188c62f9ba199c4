"""Buckets through two buffers, whatever a device's queues do first."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import pytest
import torch
from support.brought import Brought
from torch import Tensor

from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.devices.overlap import InTurn, Mark, TwoStreams
from rljob_worker.trainer import state_buckets
from rljob_worker.trainer.state_buckets import buckets, update_through_buffers

CPU = torch.device("cpu")
SIZES = [300, 500, 900, 20, 30, 1500, 700, 200, 10]
BUCKET = 1000


@dataclass
class Reached:
    """A mark of `AnyOrder`."""

    done: bool = False


Work = tuple[Callable[[], None], Reached | None, Reached]


@dataclass
class AnyOrder:
    """Does, at the end, what two queues hold in an order that chance decides and marks allow.

    Attributes:
        together: times that a copy was chosen where both queues might have gone on.
    """

    chance: random.Random
    together: int = 0
    computed: deque[Work] = field(default_factory=deque)
    copied: deque[Work] = field(default_factory=deque)

    def compute(self, work: Callable[[], None], after: Mark | None) -> Mark:
        return self._queue(self.computed, work, after)

    def copy(self, work: Callable[[], None], after: Mark | None) -> Mark:
        return self._queue(self.copied, work, after)

    def finish(self) -> None:
        while queues := [queue for queue in (self.computed, self.copied) if queue]:
            free = [queue for queue in queues if queue[0][1] is None or queue[0][1].done]
            assert free, "each queue waits for the other"
            chosen = self.chance.choice(free)
            self.together += len(free) == 2 and chosen is self.copied
            work, _, mark = chosen.popleft()
            work()
            mark.done = True

    @staticmethod
    def _queue(queue: deque[Work], work: Callable[[], None], after: Mark | None) -> Mark:
        mark = Reached()
        queue.append((work, cast("Reached | None", after), mark))
        return cast("Mark", mark)


def homes() -> list[list[Tensor]]:
    places = list(buckets(SIZES))
    assert [sum(SIZES[place]) for place in places] == [800, 950, 1500, 910]
    return [[torch.full((sum(SIZES[place]),), float(i)), torch.arange(float(i + 1))] for i, place in enumerate(places)]


def grow(number: int, here: list[Tensor]) -> None:
    here[0].mul_(2).add_(number)
    here[1].add_(here[0].sum())


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_buckets, "BUCKET_ELEMENTS", BUCKET)


def test_any_order_that_a_device_may_take_gives_the_same_bits() -> None:
    expected, together = homes(), 0
    for number, bucket in enumerate(expected):
        grow(number, bucket)
    for seed in range(60):
        found, overlap = homes(), AnyOrder(random.Random(seed))
        update_through_buffers(found, grow, CPU, lambda overlap=overlap: overlap)  # type: ignore[misc]
        for ours, right in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, right)), seed
        together += overlap.together
    assert together > 60, "copies go on beside updates"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_no_more_than_two_buckets_are_there(count: int) -> None:
    found = homes()[:count]
    with Brought() as brought:
        update_through_buffers(found, grow, CPU, CpuDevice().overlap)
    # Buckets of an even number share one buffer, the others the other one.
    rooms = [max((sum(t.nbytes for t in bucket) for bucket in found[first::2]), default=0) for first in (0, 1)]
    assert sum(rooms) <= brought.peak <= sum(rooms) + 4 * 4


class Ended(InTurn):
    """Counts how often it was finished."""

    count = 0

    def finish(self) -> None:
        self.count += 1


def test_an_error_in_an_update_is_raised_when_nothing_is_under_way() -> None:
    overlap = Ended()

    def fail(number: int, here: list[Tensor]) -> None:
        assert not overlap.count
        raise RuntimeError(f"bucket {number}")

    with pytest.raises(RuntimeError, match="bucket 0"):
        update_through_buffers(homes(), fail, CPU, lambda: overlap)
    assert overlap.count == 1


class Log:
    """`torch.cuda`, as far as `TwoStreams` asks it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.on = "current"

    def current_stream(self, device: int) -> LoggedStream:
        return LoggedStream(self, "current")

    def Stream(self, device: int) -> LoggedStream:
        return LoggedStream(self, "beside")

    def stream(self, stream: LoggedStream) -> LoggedStream:
        return stream


@dataclass
class LoggedStream:
    log: Log
    name: str
    marks: int = 0

    def __enter__(self) -> None:
        self.log.on = self.name

    def __exit__(self, *_: object) -> None:
        self.log.on = "current"

    def wait_stream(self, stream: LoggedStream) -> None:
        self.log.said.append(f"{self.name} waits for {stream.name}")

    def synchronize(self) -> None:
        self.log.said.append(f"host waits for {self.name}")

    def record_event(self) -> LoggedMark:
        self.marks += 1
        return LoggedMark(self, self.marks)


@dataclass
class LoggedMark:
    of: LoggedStream
    number: int

    def wait(self, stream: LoggedStream) -> None:
        self.of.log.said.append(f"{stream.name} waits for {self.of.name} {self.number}")


def test_two_streams_wait_for_each_others_marks_alone() -> None:
    log = Log()
    streams = TwoStreams(log, 0)  # type: ignore[arg-type]

    def work(name: str) -> None:
        log.said.append(f"{name} on {log.on}")

    loaded = streams.copy(partial(work, "load"), None)
    updated = streams.compute(partial(work, "update"), loaded)
    streams.copy(partial(work, "store"), updated)
    streams.finish()
    assert log.said == [
        "beside waits for current",
        "load on beside",
        "current waits for beside 1",
        "update on current",
        "beside waits for current 1",
        "store on beside",
        "host waits for current",
        "host waits for beside",
    ]
