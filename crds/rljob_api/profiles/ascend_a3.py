"""Atlas A3 servers: two dies a package, each of which Kubernetes counts as a device."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.profiles.ascend_a2 import PROFILE as ASCEND_A2
from rljob_api.profiles.base import MindCluster

PROFILE = replace(
    ASCEND_A2,
    name="ascend-a3",
    order=20,
    chip="910C",
    # Atlas 800T A3: 8 packages of two devices.
    devices_per_node=16,
    cpu_per_device=12,
    # SuperPoD nodes are labelled module-a3-16-super-pod: `overrides.nodeSelector`.
    node_selector={"accelerator-type": "module-a3-16"},
    mind_cluster=MindCluster(
        visible_devices_annotation="huawei.com/Ascend910",
        # MindCluster: A3 pods carry the same label as A2's; chip2-node16 is the 800T A3.
        ring_controller="ascend-910b",
        schedule_policy="chip2-node16",
        super_pods=True,
        # A package at a time.
        multiple=2,
    ),
)
