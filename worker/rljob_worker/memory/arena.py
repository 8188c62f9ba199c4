"""CPU memory saver: tensors in ranges whose pages are given away while asleep.

Tag `backup` keeps its contents: the pages move, without a copy, to a backup range that `backup_view` reads.
Tag `discard` drops its pages; its tensors read zero after `resume`. While paused both ranges have no access at all, so
that touching a sleeping tensor ends the process with SIGSEGV (a system call that is handed one fails with EFAULT).

Processes are to be started by spawn or exec: a forked child does not get the ranges, and ends when it touches them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from enum import StrEnum

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rljob_worker.memory.arena_dispatch import ArenaDispatchMode, strided_bytes
from rljob_worker.memory.ranges import BackupRange, DiscardRange, PageRange
from rljob_worker.memory.rollback import all_or_nothing
from rljob_worker.memory.states import MemorySaverBroken, TransitionRefused
from rljob_worker.memory.virtual import HUGE_PAGE, VirtualMemory, round_up


class Tag(StrEnum):
    """Treatment of a tensor's contents while the arena is paused."""

    BACKUP = "backup"
    DISCARD = "discard"


class Arena:
    """Memory for tensors that sleep; see the module docstring for what the tags mean.

    `reserve_bytes` is address space for each tag, not memory. A dead tensor's block is reused by later tensors of the
    same tag, lowest address first, and the pages of what is free are given back at the next `pause`: the memory held
    is bounded by the highest use. All methods may be called from any thread, under one lock; while paused no thread may
    touch arena tensors. Raises OSError when address space is short or the kernel cannot move pages (Linux < 5.7).
    """

    def __init__(self, reserve_bytes: int = 64 * 1024**3, *, memory: VirtualMemory | None = None) -> None:
        if reserve_bytes <= 0:
            raise ValueError(f"reserve_bytes: {reserve_bytes} is not positive")
        memory = memory or VirtualMemory()
        capacity = round_up(reserve_bytes, HUGE_PAGE)
        self._keep = BackupRange(memory, capacity)
        self._drop = DiscardRange(memory, capacity)
        self._ranges: dict[Tag, PageRange] = {Tag.BACKUP: self._keep, Tag.DISCARD: self._drop}
        self._lock = threading.RLock()
        self._paused = False
        self._broken: str | None = None
        self._closed = False
        self._open_regions = 0
        self._local = threading.local()

    # Placement

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, tag: str = Tag.BACKUP, *, zero: bool = True
    ) -> torch.Tensor:
        """Contiguous tensor of `shape`, zero-filled unless `zero` is False. MemoryError when the range is full."""
        strides = torch.empty(tuple(shape), device="meta").stride()
        return self.allocate_strided(shape, strides, dtype, tag, zero=zero)

    def allocate_strided(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, tag: str, *, zero: bool = False
    ) -> torch.Tensor:
        """Do `allocate` with strides in elements. A tensor without elements has no memory and is an ordinary one."""
        nbytes = strided_bytes(shape, strides, dtype)
        # The lock covers the filling: a pause on another thread must not come between.
        with self._lock, _disable_current_modes():
            if nbytes == 0:
                return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
            storage, fresh = self._new_storage(nbytes, Tag(tag))
            tensor = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))
            # Fresh pages come zeroed from the kernel; leaving them alone keeps them unallocated until they are used.
            return tensor.zero_() if zero and not fresh else tensor

    def _new_storage(self, nbytes: int, tag: Tag) -> tuple[torch.UntypedStorage, bool]:
        with self._lock:
            self._require_active("allocate")
            room = self._ranges[tag]
            room.collect()
            try:
                offset, fresh = room.blocks.allocate(nbytes)
            except MemoryError as error:
                raise MemoryError(f"memory arena, tag {tag}: {error}") from None
            try:
                room.commit(room.blocks.top)
            except OSError:
                room.blocks.free(offset)
                raise
            buffer = (ctypes.c_uint8 * nbytes).from_address(room.base + offset)
            weakref.finalize(buffer, room.freed.append, offset).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage(), fresh

    @contextlib.contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """Tensors that torch makes on this thread's CPU inside the block lie in the arena; views keep their storage.

        Nested regions: the inner tag counts. Meant for construction (models, flat buffers, optimizer state), not for
        training steps: every new tensor, temporaries included, is placed. Refused while paused, and `pause` is refused
        while a region is open on any thread.
        """
        tags: list[Tag] = self._local.__dict__.setdefault("tags", [])
        chosen = Tag(tag)
        with self._lock:
            self._require_active("open a region")
            self._open_regions += 1
        tags.append(chosen)
        try:
            with ArenaDispatchMode(self, lambda: tags[-1]) if len(tags) == 1 else contextlib.nullcontext():
                yield
        finally:
            tags.pop()
            with self._lock:
                self._open_regions -= 1

    def staging(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: outside of regions tensors stay awake anyway."""
        return contextlib.nullcontext()

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory lies in the arena."""
        return self.tag_of(tensor) is not None

    def tag_of(self, tensor: torch.Tensor) -> Tag | None:
        """The tag of an arena tensor; None for any other tensor."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            return None
        address = tensor.data_ptr()
        return next((tag for tag, room in self._ranges.items() if room.offset_of(address) is not None), None)

    # Sleeping

    @property
    def paused(self) -> bool:
        """Whether the pages are away."""
        with self._lock:
            return self._paused

    @property
    def paused_bytes(self) -> int:
        """Bytes of tensors whose pages are away (backup and discard); 0 while active."""
        with self._lock:
            return self.allocated_bytes() if self._paused else 0

    @property
    def backup_bytes(self) -> int:
        """Bytes of tensors that the backup range holds; 0 while active. On the CPU they stay in host memory."""
        with self._lock:
            return self.allocated_bytes(Tag.BACKUP) if self._paused else 0

    @property
    def resume_bytes(self) -> int:
        """Bytes of `discard` tensors: they take free memory again, page by page, as they are touched after `resume`."""
        with self._lock:
            return self.allocated_bytes(Tag.DISCARD) if self._paused else 0

    def allocated_bytes(self, tag: str | None = None) -> int:
        """Bytes of live arena tensors, each rounded up to 64, of one tag or of all."""
        with self._lock:
            chosen = list(self._ranges.values()) if tag is None else [self._ranges[Tag(tag)]]
            for room in chosen:
                room.collect()
            return sum(room.blocks.used for room in chosen)

    def resident_bytes(self) -> int:
        """Bytes of physical memory behind the arena's own ranges (the backup apart), by /proc/self/smaps."""
        return sum(room.resident_bytes() for room in self._ranges.values())

    def backup_resident_bytes(self) -> int:
        """Bytes of physical memory behind the backup addresses, by /proc/self/smaps."""
        return self._keep.backup_resident_bytes()

    def pause(self) -> None:
        """Move `backup` pages away, drop `discard` pages, close both ranges; nothing when already paused.

        OSError with the arena as before when a step fails; MemorySaverBroken when it could not be put back;
        TransitionRefused while a region is open.
        """
        with self._lock:
            self._require_usable("pause")
            if self._paused:
                return
            if self._open_regions:
                raise TransitionRefused(f"pause: {self._open_regions} regions of the memory arena are still open")
            self._keep.collect()
            self._drop.collect()
            with self._marking_broken(), all_or_nothing("memory arena: pause") as rollback:
                self._keep.sleep(rollback)
                self._drop.sleep(rollback)
            self._paused = True

    def resume(self) -> None:
        """Bring the pages back; nothing when active. Errors as for `pause`."""
        with self._lock:
            self._require_usable("resume")
            if not self._paused:
                return
            with self._marking_broken(), all_or_nothing("memory arena: resume") as rollback:
                self._drop.wake(rollback)
                self._keep.wake(rollback)
            self._paused = False

    @contextlib.contextmanager
    def _marking_broken(self) -> Iterator[None]:
        try:
            yield
        except MemorySaverBroken as error:
            self._broken = str(error)
            raise

    # Reading while asleep

    def backup_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read-only view [same shape, dtype, strides] of a sleeping `backup` tensor; valid until `resume`.

        Writing to it, or touching it after `resume`, ends the process. ValueError for a tensor of tag `discard` or from
        outside the arena; TransitionRefused while active.
        """
        with self._lock:
            if not self._paused:
                raise TransitionRefused("backup_view needs a PAUSED memory arena; it is ACTIVE: read the tensor itself")
            if tensor.numel() == 0:
                return tensor
            tag = self.tag_of(tensor)
            if tag is not Tag.BACKUP:
                where = "was allocated with tag discard" if tag else "is not in the arena"
                raise ValueError(f"backup_view: the tensor {where}, it has no backup; allocate it with tag backup")
            offset = tensor.data_ptr() - self._keep.base
            nbytes = strided_bytes(tensor.shape, tensor.stride(), tensor.dtype)
        buffer = (ctypes.c_uint8 * nbytes).from_address(self._keep.backup_base + offset)
        with _disable_current_modes():
            storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.size(), tensor.stride())

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """`backup_view(tensor)` for a sleeping arena tensor, else the tensor itself, detached."""
        with self._lock:
            return self.backup_view(tensor) if self._paused and self.contains(tensor) else tensor.detach()

    # Life

    def close(self) -> None:
        """Unmap everything. TransitionRefused while tensors still live in the arena; nothing when already closed."""
        with self._lock:
            if self._closed:
                return
            self.allocated_bytes()
            if live := sum(room.blocks.live_blocks for room in self._ranges.values()):
                raise TransitionRefused(f"close: {live} tensors still live in the memory arena")
            for room in self._ranges.values():
                room.release()
            self._closed = True

    def _require_usable(self, what: str) -> None:
        if self._closed or self._broken:
            raise MemorySaverBroken(f"{what}: the memory arena is unusable: {self._broken or 'closed'}")

    def _require_active(self, what: str) -> None:
        self._require_usable(what)
        if self._paused:
            raise TransitionRefused(f"{what} needs an ACTIVE memory arena; it is PAUSED")
