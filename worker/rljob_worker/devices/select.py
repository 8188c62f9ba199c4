"""From a profile or device name to a device."""

from __future__ import annotations

from rljob_worker.devices.base import Device
from rljob_worker.devices.cpu import CpuDevice

_BUILT = ("cpu",)
_LATER = ("npu", "cuda", "ascend-a2", "ascend-a3", "ascend-950", "cce", "hami")


def get_device(profile: str, index: int = 0) -> Device:
    """Device `index` of the hardware profile (`spec.resources.profile`) or device kind `profile`.

    ValueError for a device that is not built yet, an unknown name, or a negative index.
    """
    if index < 0:
        raise ValueError(f"device index: {index} is negative")
    if profile in _LATER:
        raise ValueError(f"resources.profile: {profile!r} is not built yet; allowed now: {', '.join(_BUILT)}")
    if profile not in _BUILT:
        known = ", ".join((*_BUILT, *_LATER))
        raise ValueError(f"resources.profile: {profile!r} is no known profile; known: {known}")
    return CpuDevice(index)
