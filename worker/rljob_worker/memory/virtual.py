"""Linux virtual memory through libc: reserve, protect, move and drop private anonymous pages (x86-64 and arm64)."""

from __future__ import annotations

import ctypes
import mmap
import os

HUGE_PAGE = 2 * 1024 * 1024
"""Bytes. Ranges are aligned to it, so that the kernel moves page tables instead of single pages."""

PROT_NONE = 0
PROT_READ = mmap.PROT_READ
PROT_WRITE = mmap.PROT_WRITE

_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MREMAP_MAYMOVE = 1
_MREMAP_FIXED = 2
_MREMAP_DONTUNMAP = 4
_MADV_DONTNEED = 4
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value

_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def _failed(what: str) -> OSError:
    error = ctypes.get_errno()
    return OSError(error, f"{what}: {os.strerror(error)}")


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class VirtualMemory:
    """The five system calls that the arena is made of. Addresses and lengths are bytes, multiples of the page size.

    Every method raises OSError, with the kernel's errno and what was being done, and then has changed nothing.
    """

    def reserve(self, length: int) -> int:
        """Address of `length` bytes, aligned to a huge page, without access and without memory behind them.

        They are not handed to forked children: a fork can never copy a half-moved arena.
        """
        address = _libc.mmap(None, length + HUGE_PAGE, PROT_NONE, _RESERVED, -1, 0)
        if address == _MAP_FAILED:
            raise _failed(f"reserving {length} bytes of address space")
        start = round_up(address, HUGE_PAGE)
        if start > address:
            self.release(address, start - address)
        if tail := address + HUGE_PAGE - start:
            self.release(start + length, tail)
        self._advise(start, length, _MADV_DONTFORK, "keeping the range from forked children")
        return start

    def release(self, address: int, length: int) -> None:
        """Unmap the range."""
        if _libc.munmap(address, length) != 0:
            raise _failed(f"unmapping {length} bytes at {address:#x}")

    def protect(self, address: int, length: int, protection: int) -> None:
        """Set the access rights of the range."""
        if _libc.mprotect(address, length, protection) != 0:
            raise _failed(f"setting protection {protection} on {length} bytes at {address:#x}")

    def move(self, source: int, target: int, length: int) -> None:
        """Move the pages of `source` to `target` without copying; `source` stays mapped, empty.

        What was mapped at `target` is replaced. Needs Linux 5.7.
        """
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        if _libc.mremap(source, length, length, flags, target) == _MAP_FAILED:
            error = _failed(f"moving {length} bytes from {source:#x} to {target:#x} (mremap, needs Linux 5.7)")
            self._keep_reserved(target, length)
            raise error

    def drop(self, address: int, length: int) -> None:
        """Give the pages back; the range reads zero afterwards."""
        self._advise(address, length, _MADV_DONTNEED, "giving pages back")

    def prefer_huge_pages(self, address: int, length: int) -> None:
        """Ask for transparent huge pages; a kernel built without them is left as it is."""
        if os.path.exists("/sys/kernel/mm/transparent_hugepage/enabled"):
            self._advise(address, length, _MADV_HUGEPAGE, "asking for huge pages")

    def _keep_reserved(self, address: int, length: int) -> None:
        # A failed mremap may already have unmapped its target; other threads must not get addresses in the hole.
        if _libc.mmap(address, length, PROT_NONE, _RESERVED | _MAP_FIXED_NOREPLACE, -1, 0) == address:
            self._advise(address, length, _MADV_DONTFORK, "keeping the range from forked children")

    def _advise(self, address: int, length: int, advice: int, what: str) -> None:
        if _libc.madvise(address, length, advice) != 0:
            raise _failed(f"{what}, {length} bytes at {address:#x}")
