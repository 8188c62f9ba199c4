"""Memory of one device of a profile, by its chip.

Sources, named at each value:
  HAMi       charts/hami/templates/scheduler/device-configmap.yaml of Project-HAMi/HAMi at 00160eb971 (memoryCapacity)
  vime 255   colocated GRPO on 8 x 910B1, vllm-project/vime issue 255: "~61 GiB HBM per NPU"
  Huawei     Huawei Connect, keynote of 2025-09-18: 950PR 128 GB, 950DT 144 GB
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.profiles import PROFILES
from rljob_api.spec import RLJobSpec

CHIP_MEMORY_GIB: Mapping[str, int] = {
    # HAMi; 910B1 has no entry there, vime 255 used it.
    "910A": 32,
    "910B1": 64,
    "910B2": 64,
    "910B3": 64,
    "910B4": 32,
    "910B4-1": 64,
    # HAMi: one of the two dies of a package, which is what Kubernetes counts as a device.
    "910C": 64,
    # Huawei, as GiB like the older chips'.
    "950PR": 128,
    "950DT": 144,
}
"""Memory of one device by chip, as it is sold."""

USABLE_SHARE = 61 / 64
"""Part of it that processes see, the driver's own share taken off: vime 255, and taken to be alike on other chips."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device."""

    nbytes: int
    """Bytes that processes see of it."""
    source: str
    """Source of the number, for people."""


def device_memory(spec: RLJobSpec) -> DeviceMemory | None:
    """Memory of one of the job's devices; None where the profile does not say which device it is (cuda, cpu).

    With HAMi the resource's name (`resources.overrides.resourceName`, `huawei.com/Ascend910B4`) tells the chip.
    """
    profile = PROFILES[spec.resources.profile]
    chip = profile.chip
    if chip is None:
        return None
    named = (spec.resources.overrides.resource_name or "").rpartition("/")[2].removeprefix("Ascend")
    if named in CHIP_MEMORY_GIB:
        chip = named
    nominal = CHIP_MEMORY_GIB[chip]
    usable = nominal * USABLE_SHARE
    source = f"profile {profile.name}: Ascend {chip}, {nominal} GiB of which {usable:.0f} GiB are usable"
    return DeviceMemory(int(usable * 2**30), source)
