"""Kinds of devices by hardware profile, for processes that have none themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from rljob_api.profiles import PROFILES
from rljob_api.spec import Profile, ResourcesSpec
from rljob_worker.devices.select import COMPUTE_VARIABLE


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Properties of a kind of device, for a driver."""

    name: str
    """`cpu`, `npu` or `cuda`, as `Device.name`."""
    ray_resource: str | None = None
    """Ray's resource that counts them; None where CPUs stand for them."""
    visible_variable: str | None = None
    """Variable in which Ray tells a process which ones are its own, and a process tells its library."""


CPU = DeviceKind("cpu")
NPU = DeviceKind("npu", "NPU", "ASCEND_RT_VISIBLE_DEVICES")
CUDA = DeviceKind("cuda", "GPU", "CUDA_VISIBLE_DEVICES")
_KINDS = {kind.name: kind for kind in (CPU, NPU, CUDA)}


def kind_of(profile: Profile) -> DeviceKind:
    """Kind of the devices that a profile names."""
    return _KINDS[PROFILES[profile].kind]


def device_kind(resources: ResourcesSpec) -> DeviceKind:
    """Kind of a job's devices; the CPU for any profile where `RLJOB_COMPUTE_DEVICE` says so."""
    kind = CPU if os.environ.get(COMPUTE_VARIABLE) == "cpu" else kind_of(resources.profile)
    if kind is CPU:
        return CPU
    return replace(kind, ray_resource=resources.overrides.ray_resource or kind.ray_resource)
