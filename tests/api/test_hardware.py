"""Memory of the devices that a profile stands for."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import manifest

from rljob_api.hardware import CHIP_MEMORY_GIB, USABLE_SHARE, device_memory
from rljob_api.profiles import PROFILES
from rljob_api.spec import Profile, RLJobSpec


def spec(profile: str, **overrides: Any) -> RLJobSpec:
    resources = {"profile": profile, "overrides": overrides}
    return RLJobSpec.model_validate(manifest()["spec"] | {"resources": resources})


@pytest.mark.parametrize("profile", Profile)
def test_every_profile_says_what_it_knows(profile: Profile) -> None:
    hardware = PROFILES[profile]
    assert hardware.memory_per_device_gib > hardware.shared_memory_per_device_gib > 0
    memory = device_memory(spec(profile.value))
    assert (memory is None) == (profile in (Profile.CPU, Profile.CUDA))


def test_the_published_910b1_has_61_gib() -> None:
    memory = device_memory(spec("ascend-a2"))
    assert memory is not None
    assert memory.nbytes == 61 * 2**30
    assert "910B1" in memory.source


@pytest.mark.parametrize("chip", ["910B4", "910B4-1", "910C"])
def test_hami_names_the_chip_in_its_resource(chip: str) -> None:
    memory = device_memory(spec("hami", resourceName=f"huawei.com/Ascend{chip}"))
    assert memory is not None
    assert memory.nbytes == int(CHIP_MEMORY_GIB[chip] * USABLE_SHARE * 2**30)
