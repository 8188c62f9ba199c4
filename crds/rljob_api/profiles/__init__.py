"""Hardware profiles: each file in this folder is one, registered by being here.

Sources, named at each value:
  MindCluster      Ascend/mind-cluster at 22bb3d9: device plugin, Docker runtime, scheduler and their documentation
  vllm-ascend CI   tests/e2e/nightly/multi_node/scripts of vllm-project/vllm-ascend, 2026-08
  ROLL             its Ascend guide of 2026-04-27 (docker run lines and environment for A2 and A3)
  vime 255         colocated GRPO on 8 x 910B1, vllm-project/vime issue 255
  torch_npu        Ascend/pytorch, docs/zh/environment_variable_reference, 7.3.0
  CANN             hiascend.com, environment variable reference of CANN 8.5 and 9.0
  chosen           no source; a value that leaves room on the usual server
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from rljob_api.profiles.base import HardwareProfile, HostMount, Kind, LogLevel, MindCluster, Tuning

__all__ = ["PROFILES", "HardwareProfile", "HostMount", "Kind", "LogLevel", "MindCluster", "Tuning"]


def _profiles() -> Mapping[str, HardwareProfile]:
    found = []
    for module in pkgutil.iter_modules(__path__):
        if module.name == "base":
            continue
        profile: HardwareProfile = importlib.import_module(f"{__name__}.{module.name}").PROFILE
        if profile.name != module.name.replace("_", "-"):
            raise ValueError(f"{module.name}.py: its profile is called {profile.name!r}; both must have one name")
        found.append(profile)
    return MappingProxyType({profile.name: profile for profile in sorted(found, key=lambda p: (p.order, p.name))})


PROFILES = _profiles()
"""Name -> profile, in the order of `HardwareProfile.order`."""
