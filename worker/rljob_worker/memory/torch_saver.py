"""Memory saver of npu and cuda: torch_memory_saver unmaps the memory, what must be kept is copied to the host here.

The library's own backup is used only for what is allocated outside of regions (preload mode): it backs up whole
allocator segments, gradients and free blocks among them, its Ascend build has no way to read a backup while asleep, and
its buffers cannot be budgeted before they are there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from rljob_api.spec import MemorySaverMode
from rljob_worker.devices.base import AcceleratorMemory
from rljob_worker.host.memory import HostMemory
from rljob_worker.memory.arena import Tag
from rljob_worker.memory.arena_dispatch import strided_bytes
from rljob_worker.memory.host_copy import HostCopy, piece_sizes
from rljob_worker.memory.saver_library import SaverLibrary
from rljob_worker.memory.states import MemorySaverBroken, TransitionRefused


class HostMemoryShortage(TransitionRefused):
    """Too little host memory to keep the contents of what is to sleep; nothing was changed."""


@dataclass(slots=True)
class _Kept:
    """Memory of a `backup` tensor; it may be dead."""

    storage: StorageWeakRef
    address: int
    nbytes: int
    host: HostCopy | None = None

    def bytes_on_device(self) -> torch.Tensor | None:
        """uint8 [nbytes] over the storage; None when it is dead."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (self.nbytes,), (1,))


class TorchMemorySaver:
    """One rank's sleeping memory on a device; see `SleepingMemory`.

    In preload mode all of torch's device memory sleeps, in torch mode what is made in regions. While paused no thread
    may allocate on the device outside of `staging()`, empty the allocator's cache, or touch what sleeps: the memory is
    unmapped. Use it behind `MemorySaver`, which keeps the library from being called out of turn.
    """

    def __init__(self, library: SaverLibrary, device: AcceleratorMemory, *, host: HostMemory | None = None) -> None:
        self._library = library
        self._device = device
        self._host = host or HostMemory()
        self._pools = {tag: device.new_pool(library.allocator()) for tag in Tag}
        self._staging_pool = device.new_pool()
        self._grown = dict.fromkeys(Tag, 0)
        self._staging_bytes = 0
        self._kept: list[_Kept] = []
        self._staged: list[_Kept] = []
        self._lock = threading.RLock()
        self._open_regions = 0
        self._paused_bytes = 0
        self._paused = False

    @property
    def mode(self) -> MemorySaverMode:
        """Hook in use."""
        return self._library.mode

    @property
    def _everything(self) -> bool:
        return self._library.mode is MemorySaverMode.PRELOAD

    # Placement

    @contextlib.contextmanager
    def region(self, tag: str) -> Iterator[None]:
        """Tensors that this thread makes on the device inside sleep; refused while paused. Regions do not nest."""
        chosen = Tag(tag)
        with self._lock:
            self._require_active("open a region")
            self._open_regions += 1
        recorder = _Recorder(self._device.torch_device.type)
        was, before = self._library.tracking, self._device.reserved_bytes()
        try:
            with self._device.use_pool(self._pools[chosen]), recorder:
                self._library.configure(tag=f"rljob-{chosen}".encode(), backup=False)
                self._library.tracking = True
                try:
                    yield
                finally:
                    self._library.tracking = was
                    self._library.configure(backup=self._everything)
        finally:
            with self._lock:
                self._open_regions -= 1
                self._grown[chosen] += self._device.reserved_bytes() - before
                if chosen is Tag.BACKUP:
                    self._kept += recorder.made()

    @contextlib.contextmanager
    def staging(self) -> Iterator[None]:
        """Tensors made inside never sleep, can be exported, and may be made while paused.

        They come from a pool of their own, which lives as long as the process: outside of it torch's allocator would
        hand out cached blocks that are unmapped.
        """
        recorder = _Recorder(self._device.torch_device.type)
        was, before = self._library.tracking, self._device.reserved_bytes()
        self._library.tracking = False
        try:
            with self._device.use_pool(self._staging_pool), recorder:
                yield
        finally:
            self._library.tracking = was
            with self._lock:
                self._staging_bytes += self._device.reserved_bytes() - before
                self._staged = [each for each in self._staged if not each.storage.expired()] + recorder.made()

    # Sleeping

    @property
    def paused(self) -> bool:
        """Whether the memory is away."""
        return self._paused

    @property
    def paused_bytes(self) -> int:
        """Device memory that is away; 0 while active."""
        return self._paused_bytes

    @property
    def backup_bytes(self) -> int:
        """Host memory that holds contents, the library's part estimated from above; 0 while active."""
        with self._lock:
            own = sum(kept.host.host_bytes for kept in self._kept if kept.host)
            return own + self._library_backup_bytes() if self._paused else 0

    @property
    def resume_bytes(self) -> int:
        """Free device memory that `resume` needs; 0 while active."""
        return self._paused_bytes

    def pause(self) -> None:
        """Copy what is kept to the host and unmap everything; nothing when already paused.

        Raises:
            HostMemoryShortage: the host has no room for what is kept; nothing was changed.
            TransitionRefused: a region is open; nothing was changed.
        """
        with self._lock:
            if self._paused:
                return
            if self._open_regions:
                raise TransitionRefused(f"pause: {self._open_regions} regions of the memory saver are still open")
            # What dies while paused must not be given back then, and a free block that is gone needs no waking up.
            self._device.empty_cache()
            live = self._live()
            self._check_host_memory()
            for kept, data in live:
                kept.host = kept.host or HostCopy(kept.nbytes)
                kept.host.store(data)
            del live
            self._device.synchronize()
            leaving = self._tracked_bytes()
            self._library.pause()
            self._paused, self._paused_bytes = True, leaving
            # A model or a checkpoint of another size leaves pinned blocks that no later copy takes.
            self._device.empty_host_cache()

    def resume(self) -> None:
        """Map everything again and copy back what was kept; nothing when active.

        Raises:
            MemorySaverBroken: the memory is back, its contents are not.
        """
        with self._lock:
            if not self._paused:
                return
            self._library.resume()
            try:
                for kept, data in self._live():
                    assert kept.host is not None, "a live tensor was copied when the memory was paused"
                    kept.host.load(data)
                self._device.synchronize()
            except Exception as error:
                raise MemorySaverBroken(f"resume: copying contents back from the host failed: {error}") from error
            self._paused, self._paused_bytes = False, 0

    # Reading while asleep

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, detached; while asleep, for a tensor made in a `backup` region, its copy on the host.

        TransitionRefused for any other device tensor while asleep.
        """
        with self._lock:
            if not self._paused or tensor.device.type != self._device.torch_device.type or tensor.numel() == 0:
                return tensor.detach()
            address = tensor.untyped_storage().data_ptr()
            if any(each.address == address and not each.storage.expired() for each in self._staged):
                return tensor.detach()
            kept = next((kept for kept in self._kept if kept.address == address and kept.host), None)
        if kept is None or kept.host is None:
            raise TransitionRefused(
                f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is asleep and cannot be read: it was not made "
                "in a region with tag backup"
            )
        strides = tensor.stride()
        span = strided_bytes(tensor.shape, strides, tensor.dtype)
        data = kept.host.read(int(tensor.storage_offset()) * tensor.itemsize, span)
        return data.view(tensor.dtype).as_strided(tensor.shape, strides)

    # Inside

    def _live(self) -> list[tuple[_Kept, torch.Tensor]]:
        pairs = [(kept, kept.bytes_on_device()) for kept in self._kept]
        self._kept = [kept for kept, data in pairs if data is not None]
        return [(kept, data) for kept, data in pairs if data is not None]

    def _tracked_bytes(self) -> int:
        """Device memory that the library would unmap now, as torch's allocator counts it."""
        if self._everything:
            return self._device.reserved_bytes() - self._staging_bytes
        return sum(self._grown.values())

    def _library_backup_bytes(self) -> int:
        """Bytes that the library keeps on the host itself: all tracked memory outside of regions."""
        tracked = self._paused_bytes if self._paused else self._tracked_bytes()
        return max(0, tracked - sum(self._grown.values())) if self._everything else 0

    def _check_host_memory(self) -> None:
        missing = [kept.nbytes for kept in self._kept if kept.host is None]
        own = sum(sum(piece_sizes(nbytes)) for nbytes in missing)
        # The library keeps its buffers once it has them: after the first time they are in use already.
        library = self._library_backup_bytes() if missing else 0
        free = self._host.info().free
        if own + library > free:
            raise HostMemoryShortage(
                f"pause needs {own} bytes of pinned host memory for weights and optimizer and up to {library} bytes "
                f"for the rest of the process's device memory, but {free} bytes are free under the pod's memory limit: "
                "raise the pod's memory, or use more data-parallel ranks on more nodes"
            )

    def _require_active(self, what: str) -> None:
        if self._paused:
            raise TransitionRefused(f"{what} needs an ACTIVE memory saver; it is PAUSED")


class _Recorder(TorchDispatchMode):
    """Notes the memory of tensors that are made on a device."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._found: dict[int, _Kept] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {value.untyped_storage().data_ptr() for value in self._ours((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for value in self._ours(out):
            if value.numel():
                storage = value.untyped_storage()
                if storage.data_ptr() not in given:
                    self._found[storage.data_ptr()] = _Kept(
                        StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()
                    )
        return out

    def made(self) -> list[_Kept]:
        """Objects that still live, each once."""
        return [kept for kept in self._found.values() if not kept.storage.expired()]

    def _ours(self, tree: object) -> Iterator[torch.Tensor]:
        """The tensors on the device; of one that is made of others (a DTensor), which has no memory itself, those."""
        for value in tree_iter(tree):
            if not isinstance(value, torch.Tensor):
                continue
            if is_traceable_wrapper_subclass(value):
                yield from self._ours([getattr(value, name) for name in value.__tensor_flatten__()[0]])
            elif value.device.type == self._device_type:
                yield value
