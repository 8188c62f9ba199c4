"""CANN's runtime, over the same library that torch_npu is linked to."""

from __future__ import annotations

import ctypes

_LIBRARY = ctypes.CDLL("libascendcl.so")
_LIBRARY.aclrtMemcpy.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
]


def get_device_count() -> tuple[int, int]:
    """Devices and an error number, as all of these give it."""
    count = ctypes.c_uint32()
    error = _LIBRARY.aclrtGetDeviceCount(ctypes.byref(count))
    return count.value, error


def memcpy(to: int, most: int, source: int, count: int, kind: int) -> int:
    error: int = _LIBRARY.aclrtMemcpy(to, most, source, count, kind)
    return error
