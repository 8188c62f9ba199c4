"""From a profile or device name to a device."""

from __future__ import annotations

import os

from rljob_api.profiles import PROFILES
from rljob_api.roles import COMPUTE_VARIABLE
from rljob_worker.devices.accelerator import AcceleratorDevice
from rljob_worker.devices.base import Device
from rljob_worker.devices.cpu import CpuDevice
from rljob_worker.devices.cuda import CudaDevice
from rljob_worker.devices.npu import NpuDevice
from rljob_worker.devices.visible import parse_visible_devices
from rljob_worker.errors import UserError

_KINDS: dict[str, type[AcceleratorDevice]] = {"npu": NpuDevice, "cuda": CudaDevice}
_ACCELERATORS = _KINDS | {name: _KINDS[profile.kind] for name, profile in PROFILES.items() if profile.kind in _KINDS}


def get_device(profile: str, index: int = 0) -> Device:
    """Device `index` of the hardware profile (`spec.resources.profile`) or device kind `profile`.

    `index` counts the job's devices on this node. Where Ray shows the process one device alone, that is the one.

    Raises:
        ValueError: an unknown name, a negative index.
        UserError: the kind's library is missing, or there are fewer devices.
    """
    if index < 0:
        raise ValueError(f"device index: {index} is negative")
    check_profile(profile)
    kind = _ACCELERATORS.get(profile)
    if kind is None or os.environ.get(COMPUTE_VARIABLE):
        return CpuDevice(index)
    variable = kind.visible_devices_variable
    visible = parse_visible_devices(variable, os.environ.get(variable), names_allowed=kind.names_allowed)
    return kind(0 if visible is not None and len(visible) == 1 else index)


def check_profile(profile: str) -> None:
    """Refuse a profile that is unknown (ValueError) or whose library is not installed (UserError)."""
    if profile != "cpu" and profile not in _ACCELERATORS:
        known = ", ".join(("cpu", *_ACCELERATORS))
        raise ValueError(f"spec.resources.profile: {profile!r} is no known profile; known: {known}")
    chosen = os.environ.get(COMPUTE_VARIABLE)
    if chosen not in (None, "", "cpu"):
        raise ValueError(f"{COMPUTE_VARIABLE}: {chosen!r} is no device to compute on; allowed: cpu")
    if profile in _ACCELERATORS and not chosen:
        try:
            _ACCELERATORS[profile].check_installed()
        except UserError as error:
            raise UserError(f"spec.resources.profile: {profile!r} cannot be used here: {error}") from None
