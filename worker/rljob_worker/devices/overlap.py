"""Copies to and from a device beside what it computes: two queues of work, each in the order in which it was given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Mark(Protocol):
    """A place in a queue, which the other one may wait for: an event of `torch.cuda` or `torch.npu`."""

    def wait(self, stream: DeviceStream) -> None:
        """Have what is queued on the stream after this wait."""
        ...


class DeviceStream(Protocol):
    """A stream of `torch.cuda` or `torch.npu`."""

    def wait_stream(self, stream: DeviceStream) -> None: ...  # noqa: D102

    def record_event(self) -> Mark: ...  # noqa: D102

    def synchronize(self) -> None: ...  # noqa: D102


class StreamModule(Protocol):
    """Functions of `torch.cuda` and `torch.npu` that make streams."""

    def Stream(self, device: int) -> DeviceStream: ...  # noqa: D102

    def current_stream(self, device: int) -> DeviceStream: ...  # noqa: D102

    def stream(self, stream: DeviceStream) -> AbstractContextManager[None]: ...  # noqa: D102


class Overlap(Protocol):
    """Two queues of one device."""

    def compute(self, work: Callable[[], None], after: Mark | None) -> Mark | None:
        """Queue work to be computed, once the mark is reached; gives a mark that is reached when it is done."""
        ...

    def copy(self, work: Callable[[], None], after: Mark | None) -> Mark | None:
        """Likewise for copies between the device and pinned memory, which are not to block."""
        ...

    def finish(self) -> None:
        """Wait for all of it."""
        ...


class InTurn:
    """An `Overlap` whose work is done when it is given: a CPU's."""

    def compute(self, work: Callable[[], None], after: Mark | None) -> None:
        """Do it: what it is to come after is done."""
        work()

    copy = compute

    def finish(self) -> None:
        """Nothing is left."""


class TwoStreams:
    """The stream that is current, which computes, and one beside it, which copies.

    What was queued on the current stream before is done before the first copy. Memory that the copies use is to be
    kept until `finish` returns: the allocator sees the current stream alone.
    """

    def __init__(self, module: StreamModule, index: int) -> None:
        self._current, self._beside = module.current_stream(index), module.Stream(index)
        self._on: Callable[[DeviceStream], AbstractContextManager[None]] = module.stream
        self._beside.wait_stream(self._current)

    def compute(self, work: Callable[[], None], after: Mark | None) -> Mark:
        """See `Overlap`."""
        return self._queue(self._current, work, after)

    def copy(self, work: Callable[[], None], after: Mark | None) -> Mark:
        """See `Overlap`."""
        return self._queue(self._beside, work, after)

    def finish(self) -> None:
        """See `Overlap`."""
        self._current.synchronize()
        self._beside.synchronize()

    def _queue(self, stream: DeviceStream, work: Callable[[], None], after: Mark | None) -> Mark:
        if after is not None:
            after.wait(stream)
        with self._on(stream):
            work()
        return stream.record_event()
